"""A layer and the modules of the textbook, put to the same use."""

from __future__ import annotations

from typing import Any

import make
import torch
from make import D, V, argument
from torch import Tensor, nn


def given(kind: str) -> Tensor:
    """What a layer of this kind takes; activations with a gradient, so that there is one to see."""
    return argument(kind, **({} if kind in make.OF_IDS else {"grad": True}))


def part(module: nn.Module, name: str) -> Any:
    """A layer's `lut` or `dropout`, or the textbook's; or the `layer` itself."""
    kind = {"lut": nn.Embedding, "dropout": nn.Dropout, "layer": nn.Module}[name]
    return next(m for m in module.modules() if isinstance(m, kind))


def trained(module: nn.Module, *args: Any, steps: int = 2) -> list[Tensor]:
    """Outputs and gradients of some steps of training, and what came of the parameters."""
    torch.manual_seed(5)
    parameters = [p for p in (*module.parameters(), *args) if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.3) if parameters else None
    result = []
    for _ in range(steps):
        y = module(*args)
        result.append(y.detach())
        if optimizer is None or not y.requires_grad:
            continue
        optimizer.zero_grad()
        (y - torch.linspace(-1, 1, y.shape[-1])).square().mean().backward()
        result += [p.grad.to_dense().clone() for p in parameters if p.grad is not None]
        optimizer.step()
    return result + [p.detach().clone() for p in (*module.parameters(), *args)]


def assert_alike(mine: nn.Module, book: nn.Module, *args: Any, **tolerance: float) -> None:
    """A layer and the textbook's modules train alike."""
    got, want = (
        trained(module, *[x.detach().clone().requires_grad_(x.requires_grad) for x in args]) for module in (mine, book)
    )
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or {"atol": 1e-5, "rtol": 1e-5}))


class Model(nn.Module):
    """Something that reads the layer's output, so that it can be tied, grouped and initialised."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.norm, self.head = layer, nn.LayerNorm(D), nn.Linear(D, V, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.layer(ids)))
