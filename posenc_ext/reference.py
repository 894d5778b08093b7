"""The textbook input layer of a Transformer, in plain PyTorch and NumPy.

Read this file to learn what the fused layer computes; the tests hold the fused layer to it. Nothing here is fast.

A Transformer sees a sentence as a set of vectors, one per token, so the order of the words has to be put into the
vectors themselves. The input layer does it in two steps:

1. `Embeddings` looks each token id up in a trainable table and multiplies the row by ``sqrt(d_model)``;
2. `PositionalEncoding` adds a vector that depends on the position alone.

The second vector is made of sines and cosines ("Attention Is All You Need", Vaswani et al. 2017, section 3.5)::

    PE(p, 2k)     = sin(p * w_k)
    PE(p, 2k + 1) = cos(p * w_k)        w_k = 10000 ** (-2k / d_model)

Column pair 0 turns fastest, one radian per position; every further pair turns slower, in geometric steps. A pair is the
hand of a clock, and a position is read off all the hands together. Moving on by ``n`` positions turns each hand by the
fixed angle ``n * w_k``, so the step from one position to another is a rotation that does not depend on where it starts.

The alternative, `LearnedPositionalEmbedding`, trains one vector per position and knows nothing past its last one.

Other projects use the same idea with other frequencies and other column orders; `sinusoid_table` computes all of them
in double precision.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

FloatArray = npt.NDArray[np.float64]

_DIVISORS = ("d", "half_minus_1", "half")
_LAYOUTS = ("interleaved", "sin_cos", "cos_sin")
_ODD_RULES = ("sine", "zero", "round_up")


class Embeddings(nn.Module):
    """Token embeddings: a row of a trainable table per id, times ``sqrt(d_model)``.

    The rows start with variance 1 or, when tied to an output projection, far less; the factor keeps them from drowning
    in the encodings added next, whose entries are of size 1 whatever the width (Vaswani et al. 2017, section 3.4).

    Args:
        d_model: width of a row.
        vocab_size: number of rows.
        scale: another factor, for models that were trained with one.

    Raises:
        RuntimeError: a negative size, from torch.

    Examples:
        >>> import torch
        >>> from posenc_ext.reference import Embeddings
        >>> layer = Embeddings(4, 10)
        >>> x = torch.tensor([1, 2])
        >>> torch.equal(layer(x), layer.lut(x) * 2)
        True
    """

    def __init__(self, d_model: int, vocab_size: int, scale: float | None = None) -> None:
        super().__init__()
        self.d_model = d_model
        self.lut = nn.Embedding(vocab_size, d_model)
        self.scale = math.sqrt(d_model) if scale is None else scale

    def forward(self, x: Tensor) -> Tensor:
        """Look ids up and scale their rows.

        Args:
            x: ids of any shape ``[...]``, int32 or int64.

        Returns:
            ``[..., d_model]`` in the dtype of the weight.

        Raises:
            IndexError: an id outside the table, from torch.

        Examples:
            >>> import torch
            >>> from posenc_ext.reference import Embeddings
            >>> Embeddings(4, 10)(torch.tensor([[1, 2, 3]])).shape
            torch.Size([1, 3, 4])
        """
        rows: Tensor = self.lut(x)
        return rows * self.scale


class PositionalEncoding(nn.Module):
    """Fixed sinusoidal positions, read from a table made once (Vaswani et al. 2017, section 3.5).

    The table is the buffer ``pe``, float32 ``[1, max_len, d_model]``, or ``[max_len, 1, d_model]`` where sequences are
    the first axis. It belongs to the ``state_dict``, so checkpoints of models built this way carry it.

    Args:
        d_model: width; when it is odd, the last column is one more sine.
        max_len: number of positions in the table, and so the longest input.
        dropout: share of the sums that is set to zero in training.
        batch_first: whether inputs are ``[batch, length, d_model]`` or ``[length, batch, d_model]``.

    Raises:
        RuntimeError: a negative size, from torch.

    Examples:
        >>> from posenc_ext.reference import PositionalEncoding
        >>> PositionalEncoding(4, max_len=2).pe
        tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
                 [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    def __init__(self, d_model: int, max_len: int = 5000, *, dropout: float = 0.0, batch_first: bool = True) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.batch_first = batch_first
        position = torch.arange(max_len, dtype=torch.float32).unsqueeze(1)
        # 10000 ** (-2k / d), written as exp of a logarithm like everywhere else. Written otherwise it may round to
        # another float32, and at position 5000 that alone turns a fast pair by 3e-4: old tables would no longer match.
        frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float32) * (-math.log(10000.0) / d_model))
        angle = position * frequency
        table = torch.zeros(max_len, d_model)
        table[:, 0::2] = torch.sin(angle)
        table[:, 1::2] = torch.cos(angle[:, : d_model // 2])
        self.pe: Tensor = nn.Buffer(table.unsqueeze(0 if batch_first else 1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the first ``length`` rows of the table.

        Args:
            x: ``[batch, length, d_model]``, or ``[length, batch, d_model]`` with ``batch_first=False``, of a floating
                dtype.

        Returns:
            A tensor of the shape of ``x``, in the wider of its dtype and the table's.

        Raises:
            ValueError: if ``x`` has not three axes, or ``length`` is more than the table has.

        Examples:
            >>> import torch
            >>> from posenc_ext.reference import PositionalEncoding
            >>> PositionalEncoding(4, max_len=50)(torch.zeros(2, 7, 4)).shape
            torch.Size([2, 7, 4])
        """
        if x.dim() != 3:
            raise ValueError(
                f"PositionalEncoding: x must have the axes of a batch, a length and d_model, got {x.shape}"
            )
        axis = 1 if self.batch_first else 0
        length, max_len = x.size(axis), self.pe.size(axis)
        if length > max_len:
            raise ValueError(
                f"PositionalEncoding: the length of x must be at most max_len, the {max_len} positions of its table, "
                f"got {length}"
            )
        y = x + self.pe.narrow(axis, 0, length)
        return y if self.dropout is None else self.dropout(y)


class LearnedPositionalEmbedding(nn.Module):
    """Trainable positions: one row of ``weight [max_len, d_model]`` per position, added to the input.

    Every row is learned from the training texts that were long enough to reach it. Past ``max_len`` there is no row.
    Gehring et al. 2017, "Convolutional Sequence to Sequence Learning", section 3.1.

    Args:
        max_len: number of positions.
        d_model: width of a row.

    Raises:
        RuntimeError: a negative size, from torch.

    Examples:
        >>> from posenc_ext.reference import LearnedPositionalEmbedding
        >>> LearnedPositionalEmbedding(10, 4).weight.shape
        torch.Size([10, 4])
    """

    def __init__(self, max_len: int, d_model: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(max_len, d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Add the first ``length`` rows of the weight.

        Args:
            x: ``[batch, length, d_model]``, of a floating dtype.

        Returns:
            A tensor of the shape of ``x``.

        Raises:
            IndexError: if ``length`` is more than there are rows.

        Examples:
            >>> import torch
            >>> from posenc_ext.reference import LearnedPositionalEmbedding
            >>> LearnedPositionalEmbedding(10, 4)(torch.zeros(2, 7, 4)).shape
            torch.Size([2, 7, 4])
        """
        length, max_len = x.size(1), self.weight.size(0)
        if length > max_len:
            raise IndexError(
                f"LearnedPositionalEmbedding: the length of x must be at most max_len, the {max_len} positions it has "
                f"rows for, got {length}"
            )
        return x + self.weight[:length]


def get_sinusoidal_positional_encoding(seq_len: int, d_model: int) -> FloatArray:
    """The textbook's table of sinusoids in double precision.

    Vaswani et al. 2017, "Attention Is All You Need", section 3.5: PE(p, 2k) = sin(p * w_k) and
    PE(p, 2k + 1) = cos(p * w_k), where w_k = 10000 ** (-2k / d_model).

    Args:
        seq_len: number of positions, from 0.
        d_model: width; when it is odd, the last column is one more sine.

    Returns:
        float64 ``[seq_len, d_model]``, a NumPy array.

    Raises:
        ValueError: if ``seq_len`` is negative or ``d_model`` is not positive.

    Examples:
        >>> import posenc_ext
        >>> posenc_ext.get_sinusoidal_positional_encoding(2, 4).round(4)
        array([[0.    , 1.    , 0.    , 1.    ],
               [0.8415, 0.5403, 0.01  , 1.    ]])
    """
    if seq_len < 0:
        raise ValueError(f"get_sinusoidal_positional_encoding: seq_len must not be negative, got {seq_len}")
    if d_model <= 0:
        raise ValueError(f"get_sinusoidal_positional_encoding: d_model must be positive, got {d_model}")
    position = np.arange(seq_len, dtype=np.float64)[:, np.newaxis]
    frequency = np.exp(np.arange(0, d_model, 2, dtype=np.float64) * (-math.log(10000.0) / d_model))
    angle = position * frequency
    table = np.zeros((seq_len, d_model))
    table[:, 0::2] = np.sin(angle)
    table[:, 1::2] = np.cos(angle[:, : d_model // 2])
    return table


def sinusoid_frequencies(d_model: int, *, base: float = 10000.0, divisor: str = "d", odd: str = "sine") -> FloatArray:
    """The angular frequency of every sine of an encoding, fastest first.

    With ``D = d_model`` (``d_model + 1`` for an odd width under ``odd="round_up"``):

    - ``divisor="d"``: ``w_k = base ** (-2k / D)``, Vaswani et al. 2017;
    - ``divisor="half_minus_1"``: ``w_k = base ** (-k / max(D // 2 - 1, 1))``, tensor2tensor and its heirs. The slowest
      of ``D // 2`` frequencies is then exactly ``1 / base``;
    - ``divisor="half"``: ``w_k = base ** (-k / max(D // 2, 1))``, diffusers' timesteps with a shift of 0. It is
      ``"d"`` at even widths.

    Args:
        d_model: width of the encoding.
        base: ratio between the fastest frequency and (nearly) the slowest.
        divisor: which of the formulas.
        odd: what the column left over by an odd width holds: ``sine``, one more sine; ``zero``; or ``round_up``, one
            more sine, with the frequencies of width ``d_model + 1``.

    Returns:
        float64 ``[d_model // 2]``, one more for an odd width unless ``odd="zero"``.

    Raises:
        ValueError: if ``d_model`` or ``base`` is not positive, or a name is unknown.

    Examples:
        >>> from posenc_ext.reference import sinusoid_frequencies
        >>> sinusoid_frequencies(4).tolist()
        [1.0, 0.01]
    """
    if d_model <= 0:
        raise ValueError(f"sinusoid_frequencies: d_model must be positive, got {d_model}")
    if not base > 0:
        raise ValueError(f"sinusoid_frequencies: base must be positive, got {base}")
    if divisor not in _DIVISORS:
        raise ValueError(f"sinusoid_frequencies: divisor must be one of {_DIVISORS}, got {divisor!r}")
    if odd not in _ODD_RULES:
        raise ValueError(f"sinusoid_frequencies: odd must be one of {_ODD_RULES}, got {odd!r}")
    width = d_model + 1 if odd == "round_up" and d_model % 2 else d_model
    sines = d_model // 2 if odd == "zero" else (d_model + 1) // 2
    k = np.arange(sines, dtype=np.float64)
    half = width // 2 - (divisor == "half_minus_1")
    exponent = -2.0 * k / width if divisor == "d" else -k / max(half, 1)
    return np.power(np.float64(base), exponent)


def sinusoid_columns(d_model: int, layout: str, *, sines: int) -> tuple[range, range]:
    """Which columns of an encoding hold the sines, and which the cosines, both fastest first.

    Args:
        d_model: width of the encoding.
        layout: ``interleaved`` (sin, cos, sin, cos, ...), ``sin_cos`` (all sines, then all cosines) or ``cos_sin``.
        sines: number of sines, the length of what `sinusoid_frequencies` returns. A column that is in neither is zero.

    Returns:
        The columns of the sines, and those of the ``d_model // 2`` cosines.

    Raises:
        ValueError: if ``layout`` is unknown.

    Examples:
        >>> from posenc_ext.reference import sinusoid_columns
        >>> sinusoid_columns(6, "sin_cos", sines=3)
        (range(0, 3), range(3, 6))
    """
    cosines = d_model // 2
    if layout == "interleaved":
        return range(0, 2 * sines, 2), range(1, 2 * cosines, 2)
    if layout == "sin_cos":
        return range(sines), range(sines, sines + cosines)
    if layout == "cos_sin":
        return range(cosines, cosines + sines), range(cosines)
    raise ValueError(f"sinusoid_columns: layout must be one of {_LAYOUTS}, got {layout!r}")


def sinusoid_table(
    positions: npt.ArrayLike,
    d_model: int,
    *,
    base: float = 10000.0,
    divisor: str = "d",
    layout: str = "interleaved",
    odd: str = "sine",
) -> FloatArray:
    """Sinusoidal encodings of any positions under any convention, in double precision.

    An even width holds ``h = d_model // 2`` sines and as many cosines, in the order ``layout`` names:

    - ``interleaved``: sin, cos, sin, cos, ...
    - ``sin_cos``: all sines, then all cosines;
    - ``cos_sin``: all cosines, then all sines.

    An odd width has one column more, which ``odd`` fills:

    - ``sine``: one more sine, of the next frequency ``w_h``, as the last of the sines;
    - ``zero``: zero, in the last column;
    - ``round_up``: as ``sine``, but the frequencies are those of width ``d_model + 1``.

    The frequencies are those of Vaswani et al. 2017, section 3.5 (``divisor="d"``: ``base ** (-2k / D)``), of
    tensor2tensor (``"half_minus_1"``: ``base ** (-k / (D // 2 - 1))``) or of diffusers (``"half"``: ``base ** (-k / (D
    // 2))``).

    The angle ``p * w_k`` is rounded to double precision, so a value is off by up to about ``2 ** -52 * |p|``: 4e-9 at
    position 2 ** 24. Farther out, compute with more digits.

    Args:
        positions: numbers of any shape ``[...]``: whole or fractional, negative too.
        d_model: width of the encoding.
        base: ratio between the fastest frequency and (nearly) the slowest.
        divisor: which of the formulas of the frequencies.
        layout: which column holds which sine or cosine.
        odd: what the column left over by an odd width holds.

    Returns:
        float64 ``[..., d_model]``.

    Raises:
        ValueError: if ``d_model`` or ``base`` is not positive, or a name is unknown.

    Examples:
        >>> from posenc_ext.reference import sinusoid_table
        >>> sinusoid_table([0, 1], 4, layout="sin_cos").round(4)
        array([[0.    , 0.    , 1.    , 1.    ],
               [0.8415, 0.01  , 0.5403, 1.    ]])
    """
    frequency = sinusoid_frequencies(d_model, base=base, divisor=divisor, odd=odd)
    angle = np.asarray(positions, dtype=np.float64)[..., np.newaxis] * frequency
    sine, cosine = np.sin(angle), np.cos(angle[..., : d_model // 2])
    table = np.zeros((*angle.shape[:-1], d_model))
    sine_columns, cosine_columns = sinusoid_columns(d_model, layout, sines=sine.shape[-1])
    table[..., sine_columns] = sine
    table[..., cosine_columns] = cosine
    return table
