"""The ops on DTensors (torch.distributed.tensor): each rank computes the part of the output that its shards give.

A table [V, D] on a mesh, by mesh dimension:
    Replicate   the output is placed as the ids are
    Shard(0)    Partial: a rank writes the tokens whose rows it has, encoding included, and -0 for the others. So their
                sum, in any order, has the bits of one process
    Shard(1)    Shard of the last axis: the encoding is that of these columns
Ids may be a DTensor too, whose shards of the sequence axis know their positions; a plain tensor is the same everywhere.
Nothing is sent but ids that are sharded where the table is, an x that is Partial, and gradients of a replicated table
whose ids are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from posenc_ext.conventions import OFFSETS, SEQUENCE_FIRST, Spec
from posenc_ext.ops.call import EmbedCall
from posenc_ext.ops.tracing import PLAIN
from posenc_ext.plain import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def refuse(op: str, tensor: Tensor, **arguments: Any) -> None:
    """Refuse arguments (those that are not None or False) that a DTensor cannot be combined with."""
    if type(tensor) in PLAIN or not is_dtensor(tensor):
        return
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"posenc_ext::{op}: {name} cannot be combined with a DTensor")


def embed(run: Callable[..., Tensor], call: EmbedCall, general: Mapping[str, Any]) -> Tensor:
    """`run(call, general)` for a weight that is a DTensor; so is the result."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    weight = cast("DTensor", call.weight)
    if not is_dtensor(weight):
        raise ValueError("posenc_ext::embed: weight must be a DTensor where input is one, got a Tensor")
    of_scale = general.get("encoding_scale_tensor")
    refuse("embed", weight, scale_grad_by_freq=call.scale_grad_by_freq, sparse=call.sparse, encoding_scale=of_scale)
    general = _encoding_of("embed", weight, call.positions, general)
    mesh = weight.device_mesh
    _check_placements("embed", "weight", weight)
    input = _on_mesh("embed", "input", call.input, mesh)
    _check_placements("embed", "input", input)
    of_tokens = tuple(
        Replicate() if ours.is_shard() else theirs
        for ours, theirs in zip(weight.placements, input.placements, strict=True)
    )
    of_gradient = tuple(
        Partial() if theirs.is_shard() else ours for ours, theirs in zip(weight.placements, of_tokens, strict=True)
    )
    of_result = tuple(
        theirs if not ours.is_shard() else Partial() if ours.is_shard(0) else Shard(input.dim())
        for ours, theirs in zip(weight.placements, of_tokens, strict=True)
    )
    first_row, first_column = _starts(weight.shape, mesh, weight.placements)
    if of_gradient != weight.placements:  # so that the gradient is summed into the placements of weight
        weight = weight.redistribute(placements=weight.placements)
    if (table := general.get("position_table")) is not None:
        # Of the tokens and columns that this rank writes.
        of_table = tuple(p if p.is_shard(1) else Replicate() for p in weight.placements)
        of_its_gradient = tuple(
            Partial() if theirs.is_shard() or ours.is_shard(0) else placed
            for ours, theirs, placed in zip(weight.placements, of_tokens, of_table, strict=True)
        )
        general = {**general, "position_table": _local_table("embed", table, mesh, of_table, of_its_gradient)}
    part = call._replace(
        weight=weight.to_local(grad_placements=of_gradient),
        input=input.redistribute(placements=of_tokens).to_local(),
        positions=_local_positions("embed", call.positions, mesh, of_tokens),
        offset=_local_offset(call.positions, call.offset, call.flags, input.shape, mesh, of_tokens),
    )
    rows, d_model = weight.shape
    where = {"first_row": first_row, "total_rows": rows, "first_column": first_column, "d_model": d_model}
    return _dtensor(run(part, {**general, **where}), mesh, of_result, (*input.shape, d_model))


def add(
    run: Callable[..., Tensor],
    x: Tensor,
    positions: Tensor | None,
    offset: int,
    spec: Spec,
    token_scale: float,
    further: Mapping[str, Any],
) -> Tensor:
    """`run` with these arguments for an x that is a DTensor; so is the result."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    refuse("add_positional_encoding", x, encoding_scale=further.get("encoding_scale_tensor"))
    further = _encoding_of("add_positional_encoding", x, positions, further)
    whole = cast("DTensor", x)
    if any(placement.is_partial() for placement in whole.placements):
        whole = whole.redistribute(placements=[Replicate() if p.is_partial() else p for p in whole.placements])
    _check_placements("add_positional_encoding", "x", whole)
    mesh, width, last = whole.device_mesh, whole.shape[-1], whole.dim() - 1
    of_tokens = tuple(Replicate() if p.is_shard(last) else p for p in whole.placements)
    if (table := further.get("position_table")) is not None:
        of_table = tuple(Shard(1) if p.is_shard(last) else Replicate() for p in whole.placements)
        of_its_gradient = tuple(
            Partial() if theirs.is_shard() else placed for theirs, placed in zip(of_tokens, of_table, strict=True)
        )
        table = _local_table("add_positional_encoding", table, mesh, of_table, of_its_gradient)
        further = {**further, "position_table": table}
    result = run(
        whole.to_local(),
        _local_positions("add_positional_encoding", positions, mesh, of_tokens),
        _local_offset(positions, offset, spec.flags, whole.shape[:-1], mesh, of_tokens),
        spec,
        token_scale,
        _starts(whole.shape, mesh, whole.placements)[-1],
        width,
        dict(further),
    )
    return _dtensor(result, mesh, whole.placements, whole.shape)


def positions(
    op: str,
    name: str,
    count: Callable[..., Tensor],
    tokens: Tensor,
    batch_first: bool,
    offsets: Tensor | None = None,
) -> Tensor:
    """`count(tokens)`, or `count(tokens, offsets=...)`, for ids that are a DTensor; the result is placed as they are.

    Ids whose sequence axis is in parts are gathered first, since a count goes on from part to part.
    """
    from torch.distributed.tensor import Replicate, Shard

    whole = cast("DTensor", tokens)
    _check_placements(op, name, whole)
    mesh, sequence = whole.device_mesh, whole.dim() - 1 if batch_first else 0
    of_rows = tuple(Replicate() if p.is_shard(sequence) else p for p in whole.placements)
    rest = {}
    if offsets is not None:
        # Their axes are the batch axes of the tokens.
        of_offsets = tuple(
            Shard(p.dim - (not batch_first)) if isinstance(p, Shard) and offsets.dim() else Replicate() for p in of_rows
        )
        rest["offsets"] = _on_mesh(op, "offset", offsets, mesh).redistribute(placements=of_offsets).to_local()
    local = count(whole.redistribute(placements=of_rows).to_local(), **rest)
    result = cast("DTensor", _dtensor(local, mesh, of_rows, tuple(whole.shape)))
    return result.redistribute(placements=whole.placements)


def _check_placements(op: str, name: str, tensor: DTensor) -> None:
    from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

    if any(isinstance(p, _StridedShard) or not isinstance(p, (Replicate, Shard)) for p in tensor.placements):
        raise ValueError(f"posenc_ext::{op}: placements of {name} must be Replicate or Shard, got {tensor.placements}")


def _on_mesh(op: str, name: str, tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    from torch.distributed.tensor import DTensor, Replicate

    if not isinstance(tensor, DTensor):
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if tensor.device_mesh != mesh:
        raise ValueError(f"posenc_ext::{op}: {name} must be on the mesh {mesh}, got {tensor.device_mesh}")
    return tensor


def _starts(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[int, ...]:
    """Where this rank's shard of a tensor of this shape begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)[1]


def _encoding_of(op: str, like: Tensor, positions: Tensor | None, further: Mapping[str, Any]) -> Mapping[str, Any]:
    """Frequencies are whole on each rank. Gradients to them, or to positions, are in parts, and not summed."""
    frequencies = further.get("frequencies")
    for name, tensor in {"positions": positions, "frequencies": frequencies}.items():
        refuse(op, like, **{f"a gradient to {name}": tensor is not None and tensor.requires_grad})
    if frequencies is None or not is_dtensor(frequencies):
        return further
    return {**further, "frequencies": cast("DTensor", frequencies).full_tensor()}


def _local_positions(
    op: str, positions: Tensor | None, mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> Tensor | None:
    if positions is None:
        return None
    return _on_mesh(op, "positions", positions, mesh).redistribute(placements=placements).to_local()


def _local_table(
    op: str, table: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], of_gradient: tuple[Placement, ...]
) -> Tensor:
    placed = _on_mesh(op, "position_table", table, mesh).redistribute(placements=placements)
    return placed.to_local(grad_placements=of_gradient)


def _local_offset(
    positions: Tensor | None,
    offset: int,
    flags: int,
    token_shape: torch.Size,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
) -> int:
    """The running index of a shard begins where it does along the sequence."""
    if (positions is not None and not flags & OFFSETS) or not token_shape:
        return offset
    return offset + _starts(token_shape, mesh, placements)[0 if flags & SEQUENCE_FIRST else -1]


def _dtensor(local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor

    strides = [math.prod([max(size, 1) for size in shape[axis + 1 :]]) for axis in range(len(shape))]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides))
