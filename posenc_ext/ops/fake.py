"""Fake kernels: shapes, dtypes and devices for tracing, and the checks that need no values.

Each takes the arguments it looks at by their names in the schemas, so ops of one kind share it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from posenc_ext.conventions import DTYPES, NO_ENCODING, ODD_RULES
from posenc_ext.ops.call import by_name

_MOST_COLUMNS = 2**24
_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _require(condition: bool, op: str, text: str) -> None:
    if not condition:
        raise ValueError(f"posenc_ext::{op}: {text}")


def _check_integers(op: str, argument: str, tensor: Tensor) -> None:
    good = tensor.dtype in (torch.int64, torch.int32)
    _require(good, op, f"{argument} must have dtype int64 or int32, got {tensor.dtype}")


def _check_positions(op: str, positions: Tensor) -> None:
    good = positions.dtype in (torch.int64, torch.int32, torch.float32, torch.float64)
    _require(good, op, f"positions must have dtype int64, int32, float32 or float64, got {positions.dtype}")


def _check_frequencies(op: str, frequencies: Tensor, d_model: int, flags: int, like: Tensor, name: str) -> None:
    _check_device(op, "frequencies", frequencies, like, name)
    good = frequencies.dtype in (torch.float32, torch.float64)
    _require(good, op, f"frequencies must have dtype float32 or float64, got {frequencies.dtype}")
    _require(not flags & NO_ENCODING.flags & 1 << 16, op, "frequencies need an encoding, got flags without one")
    pairs = (d_model + (flags >> 8 & 15 != ODD_RULES["zero"])) // 2
    good = frequencies.dim() == 1 and frequencies.shape[0] == pairs
    text = f"frequencies must have shape [{pairs}], one for each pair of columns, got {list(frequencies.shape)}"
    _require(good, op, text)


def _check_device(op: str, argument: str, tensor: Tensor, like: Tensor, name: str) -> None:
    good = tensor.device == like.device
    _require(good, op, f"{argument} must be on the device of {name} ({like.device}), got {tensor.device}")


def _check_floating(op: str, argument: str, dtype: torch.dtype) -> None:
    good = dtype in _FLOATING
    _require(good, op, f"{argument} must have dtype float32, float64, bfloat16 or float16, got {dtype}")


def _check_whole(op: str, name: str, whole: int, size: int) -> None:
    # Not where the shard begins: a traced program may serve every rank.
    _require(whole < 0 or size <= whole, op, f"{name} must be at least the {size} of this shard, got {whole}")


def _check_width(op: str, width: int) -> None:
    _require(width >= 1, op, f"the width (d_model) must be positive, got {width}")
    _require(width <= _MOST_COLUMNS, op, f"the width (d_model) must be at most {_MOST_COLUMNS}, got {width}")


# Of a program that is compiled the real op gets a copy of out, so what out overlaps is seen here or nowhere.


def _overlaps_itself(tensor: Tensor) -> bool:
    """As in csrc/torch/checks.h."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return False
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reached:
            return True
        reached += stride * (size - 1)
    return False


def _share_memory(a: Tensor, b: Tensor) -> bool:
    if a.untyped_storage()._cdata != b.untyped_storage()._cdata or a.numel() == 0 or b.numel() == 0:
        return False
    (first, last), (other_first, other_last) = _reach(a), _reach(b)
    return bool(first <= other_last and other_first <= last)


def _reach(tensor: Tensor) -> tuple[Any, Any]:
    """The first and the last byte in the storage."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset() * tensor.element_size()
    return first, first + (steps + 1) * tensor.element_size() - 1


def _same_place(a: Tensor, b: Tensor) -> bool:
    return a.storage_offset() == b.storage_offset() and a.stride() == b.stride()


def _output(
    op: str,
    like: Tensor,
    name: str,
    dtype: torch.dtype,
    token_shape: torch.Size,
    width: int,
    positions: Tensor | None,
    out: Tensor | None,
    d_model: int = -1,
    input: Tensor | None = None,
    frequencies: Tensor | None = None,
    flags: int = 0,
    position_table: Tensor | None = None,
) -> Tensor:
    """What a forward op returns, after the checks that all of them have in common."""
    d_model = width if d_model < 0 else d_model
    _check_width(op, d_model)
    if frequencies is not None:
        _check_frequencies(op, frequencies, d_model, flags, like, name)
    if positions is not None:
        _check_positions(op, positions)
        good = positions.shape == token_shape
        text = f"positions must have the shape of the tokens {list(token_shape)}, got {list(positions.shape)}"
        _require(good, op, text)
        _check_device(op, "positions", positions, like, name)
    if position_table is not None:
        good = position_table.dtype == dtype
        _require(good, op, f"position_table must have the dtype of {name} ({dtype}), got {position_table.dtype}")
        _check_device(op, "position_table", position_table, like, name)
        text = f"position_table must have shape [max_len, {width}], got {list(position_table.shape)}"
        _require(position_table.dim() == 2 and position_table.shape[1] == width, op, text)
        if positions is not None:
            text = f"positions must have dtype int64 or int32 where position_table is given, got {positions.dtype}"
            _require(not positions.is_floating_point(), op, text)
    shape = [*token_shape, width]
    if out is not None:
        _check_device(op, "out", out, like, name)
        _require(out.dtype == dtype, op, f"out must have dtype {dtype}, got {out.dtype}")
        _require(list(out.shape) == shape, op, f"out must have shape {shape}, got {list(out.shape)}")
        text = f"out must not overlap itself, got shape {list(out.shape)} with strides {list(out.stride())}"
        _require(not _overlaps_itself(out), op, text)
        given = {name: like, "input": input, "positions": positions, "position_table": position_table}
        for argument, tensor in given.items():
            good = tensor is None or not _share_memory(out, tensor) or (argument == "x" and _same_place(out, tensor))
            unless = " (unless it is x)" if argument == "x" else ""
            _require(good, op, f"out must not share memory with {argument}{unless}")
    return like.new_empty(shape, dtype=dtype)


def _embed(
    op: str,
    weight: Tensor,
    input: Tensor,
    positions: Tensor | None = None,
    out: Tensor | None = None,
    total_rows: int = -1,
    d_model: int = -1,
    frequencies: Tensor | None = None,
    flags: int = 0,
    position_table: Tensor | None = None,
    **_: Any,
) -> Tensor:
    _check_floating(op, "weight", weight.dtype)
    _require(weight.dim() == 2, op, f"weight must have 2 dimensions [vocab_size, d_model], got {list(weight.shape)}")
    _check_integers(op, "input", input)
    _check_device(op, "input", input, weight, "weight")
    _check_whole(op, "total_rows", total_rows, weight.shape[0])
    _check_whole(op, "d_model", d_model, weight.shape[1])
    width, dtype, tokens = weight.shape[1], weight.dtype, input.shape
    further = (frequencies, flags, position_table)
    return _output(op, weight, "weight", dtype, tokens, width, positions, out, d_model, input, *further)


def _add(
    op: str,
    x: Tensor,
    positions: Tensor | None = None,
    out: Tensor | None = None,
    d_model: int = -1,
    frequencies: Tensor | None = None,
    flags: int = 0,
    position_table: Tensor | None = None,
    **_: Any,
) -> Tensor:
    _check_floating(op, "x", x.dtype)
    _require(x.dim() >= 1, op, "x must have at least 1 dimension [..., d_model], got a scalar")
    _check_whole(op, "d_model", d_model, x.shape[-1])
    tokens, width, further = x.shape[:-1], x.shape[-1], (frequencies, flags, position_table)
    return _output(op, x, "x", x.dtype, tokens, width, positions, out, d_model, None, *further)


def _encode(
    op: str,
    positions: Tensor,
    d_model: int,
    dtype: Any = None,
    out: Tensor | None = None,
    frequencies: Tensor | None = None,
    flags: int = 0,
    **_: Any,
) -> Tensor:
    argument, chosen = ("dtype", dtype) if out is None else ("out", out.dtype)
    _check_floating(op, argument, chosen)
    tokens = positions.shape
    return _output(
        op, positions, "positions", chosen, tokens, d_model, positions, out, frequencies=frequencies, flags=flags
    )


def _encode_general(op: str, dtype: int = 0, **arguments: Any) -> Tensor:
    _require(0 <= dtype < len(DTYPES), op, f"dtype must lie in [0, {len(DTYPES)}), got {dtype}")
    return _encode(op, dtype=DTYPES[dtype], **arguments)


def _gradient(op: str, grad: Tensor, input: Tensor, num_weights: int, d_model: int = -1, **_: Any) -> Any:
    _check_floating(op, "grad", grad.dtype)
    _check_integers(op, "input", input)
    _check_device(op, "input", input, grad, "grad")
    good = grad.dim() == input.dim() + 1 and grad.shape[:-1] == input.shape
    text = f"grad must have the shape of input {list(input.shape)} and one axis more, got {list(grad.shape)}"
    _require(good, op, text)
    _check_width(op, grad.shape[-1])
    _check_whole(op, "d_model", d_model, grad.shape[-1])
    _require(num_weights >= 0, op, f"num_weights must not be negative, got {num_weights}")
    if not op.endswith("sparse"):
        return grad.new_empty((num_weights, grad.shape[-1]))
    count = torch.library.get_ctx().new_dynamic_size()
    return grad.new_empty((count,), dtype=torch.int64), grad.new_empty((count, grad.shape[-1]))


def _rows_of(op: str, argument: str, tokens: Tensor, booleans: bool = False) -> Tensor:
    good = tokens.dtype in (torch.int64, torch.int32) or (booleans and tokens.dtype == torch.bool)
    kinds = "int64, int32 or bool" if booleans else "int64 or int32"
    _require(good, op, f"{argument} must have dtype {kinds}, got {tokens.dtype}")
    _require(tokens.dim() > 0, op, f"{argument} must have at least 1 dimension, got a scalar")
    return tokens.new_empty(tokens.shape, dtype=torch.int64)


def _from_padding(
    op: str, ids_or_mask: Tensor, offset: Tensor | None = None, batch_first: bool = True, **_: Any
) -> Tensor:
    result = _rows_of(op, "ids_or_mask", ids_or_mask, booleans=True)
    if offset is not None:
        _check_integers(op, "offset", offset)
        batch = ids_or_mask.shape[:-1] if batch_first else ids_or_mask.shape[1:]
        text = f"offset must be 0-d or hold one number for each row of the batch {list(batch)}, got shape "
        _require(offset.dim() == 0 or offset.shape == batch, op, f"{text}{list(offset.shape)}")
        if offset.dim() or offset.device.type != "cpu":
            _check_device(op, "offset", offset, ids_or_mask, "ids_or_mask")
    return result


def _from_cu_seqlens(op: str, cu_seqlens: Tensor, total: int, **_: Any) -> Tensor:
    _check_integers(op, "cu_seqlens", cu_seqlens)
    _require(cu_seqlens.dim() == 1, op, f"cu_seqlens must have 1 dimension, got shape {list(cu_seqlens.shape)}")
    text = "cu_seqlens must hold a 0 and the end of each sequence, got no numbers"
    _require(cu_seqlens.shape[0] >= 1, op, text)
    _require(total >= 0, op, f"total must not be negative, got {total}")
    return cu_seqlens.new_empty([total], dtype=torch.int64)


def _from_sequence_ids(op: str, ids: Tensor, **_: Any) -> Tensor:
    return _rows_of(op, "ids", ids)


def _register(name: str, op: str, check: Callable[..., Any]) -> None:
    overload = getattr(torch.ops.posenc_ext, name).default

    def fake(*inputs: Any, **keywords: Any) -> Any:
        result = check(op, **by_name(overload, inputs, keywords))
        return result if overload._schema.returns else None

    torch.library.register_fake(overload.name(), fake)


# The names in messages are those of the public ops.
for _op, _check, *_names in (
    ("embed", _embed, "embed", "_embed_fwd", "embed_out", "check_embed"),
    ("embed_general", _embed, "embed_general", "embed_general_out"),
    ("embed_backward", _gradient, "embed_backward", "_embed_bwd"),
    ("embed_backward_sparse", _gradient, "embed_backward_sparse", "_embed_bwd_sparse"),
    ("embed_general_backward", _gradient, "embed_general_backward"),
    ("embed_general_backward_sparse", _gradient, "embed_general_backward_sparse"),
    ("add_positional_encoding", _add, "add_positional_encoding", "_add_positional_encoding_fwd"),
    ("add_positional_encoding", _add, "add_positional_encoding_out"),
    ("add_general", _add, "add_general", "add_general_out"),
    ("positional_encoding", _encode, "positional_encoding", "positional_encoding_out"),
    ("positional_encoding", _encode_general, "positional_encoding_general"),
    ("positional_encoding", _encode, "positional_encoding_general_out"),
    ("positions_from_padding", _from_padding, "positions_from_padding"),
    ("positions_from_cu_seqlens", _from_cu_seqlens, "positions_from_cu_seqlens"),
    ("positions_from_sequence_ids", _from_sequence_ids, "positions_from_sequence_ids"),
):
    for _name in _names:
        _register(_name, _op, _check)
