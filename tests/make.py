"""What tests are made of: ids, tables, activations, layers, specs, and calls of every kind. Each is made here once."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import posenc_ext
from posenc_ext import CONVENTIONS, Convention, conventions, reference
from posenc_ext.conventions import DIVISORS, LAYOUTS, ODD_RULES, PRECISIONS

ops = torch.ops.posenc_ext

V, D, B, T = 11, 8, 3, 7  # rows, width, batch and length of whatever is made without sizes

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
# Every remainder of a vector's length, a tile of 256 pairs and one more, and widths with nothing in the first pair.
WIDTHS = (1, 2, 3, 5, 6, 7, 8, 31, 127, 128, 130, 513, 1030)

# ---- parameters ------------------------------------------------------------------------------------------------------


def name_of(value: Any) -> str:
    """A short id for a parametrised test."""
    return getattr(value, "name", None) or getattr(value, "__name__", None) or str(value).removeprefix("torch.")


def each(names: str, values: Mapping[str, Any] | Iterable[Any]) -> pytest.MarkDecorator:
    """One test for each value, or for each item of a dictionary, whose keys are the ids."""
    if isinstance(values, Mapping):
        return pytest.mark.parametrize(names, list(values.values()), ids=list(values))
    return pytest.mark.parametrize(names, list(values), ids=name_of)


each_dtype = each("dtype", DTYPES)
each_half = each("dtype", HALVES)
each_precision = each("precision", PRECISIONS.keys())
each_layout = each("layout", LAYOUTS.keys())
each_convention = each("convention", CONVENTIONS.values())
dense_and_sparse = each("sparse", {"dense": False, "sparse": True})


def every_combination(**fields: Any) -> list[Convention]:
    """A convention of every divisor, layout and odd rule, also those that no project uses."""
    return [
        Convention(divisor=divisor, layout=layout, odd=odd, name=f"{divisor}, {layout}, {odd}", **fields)
        for divisor in DIVISORS
        for layout in LAYOUTS
        for odd in ODD_RULES
    ]


# ---- tensors ---------------------------------------------------------------------------------------------------------

Shape = int | tuple[int, ...]


def random(seed: int | None) -> torch.Generator | None:
    """A generator of its own for a seed; without one, torch's, which every test starts anew."""
    return None if seed is None else torch.Generator().manual_seed(seed)


def ids(
    shape: Shape = (B, T),
    rows: int = V,
    *,
    dtype: torch.dtype = torch.int64,
    device: str = "cpu",
    seed: int | None = None,
) -> Tensor:
    """Token ids."""
    shape = (shape,) if isinstance(shape, int) else shape
    return torch.randint(rows, shape, generator=random(seed)).to(device, dtype)


def x(
    shape: tuple[int, ...] = (B, T, D),
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int | None = None,
    grad: bool = False,
) -> Tensor:
    """Activations, or whatever else has a normal distribution."""
    return torch.randn(shape, generator=random(seed)).to(device, dtype).requires_grad_(grad)


def table(rows: int = V, width: int = D, **options: Any) -> Tensor:
    """An embedding table; options as in `x`."""
    return x((rows, width), **options)


def special(dtype: torch.dtype, width: int) -> Tensor:
    """A table of the numbers that rounding treats in its own way, one a row; the last row is 1."""
    tiny, top = torch.finfo(torch.float32).smallest_normal / 4, torch.finfo(dtype).max
    numbers = torch.tensor([math.nan, math.inf, -math.inf, top, -top, 0.0, -0.0, tiny, -tiny, 1.0], dtype=torch.float64)
    return numbers[:, None].expand(10, width).to(dtype).contiguous()


def positions_of_every_size() -> Tensor:
    """Both sides of every power of two, so that each way of reducing an angle is taken."""
    return torch.tensor([s * 2**e + d for e in range(1, 63) for d in (-1, 0, 1) for s in (1, -1)])


def views(tokens: tuple[int, int], width: int, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Activations or gradients [*tokens, width] of every kind of strides; options as in `x`."""
    b, t = tokens

    def whole(*shape: int) -> Tensor:
        return x(shape, dtype=dtype, **options)

    return {
        "contiguous": whole(b, t, width),
        "one number": whole(1).expand(b, t, width),
        "one column": whole(b, t, 1).expand(b, t, width),
        "one row": whole(width).expand(b, t, width),
        "one sequence": whole(1, t, width).expand(b, t, width),
        "one token": whole(b, 1, width).expand(b, t, width),
        "sequence first under it": whole(t, b, width).transpose(0, 1),
        "columns first under it": whole(b, width, t).transpose(1, 2),
        "all axes reversed": whole(width, t, b).permute(2, 1, 0),
        "columns of a wider one": whole(b, t, 2 * width + 9)[..., 5 : 5 + width],
        "every second column": whole(b, t, 2 * width)[..., ::2],
        "every second token": whole(2 * b, 2 * t, width)[::2, ::2],
        "offset view": whole(b * t * width + 3)[3:].view(b, t, width),
    }


VIEWS = tuple(views((1, 1), 1, torch.float32))

# ---- layers ----------------------------------------------------------------------------------------------------------

LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Embeddings": lambda v, d, m, **o: posenc_ext.Embeddings(d, v, **o),
    "TransformerEmbedding": lambda v, d, m, **o: posenc_ext.TransformerEmbedding(v, d, **o),
    "PositionalEncoding": lambda v, d, m, **o: posenc_ext.PositionalEncoding(d, m, **o),
    "LearnedPositionalEmbedding": lambda v, d, m, **o: posenc_ext.LearnedPositionalEmbedding(m, d, **o),
}
OF_IDS = ("Embeddings", "TransformerEmbedding")
WITH_POSITIONS = tuple(LAYERS)[1:]
each_layer = each("kind", LAYERS.keys())
each_layer_of_ids = each("kind", OF_IDS)
each_layer_with_positions = each("kind", WITH_POSITIONS)


def layer(
    kind: str = "TransformerEmbedding", *, rows: int = V, width: int = D, max_len: int = 40, **options: Any
) -> Any:
    """A module with the same numbers each time."""
    torch.manual_seed(3)
    return LAYERS[kind](rows, width, max_len, **options)


def argument(kind: str, shape: tuple[int, int] = (B, T), width: int = D, **options: Any) -> Tensor:
    """What a module of this kind takes: ids or activations, the same each time."""
    return ids(shape, seed=1, **options) if kind in OF_IDS else x((*shape, width), seed=2, **options)


def weight_of(module: Any) -> nn.Parameter:
    """The table of a module that looks up ids."""
    return module.lut.weight if hasattr(module, "lut") else module.weight


def pair(source: Any = posenc_ext, *, rows: int = V, width: int = D, **options: Any) -> nn.Sequential:
    """Embeddings and encoding of the package, or of its textbook (`posenc_ext.reference`)."""
    torch.manual_seed(7)
    return nn.Sequential(source.Embeddings(width, rows, **options), source.PositionalEncoding(width, 50))


def twins(kind: str, *, dropout: float | None = None, max_len: int = 40, **options: Any) -> tuple[Any, nn.Module]:
    """A layer, and the modules of the textbook that it stands for, with the same numbers."""
    mine = layer(kind, max_len=max_len, **options, **({} if dropout is None else {"dropout": dropout}))
    parts: list[Any] = []
    if kind in OF_IDS:
        parts.append(reference.Embeddings(mine.d_model, mine.vocab_size))
        parts[0].lut = copy.deepcopy(mine.lut)
    if kind == "LearnedPositionalEmbedding":
        parts.append(reference.LearnedPositionalEmbedding(max_len, mine.d_model))
        parts[0].load_state_dict(mine.state_dict())
    elif kind != "Embeddings":
        parts.append(reference.PositionalEncoding(mine.d_model, max_len))
    if dropout is not None:
        parts.append(nn.Dropout(dropout))
    return mine, parts[0] if len(parts) == 1 else nn.Sequential(*parts)


# ---- specs and flags -------------------------------------------------------------------------------------------------

NONE = conventions.NO_ENCODING
VERSION = 1 << 20


def spec(convention: str | Convention = "vaswani", precision: str | None = None, batch_first: bool = True) -> Any:
    """(base, flags), as every op takes them."""
    chosen = convention if isinstance(convention, Convention) else CONVENTIONS[convention]
    return chosen.spec(precision, batch_first)


# ---- calls -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    """One call `functional.embed(input, weight, **kwargs)`."""

    name: str
    weight: Tensor
    input: Tensor
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def differentiable(self) -> bool:
        """Whether the weight gradient is the derivative: these flags leave out or divide parts of it."""
        return not {"padding_idx", "scale_grad_by_freq"} & self.kwargs.keys()


def samples(device: str, dtype: torch.dtype, requires_grad: bool) -> list[Sample]:
    """Small calls of every kind: shapes, strides, id types, positions, conventions, flags."""
    generator = torch.Generator().manual_seed(0)

    def weight(rows: int, width: int) -> Tensor:
        return torch.randn(rows, width, generator=generator).to(device, dtype).requires_grad_(requires_grad)

    def tokens(*shape: int, rows: int = 11, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(rows, shape, generator=generator).to(device, dtype)

    strided = torch.randn(11, 16, generator=generator).to(device, dtype)[:, 3:9].requires_grad_(requires_grad)
    steps = torch.tensor([[4, -1, 70000], [0, 2, 2]], device=device)
    return [
        Sample("batch", weight(11, 6), tokens(2, 3)),
        Sample("int32 ids, odd width", weight(11, 7), tokens(2, 3, dtype=torch.int32)),
        Sample("one token", weight(11, 6), tokens()),
        Sample("no tokens", weight(11, 6), tokens(2, 0)),
        Sample("four axes, offset", weight(11, 6), tokens(2, 1, 3, 2), {"offset": 9}),
        Sample("sequence first", weight(11, 6), tokens(3, 2), {"batch_first": False}),
        Sample("transposed ids", weight(11, 6), tokens(3, 2).t()),
        Sample("expanded ids", weight(11, 6), tokens(1, 3).expand(4, 3)),
        Sample("positions", weight(11, 6), tokens(2, 3), {"positions": steps}),
        Sample("positions of a row", weight(11, 6), tokens(2, 3), {"positions": steps[0].to(torch.int32)}),
        Sample("table with strides", strided, tokens(2, 3)),
        Sample("padding", weight(11, 6), tokens(2, 3, rows=3), {"padding_idx": 1}),
        Sample("scaled by frequency", weight(11, 6), tokens(2, 3, rows=3), {"scale_grad_by_freq": True}),
        Sample("tensor2tensor", weight(11, 7), tokens(2, 3), {"convention": "tensor2tensor"}),
        Sample("exact, far out", weight(11, 6), tokens(2, 3), {"precision": "exact", "offset": 2**40}),
        Sample("scale one", weight(11, 6), tokens(2, 3), {"token_scale": 1.0}),
    ]


# Raw ops, and the public ones that they are without the formula.
TWINS = {
    "_embed_fwd": "embed",
    "_embed_bwd": "embed_backward",
    "_embed_bwd_sparse": "embed_backward_sparse",
    "_add_positional_encoding_fwd": "add_positional_encoding",
}


@dataclasses.dataclass
class OpCall:
    """One call `torch.ops.posenc_ext.<op>(*args, **kwargs)`."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def overload(self) -> Callable[..., Any]:
        return getattr(ops, self.op).default

    @property
    def requires_grad(self) -> bool:
        given = (*self.args, *self.kwargs.values())
        return any(isinstance(value, Tensor) and value.requires_grad for value in given)

    def moved(self, move: Callable[[Tensor], Tensor]) -> OpCall:
        """The same call with other tensors."""
        args = tuple(move(value) if isinstance(value, Tensor) else value for value in self.args)
        kwargs = {name: move(value) if isinstance(value, Tensor) else value for name, value in self.kwargs.items()}
        return OpCall(self.op, args, kwargs)

    def __call__(self) -> Any:
        return self.overload(*self.args, **self.kwargs)


def op_calls(sample: Sample) -> dict[str, OpCall]:
    """The call of every public op that a sample describes."""
    options, weight, input = dict(sample.kwargs), sample.weight, sample.input
    order = options.pop("batch_first", True)
    chosen = spec(options.pop("convention", "vaswani"), options.pop("precision", None), order)
    positions = options.pop("positions", None)
    positions = positions if positions is None else positions.expand(input.shape)
    offset, scale = options.pop("offset", 0), options.pop("token_scale", 1.75)
    padding, by_frequency = options.pop("padding_idx", -1), options.pop("scale_grad_by_freq", False)
    assert not options, f"no op takes {options}"
    width = weight.shape[1]
    a = x((*input.shape, width), dtype=weight.dtype, device=str(weight.device), seed=5, grad=weight.requires_grad)
    out = weight.new_empty(*input.shape, width)
    counted = input if positions is None else positions
    base, flags = chosen
    named = {
        **({} if positions is None else {"positions": positions}),
        **{"flags": flags, "base": base, "token_scale": scale, "offset": offset},
    }
    general = named | {"padding_idx": padding, "scale_grad_by_freq": by_frequency}
    numbers = {"d_model": width, "offset": offset, "base": base, "flags": flags}
    own = torch.linspace(0.1, 2.0, (width + (flags >> 8 & 15 != ODD_RULES["zero"])) // 2, device=weight.device)
    fractions = counted.float() / 3
    if weight.requires_grad:
        own, fractions = own.requires_grad_(), fractions.requires_grad_()
    if offset > 2**31:  # their decomposition is right up to there
        own = None
    kept = own if own is None else own.detach()
    rows = input if input.dim() else input.unsqueeze(0)
    starts = torch.tensor([0, 2, 2, 5], dtype=input.dtype, device=input.device)
    calls = [
        OpCall("embed", (weight, input, positions, offset, scale, *chosen, padding, by_frequency, False)),
        OpCall("embed_general", (weight, input), general),
        OpCall("embed_out", (weight, input, positions, offset, scale, *chosen, out.clone())),
        OpCall("check_embed", (weight, input, positions, offset, *chosen, out.clone())),
        OpCall("embed_backward", (a, input, len(weight), scale, padding, by_frequency)),
        OpCall("embed_backward_sparse", (a, input, len(weight), scale, padding, by_frequency)),
        OpCall("embed_general_backward", (a, input, len(weight), scale, padding, by_frequency)),
        OpCall("embed_general_backward_sparse", (a, input, len(weight), scale, padding, by_frequency)),
        OpCall("add_positional_encoding", (a, positions, offset, *chosen)),
        OpCall("add_positional_encoding_out", (a, positions, offset, *chosen, out.clone())),
        OpCall(
            "embed_general_out",
            (weight, input),
            named | {"padding_idx": padding, "frequencies": kept, "out": out.clone()},
        ),
        OpCall("add_general", (a,), named | {"frequencies": own}),
        OpCall("add_general_out", (a,), named | {"out": out.clone()}),
        OpCall("positional_encoding", (counted, width, offset, *chosen, weight.dtype)),
        OpCall("positional_encoding_out", (counted, width, offset, *chosen, out.clone())),
        OpCall(
            "positional_encoding_general",
            (fractions, own),
            {**numbers, "dtype": conventions.DTYPES.index(weight.dtype)},
        ),
        OpCall("positional_encoding_general_out", (fractions.detach(), kept), {**numbers, "out": out.clone()}),
        OpCall("positions_from_padding", (rows, 1, rows.select(-1 if order else 0, 0), offset, None, order))
        if rows.numel()
        else OpCall("positions_from_padding", (rows, 1)),
        OpCall("positions_from_cu_seqlens", (starts, 7, offset)),
        OpCall("positions_from_sequence_ids", (rows, offset, order)),
    ]
    return {call.op: call for call in calls}


def raw_calls(sample: Sample) -> dict[str, OpCall]:
    """The calls of the raw ops with the arguments of their public twins."""
    public = op_calls(sample)
    # _embed_fwd has no use for the three flags of the gradient.
    return {raw: OpCall(raw, public[twin].args[: 7 if raw == "_embed_fwd" else None]) for raw, twin in TWINS.items()}
