"""Compiles a small model ahead of time for run_model.cpp. Usage: python compile_model.py MODEL.pt2."""

import sys

import torch

import posenc_ext


def make_model() -> torch.nn.Module:
    """Ids [batch, seq] -> [batch, seq, 6]."""
    torch.manual_seed(0)
    return torch.nn.Sequential(posenc_ext.TransformerEmbedding(10, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 6))


def main(path: str) -> None:
    """Export with a sequence of any length, and compile."""
    model, ids = make_model().eval(), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        program = torch.export.export(model, (ids,), dynamic_shapes=({1: torch.export.Dim("seq", max=512)},))
        torch._inductor.aoti_compile_and_package(program, package_path=path)


if __name__ == "__main__":
    main(sys.argv[1])
