"""The named recipes of the field, as data.

A convention says what a position encoding holds; `PositionalEncoding`, `TransformerEmbedding` and the functional forms
take its name, or a `Convention` of one's own (`dataclasses.replace(CONVENTIONS["vaswani"], base=500.0)`).
"""

from __future__ import annotations

import dataclasses
import math

# The numbers the ops take (csrc/layout.h, csrc/params.h).
DIVISORS = {"d": 0, "half_minus_1": 1}
LAYOUTS = {"interleaved": 0, "sin_cos": 1, "cos_sin": 2}
ODD_RULES = {"sine": 0, "zero": 1, "round_up": 2}
PRECISIONS = {"exact": 0, "reference": 1}

# (base, flags) as every op takes them. Flags hold two bits each for divisor, layout, odd rule and precision, from the
# lowest, and one bit for sequence-first (struct Recipe in csrc/ops.cpp).
Recipe = tuple[float, int]
SEQUENCE_FIRST = 1 << 8

# The recipe of no encoding at all: `embed` with it is token_scale * weight[input].
NO_WAVES: Recipe = (10000.0, 3 << 2)


@dataclasses.dataclass(frozen=True)
class Convention:
    """A recipe for sinusoidal position encodings of width D.

    Attributes:
        divisor: `"d"`: w_k = base^(-2k/D), the paper; `"half_minus_1"`: w_k = base^(-k/(D/2-1)), tensor2tensor.
        base: the longest wavelength over 2 pi, finite and at least 1.
        layout: `"interleaved"` (sin, cos, sin, cos, ...), `"sin_cos"` (all sines, then all cosines) or `"cos_sin"`.
        odd: what the last column of an odd width holds: `"sine"`, one more sine; `"zero"`; `"round_up"`, one more sine
            with the frequencies of width D + 1.
        first_position: the position of the first token when the index runs by itself.
        precision: `"reference"`, the angle is the fp32 product of fp32 position and fp32 frequency, as fp32 tables form
            it; `"exact"`, the angle is carried in fixed point and right to about 1e-7 at every int64 position.
        name: for messages.
    """

    divisor: str = "d"
    base: float = 10000.0
    layout: str = "interleaved"
    odd: str = "sine"
    first_position: int = 0
    precision: str = "reference"
    name: str = "custom"

    def __post_init__(self) -> None:
        """Refuse what no op would take."""
        for field, allowed in (
            ("divisor", DIVISORS),
            ("layout", LAYOUTS),
            ("odd", ODD_RULES),
            ("precision", PRECISIONS),
        ):
            _choice(field, getattr(self, field), allowed)
        if not (math.isfinite(self.base) and self.base >= 1):
            raise ValueError(f"posenc_ext.Convention: base must be finite and at least 1, got {self.base}")

    def recipe(self, precision: str | None = None, batch_first: bool = True) -> Recipe:
        """The arguments of the ops; `precision` overrides the convention's own."""
        chosen = _choice("precision", self.precision if precision is None else precision, PRECISIONS)
        flags = DIVISORS[self.divisor] | LAYOUTS[self.layout] << 2 | ODD_RULES[self.odd] << 4 | chosen << 6
        return float(self.base), flags if batch_first else flags | SEQUENCE_FIRST


def _choice(argument: str, value: str, allowed: dict[str, int]) -> int:
    if value not in allowed:
        raise ValueError(f"posenc_ext: {argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return allowed[value]


# What each project builds. Sources: Vaswani et al. 2017, section 3.5, and the projects' own code.
CONVENTIONS: dict[str, Convention] = {
    c.name: c
    for c in (
        # The paper's form: The Annotated Transformer, PyTorch's tutorials, ESPnet, SpeechBrain, OpenNMT-py.
        Convention(name="vaswani"),
        # tensor2tensor, fairseq2, NLLB, Whisper's encoder: sines then cosines, the last wavelength is exactly base.
        Convention(name="tensor2tensor", divisor="half_minus_1", layout="sin_cos", odd="zero"),
        # fairseq and M2M100 count from padding_idx + 1, with padding_idx 1.
        Convention(name="fairseq", divisor="half_minus_1", layout="sin_cos", odd="zero", first_position=2),
        # OpenNMT-tf and CTranslate2 count from 1.
        Convention(name="opennmt_tf", divisor="half_minus_1", layout="sin_cos", odd="zero", first_position=1),
        # MusicGen.
        Convention(name="musicgen", divisor="half_minus_1", layout="cos_sin", odd="zero"),
        # Hugging Face Marian, Pegasus, RoFormer, Informer: computed in fp64, sines then cosines.
        Convention(name="marian", layout="sin_cos", precision="exact"),
        # Hugging Face XLM, DistilBERT, Flaubert: computed in fp64.
        Convention(name="xlm", precision="exact"),
        # x-transformers, CTRL.
        Convention(name="sin_cos", layout="sin_cos"),
        # positional-encodings (PyPI): an odd width is cut from the next even one.
        Convention(name="positional_encodings", odd="round_up"),
    )
}


def resolve(convention: str | Convention) -> Convention:
    """The convention of that name, or the one given.

    Raises:
        ValueError: no convention has that name.
    """
    if isinstance(convention, Convention):
        return convention
    if convention not in CONVENTIONS:
        known = ", ".join(map(repr, CONVENTIONS))
        raise ValueError(f"posenc_ext: convention must be a Convention or one of {known}, got {convention!r}")
    return CONVENTIONS[convention]
