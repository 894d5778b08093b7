"""The custom ops from Python: how each is called, differentiated, traced and faked.

Every differentiable op exists twice in C++ (csrc/torch). The raw one (`_embed_fwd`, ...) has no autograd formula. An
eager call that needs no gradient goes straight to it, and one that does goes through a `torch.autograd.Function` around
it, since a formula registered on an op costs several microseconds even when nothing is differentiated. The public one
(`torch.ops.posenc_ext.embed`, ...) carries the formula: traced programs hold it, so exported ones stay differentiable,
and so do direct callers.

A direct call of `torch.ops.posenc_ext.*` under forward mode drops the tangent, as every custom op does, and must go
through `posenc_ext.functional` instead (see compose.py).
"""

from pathlib import Path

import torch

try:
    from posenc_ext import _C  # noqa: F401  (importing it registers the ops)
except ImportError as error:
    _folder = Path(__file__).parent.parent
    if not any(_folder.glob("_C*.so")):
        raise ImportError(
            f"posenc_ext: {_folder} holds the sources and no compiled half (posenc_ext._C). Python finds them first "
            "where it is started in a checkout: start it elsewhere to use the installed package, or build in place "
            "with `python setup.py build_ext --inplace`"
        ) from error
    raise ImportError(
        f"posenc_ext: the compiled half posenc_ext._C cannot be loaded under torch {torch.__version__}: {error}. "
        "Install it anew with `pip install .`"
    ) from error

from posenc_ext.ops import add, compose, embed, fake  # noqa: F401
