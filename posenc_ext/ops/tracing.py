"""Whether somebody records a call. The op that is called then must be the public one, which carries the formula.

`run` in embed.py and add.py asks the same without a call of a Python function: it costs an eager call 0.1 microseconds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

dynamo_compiling = torch.compiler.is_dynamo_compiling  # first, since it cannot trace the other two
dispatch_modes = torch._C._len_torch_dispatch_stack
jit_tracing = torch._C._is_tracing
# Other types may stand for tensors of a program, or do something of their own with each op.
PLAIN = frozenset((Tensor, nn.Parameter))


def is_traced(tensor: Tensor) -> bool:
    """Whether a call with this tensor is recorded."""
    return bool(dynamo_compiling() or dispatch_modes() or jit_tracing() or type(tensor) not in PLAIN)


def in_onnx_export() -> bool:
    """Whether `torch.onnx.export` is at work; also where Dynamo traces for it, which takes torch's own for False."""
    return torch.onnx.is_in_onnx_export()


# As torch.compiler.assume_constant_result, see plain.py.
in_onnx_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def decomposed(op: Any) -> Any:
    """The op, or the same in ATen where a graph must not hold an op of ours, since ONNX has none like it."""
    if not torch.onnx.is_in_onnx_export():
        return op
    from posenc_ext.decompositions import decompositions  # which needs the ops

    return decompositions()[op]
