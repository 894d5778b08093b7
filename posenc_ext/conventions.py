"""The named conventions of the field, as data.

A convention says what a position encoding holds; `PositionalEncoding`, `TransformerEmbedding` and the functional forms
take its name, or a `Convention` of one's own (`dataclasses.replace(CONVENTIONS["vaswani"], base=500.0)`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import torch

# The codes of the names, each a field of four bits in `Spec.flags` (csrc/encoding.h, csrc/spec.h).
DIVISORS = {"d": 0, "half_minus_1": 1, "half": 2}
LAYOUTS = {"interleaved": 0, "sin_cos": 1, "cos_sin": 2}
ODD_RULES = {"sine": 0, "zero": 1, "round_up": 2}
PRECISIONS = {"exact": 0, "reference": 1}
# Of the result of `positional_encoding_general` (csrc/params.h).
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# What the token of padding_idx is (csrc/params.h).
AT_PADDING = {"embed": 0, "no_encoding": 1, "no_embedding": 2, "zeros": 3}

SEQUENCE_FIRST = 1 << 17
OFFSETS = 1 << 18  # positions are offsets, to which the running index is added
_VERSION = 1 << 20  # of every number but those of 0.1, which csrc/spec.h decodes


class Spec(NamedTuple):
    """An encoding as every op takes it.

    Attributes:
        base: of the frequencies.
        flags: divisor, layout, odd-width rule, precision and token axes, four bits a field, and a version bit.

    Examples:
        >>> from posenc_ext.conventions import CONVENTIONS, Spec
        >>> isinstance(CONVENTIONS["vaswani"].spec(), Spec)
        True
    """

    base: float
    flags: int


# `embed` with it is token_scale * weight[input].
NO_ENCODING = Spec(10000.0, _VERSION | 1 << 16)


@dataclasses.dataclass(frozen=True)
class Convention:
    """What a sinusoidal position encoding of width D holds.

    Sources: Vaswani et al. 2017, "Attention Is All You Need", section 3.5, and the code of the projects that
    `posenc_ext.CONVENTIONS` names.

    Args:
        divisor: `"d"`: w_k = base^(-2k/D), the paper; `"half_minus_1"`: w_k = base^(-k/(D/2-1)), tensor2tensor;
            `"half"`: w_k = base^(-k/floor(D/2)), which differs from `"d"` at odd widths only.
        base: the longest wavelength over 2 pi, finite and at least 1.
        layout: `"interleaved"` (sin, cos, sin, cos, ...), `"sin_cos"` (all sines, then all cosines) or `"cos_sin"`.
        odd: what the last column of an odd width holds: `"sine"`, one more sine; `"zero"`; `"round_up"`, one more sine
            with the frequencies of width D + 1.
        first_position: the position of the first token when the index runs by itself.
        precision: `"reference"`, the angle is the fp32 product of fp32 position and fp32 frequency, as fp32 tables form
            it; `"exact"`, the angle is carried in fixed point and right to about 1e-7 at every int64 position.
        name: for messages.

    Raises:
        ValueError: a name that is unknown, or a base out of range.

    Examples:
        >>> import dataclasses, posenc_ext
        >>> mine = dataclasses.replace(posenc_ext.CONVENTIONS["vaswani"], base=500.0, name="mine")
        >>> posenc_ext.functional.positional_encoding(2, 4, convention=mine).shape  # [length, d_model], float32
        torch.Size([2, 4])
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
        if not (math.isfinite(self.base) and self.base >= 1):
            raise ValueError(f"posenc_ext.Convention: base must be finite and at least 1, got {self.base}")
        self._specs  # noqa: B018  (made here, so that a call has only to look it up)

    def spec(self, precision: str | None = None, batch_first: bool = True) -> Spec:
        """The arguments of the ops for this convention.

        Args:
            precision: `"reference"` or `"exact"`, in place of the convention's own; None for that.
            batch_first: whether the sequence is the last token axis, or the first one.

        Returns:
            The base, and the flags: a code of four bits for each of the names.

        Raises:
            ValueError: an unknown precision.

        Examples:
            >>> import posenc_ext
            >>> posenc_ext.CONVENTIONS["vaswani"].spec().base
            10000.0
        """
        found = self._specs.get((precision, batch_first))
        if found is None:
            raise ValueError(_unknown("precision", precision, PRECISIONS))
        return found

    def __fx_create_arg__(self, tracer: Any) -> Any:
        """How `torch.fx.symbolic_trace` writes it into a graph: its name, or a call of this class for one without."""
        if CONVENTIONS.get(self.name) == self:
            return self.name
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return tracer.create_node("call_function", Convention, (), fields)

    @functools.cached_property
    def _specs(self) -> dict[tuple[str | None, bool], Spec]:
        names = (("divisor", DIVISORS), ("layout", LAYOUTS), ("odd", ODD_RULES), ("precision", PRECISIONS))
        for field, codes in names:
            if getattr(self, field) not in codes:
                raise ValueError(_unknown(field, getattr(self, field), codes))
        flags = _VERSION | DIVISORS[self.divisor] | LAYOUTS[self.layout] << 4 | ODD_RULES[self.odd] << 8
        return {
            (name, batch_first): Spec(
                float(self.base),
                flags | PRECISIONS[name or self.precision] << 12 | (0 if batch_first else SEQUENCE_FIRST),
            )
            for name in (None, *PRECISIONS)
            for batch_first in (True, False)
        }


def _unknown(argument: str, value: object, codes: dict[str, int]) -> str:
    return f"posenc_ext: {argument} must be one of {', '.join(map(repr, codes))}, got {value!r}"


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

    Args:
        convention: a name in `posenc_ext.CONVENTIONS`, or a `posenc_ext.Convention`.

    Returns:
        The convention.

    Raises:
        ValueError: no convention has that name.

    Examples:
        >>> from posenc_ext.conventions import resolve
        >>> resolve("marian").layout
        'sin_cos'
    """
    chosen = convention if isinstance(convention, Convention) else CONVENTIONS.get(convention)
    if chosen is None:
        known = ", ".join(map(repr, CONVENTIONS))
        raise ValueError(f"posenc_ext: convention must be a Convention or one of {known}, got {convention!r}")
    return chosen
