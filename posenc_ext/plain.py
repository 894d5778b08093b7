"""Whether a child of a layer may be left out: it computes what its class does, and nobody waits for its call."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

dynamo_compiling = torch.compiler.is_dynamo_compiling

_Kind = TypeVar("_Kind", bound=nn.Module)

# Tensors that stand for plain ones while a program is traced.
_PLAIN = (Tensor, nn.Parameter, FakeTensor, FunctionalTensor)

_FORWARDS: dict[type[nn.Module], Any] = {}  # by kind; tools replace those of whole classes, too


def may_be_left_out(kind: type[_Kind]) -> type[_Kind]:
    """Let `is_plain` know this class."""
    _FORWARDS[kind] = kind.forward
    return kind


may_be_left_out(nn.Embedding)
may_be_left_out(nn.Dropout)


def _classes_are_their_own() -> bool:
    """For a compiled program, which guards no class of torch.nn elsewhere either: a call need not look each time."""
    return all(kind.forward is forward for kind, forward in _FORWARDS.items())


# As torch.compiler.assume_constant_result, which would import torch._dynamo: a second of everybody's start.
_classes_are_their_own._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling `module` is calling `kind.forward`: its very class, no hook, no forward of its own."""
    if type(module) is not kind:
        return False
    state = module.__dict__  # half the time of reading attributes
    if dynamo_compiling():  # which would guard each key
        hooks = (
            not _classes_are_their_own()
            or module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
        )
    else:
        hooks = (
            kind.forward is not _FORWARDS[kind]
            or state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
        )
    return not (
        hooks  # or another forward
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
        or "forward" in state
    )


def plain_weight(lut: nn.Module, kind: type[nn.Module] = nn.Embedding) -> Tensor | None:
    """The table of a module of this kind that need not be called; None for one that must be."""
    if not is_plain(lut, kind):
        return None
    weight: Any = lut._parameters.get("weight")
    if weight is None:
        weight = lut.weight  # an attribute: tools that shard put views there
    # The first question spares a compiled program the guards of the others.
    return weight if type(weight) is nn.Parameter or type(weight) in _PLAIN or is_dtensor(weight) else None


def drop(dropout: Any, y: Tensor) -> Tensor:
    """`dropout(y)`, which is not called where nothing would come of it."""
    result: Tensor = y if probability_in_pass(dropout, y) == 0 else dropout(y)
    return result


def probability_in_pass(dropout: Any, x: Tensor) -> float | None:
    """The probability of an `nn.Dropout` that need not be called, 0 where it does nothing; None for one that must be.

    A graph of torch.fx calls it: what is recorded for training may be evaluated later.
    """
    if not is_plain(dropout, nn.Dropout):
        return None
    if not dropout.p:
        return 0.0
    if isinstance(x, torch.fx.Proxy):
        return None
    return dropout.p if dropout.training else 0.0


def is_dtensor(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing torch.distributed.tensor."""
    # First what costs a compiled program no guards, or few.
    if type(tensor) is nn.Parameter or not hasattr(tensor, "device_mesh"):
        return False
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)
