"""Calls every op with values that no caller should send, one argument at a time; for a process of its own.

Prints a line for each call: what it returned, or the error it raised.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import make
import torch
from torch import Tensor

from posenc_ext.ops.call import by_name

FAR = 2**45  # more rows than can be allocated
INTEGERS = (0, -1, 5, FAR, 2**62, 2**63 - 1, -(2**63), 2**64, math.nan, 1.5, True, None, "x", torch.tensor(3))
FLOATS = (math.nan, math.inf, -1.0, 0.0, 1e308, 5e-324, 2**70, None, "x")
FLAGS = (0, 5, 255, 511, 512, -1, 2**62, *((1 << 20) + (1 << bit) for bit in range(22)), (1 << 20) + 0xFFF)
DTYPES = (torch.int32, torch.complex64, torch.quint8, torch.float8_e5m2, None, -1, 99)


def tensors(good: Tensor) -> Iterator[Any]:
    """None, no tensors, and tensors of other shapes, dtypes, devices, layouts and values."""
    yield from (None, [1], "x", good.numpy(), good[:0], good.new_zeros(()), good.to("meta"), good.to_sparse())
    yield from (good.to(d) for d in (torch.bool, torch.uint8, torch.int32, torch.float64, torch.cfloat, torch.uint64))
    yield from (good.flatten()[:1].expand(shape) for shape in ((FAR,), (FAR, 8), (8, FAR), (1, 2**24 + 1)))
    yield from (good.reshape((1,) * 60 + good.shape), good.flatten(), good.transpose(0, -1), good[None])
    ends = (math.nan, 1e38) if good.is_floating_point() else (-(2**63), 2**63 - 1)
    yield from (torch.full_like(good, end) for end in ends)
    yield from (torch._neg_view(good), torch._efficientzerotensor(good.shape, dtype=good.dtype))


def values(argument: Any, good: Any) -> Any:
    """What is tried in place of a good value."""
    if isinstance(good, Tensor) or "Tensor" in str(argument.type):
        return tensors(good.detach().clone() if isinstance(good, Tensor) else make.ids((2, 3)))
    if argument.name in ("flags", "dtype"):
        return FLAGS if argument.name == "flags" else DTYPES
    return FLOATS if "float" in str(argument.type) else INTEGERS


def cut(good: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Views of the second half of a storage that was freed or cut, and the bytes that are left of it."""
    for left in (0, 1, 2 * good.nbytes - 1):
        tensor = torch.cat([good.flatten()] * 2)[good.numel() :].view(good.shape)
        tensor.untyped_storage().resize_(left)
        yield tensor, left


def attempt(what: str, call: make.OpCall, arguments: dict[str, Any]) -> None:
    """Print what is called, and how it ends."""
    print(call.op, what, end=": ", flush=True)  # the last line where the process ends
    try:
        print("returned", type(call.overload(**arguments)))
    except Exception as error:
        print(type(error).__name__, " ".join(str(error).split())[:300])


def main() -> None:
    """Try all of it."""
    warnings.simplefilter("ignore")
    sample = make.Sample("", make.table(), make.ids((2, 3)), {"positions": torch.arange(6).view(2, 3)})
    for call in {**make.op_calls(sample), **make.raw_calls(sample)}.values():
        arguments = by_name(call.overload, call.args, call.kwargs)
        for argument in call.overload._schema.arguments:
            name, good = argument.name, arguments.get(argument.name)
            for value in values(argument, good):
                what = f"{name} {type(value).__name__} {tuple(getattr(value, 'shape', ()))}"
                attempt(what, call, {**arguments, name: value})
            for tensor, left in cut(good) if isinstance(good, Tensor) else ():
                attempt(f"{name} with {left} of {2 * good.nbytes} bytes", call, {**arguments, name: tensor})
