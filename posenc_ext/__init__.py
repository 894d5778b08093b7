"""The input layer of a Transformer in one pass: embedding * sqrt(d_model) + sinusoidal positions, without a table."""

from importlib.metadata import PackageNotFoundError, version

from posenc_ext.ops import ops_library  # isort: skip  (first: it loads the compiled half)
from posenc_ext import adapters, functional
from posenc_ext.conventions import CONVENTIONS, Convention
from posenc_ext.decompositions import decompositions
from posenc_ext.errors import check_errors
from posenc_ext.fuse import fuse, unfuse
from posenc_ext.identify import Identified, identify_convention
from posenc_ext.modules import Embeddings, LearnedPositionalEmbedding, PositionalEncoding, TransformerEmbedding
from posenc_ext.reference import get_sinusoidal_positional_encoding
from posenc_ext.vocabulary import Vocabulary

try:
    __version__ = version("posenc_ext")
except PackageNotFoundError:  # imported from a checkout that was not installed
    __version__ = "0.2.0"

__all__ = [
    "CONVENTIONS",
    "Convention",
    "Embeddings",
    "Identified",
    "LearnedPositionalEmbedding",
    "PositionalEncoding",
    "TransformerEmbedding",
    "Vocabulary",
    "adapters",
    "check_errors",
    "decompositions",
    "functional",
    "fuse",
    "get_sinusoidal_positional_encoding",
    "identify_convention",
    "ops_library",
    "unfuse",
]
