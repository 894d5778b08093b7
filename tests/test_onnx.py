"""torch.onnx.export of every layer, any batch and length, and onnxruntime's numbers.

Skipped without the packages that it takes: `pip install '.[onnx]'` brings them.
"""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import make
import pytest
import torch
from helpers import run_code
from make import D, ids, x
from torch import Tensor, nn
from torch.export import Dim

import posenc_ext
from posenc_ext.functional import embed, positional_encoding

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

W = make.table(seed=1)


@pytest.fixture(autouse=True)
def onnxruntime():
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    return pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


class Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(*given)


class Net(nn.Module):
    """A layer and what comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.again = make.layer(padding_idx=1, sparse=True), make.layer("PositionalEncoding", dropout=0.1)
        self.output = nn.Linear(D, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.again(self.embed(tokens)))


def activations(shape: tuple[int, int]) -> Tensor:
    return x((*shape, D))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Callable[..., Any], ...]]] = {
    "Net": (Net, (ids,)),
    "exact": (
        lambda: Call(lambda i, p: embed(i, W, positions=p, convention="marian", offset=5)),
        (ids, lambda shape: torch.randint(-(2**31), 2**31, shape)),
    ),
    "odd width, sequence first": (
        lambda: make.layer(width=7, batch_first=False, convention="tensor2tensor"),
        (lambda shape: ids(shape).int(),),
    ),
    "far, reference": (
        lambda: Call(lambda i, p: embed(i, W, positions=p)),
        (ids, lambda shape: torch.randint(-(2**31), 2**31, shape)),
    ),
    "floating, exact": (
        lambda: Call(lambda i, p: embed(i, W, positions=p, convention="marian", offset=5)),
        (ids, lambda shape: torch.rand(shape, dtype=torch.float64) * 2**31),
    ),
    "floating, reference": (lambda: Call(lambda i, p: embed(i, W, positions=p)), (ids, lambda s: torch.rand(s) * 99)),
    "frequencies": (
        lambda: make.layer(frequencies=nn.Parameter(torch.linspace(0.01, 2, D // 2)), precision="exact"),
        (ids,),
    ),
    "offset": (lambda: Call(lambda i, o: embed(i, W, offset=o)), (ids, lambda shape: shape[0] * shape[1] + 2)),
    "offset of a tensor": (lambda: Call(lambda i, o: embed(i, W, offset=o)), (ids, lambda shape: ids(shape[0], 90))),
    "fp16": (lambda: make.layer("PositionalEncoding", convention="fairseq"), (lambda s: activations(s).half(),)),
    "LearnedPositionalEmbedding": (lambda: make.layer("LearnedPositionalEmbedding"), (activations,)),
    "length": (lambda: Call(lambda a: a + positional_encoding(a.shape[1], D)), (activations,)),
}


def axes(value: Any) -> Any:
    return {axis: Dim.DYNAMIC for axis in range(min(value.dim(), 2))} if isinstance(value, Tensor) else Dim.DYNAMIC


def assert_runs_alike(onnx_program: Any, module: nn.Module, makers: Any, folder: Path) -> None:
    import onnxruntime

    path = folder / "model.onnx"
    onnx_program.save(path)
    session = onnxruntime.InferenceSession(path)
    for shape in ((2, 5), (1, 1), (4, 9)):
        given = [maker(shape) for maker in makers]
        feeds = {i.name: torch.as_tensor(g).numpy() for i, g in zip(session.get_inputs(), given, strict=True)}
        (got,), want = session.run(None, feeds), module(*given)
        # One rounding of the result, besides what the encodings differ by.
        tolerance = 2 * torch.finfo(want.dtype).eps
        torch.testing.assert_close(torch.from_numpy(got), want.detach(), atol=1e-6, rtol=tolerance)


def dynamic_shapes(module: nn.Module, example: tuple[Any, ...]) -> Any:
    shapes = tuple(map(axes, example))
    return (shapes,) if isinstance(module, Call) else shapes


@make.each("name", list(MODELS))
def test_export(name, tmp_path):
    make_module, makers = MODELS[name]
    module = make_module().eval()
    example = tuple(maker((2, 5)) for maker in makers)
    program = torch.onnx.export(
        module, example, dynamo=True, dynamic_shapes=dynamic_shapes(module, example), verbose=False
    )
    assert_runs_alike(program, module, makers, tmp_path)


def test_a_program_that_was_exported_before(tmp_path):
    """It holds the op, and is taken apart first."""
    module, example = make.layer(convention="marian"), (ids((2, 5)),)
    program = torch.export.export(module, example, dynamic_shapes=dynamic_shapes(module, example))
    program = program.run_decompositions(posenc_ext.decompositions())
    assert_runs_alike(torch.onnx.export(program, dynamo=True, verbose=False), module, (ids,), tmp_path)


@make.each(
    "module, said",
    [
        (lambda: make.layer(max_norm=1.0), "posenc_ext::embed: max_norm must be None in an export to ONNX"),
        (
            lambda: Call(lambda i: embed(i, W.detach(), out=torch.empty(*i.shape, D))),
            "posenc_ext::embed: out must be None in an export to ONNX",
        ),
    ],
)
def test_what_onnx_cannot_do_is_refused_by_name(module, said):
    with pytest.raises(Exception, match="Failed to export") as caught:
        torch.onnx.export(module(), (ids((2, 5)),), dynamo=True, verbose=False)
    assert said in "".join(traceback.format_exception(caught.value))


def test_importing_the_package_is_all_it_takes(tmp_path):
    code = """
import torch, posenc_ext
model = posenc_ext.TransformerEmbedding(11, 8)
program = torch.onnx.export(model, (torch.tensor([[1, 2]]),), dynamo=True, verbose=False)
print(sorted({node.domain for node in program.model.graph}))
"""
    assert run_code(code, tmp_path).splitlines()[-1] == "['']"  # nothing but ONNX's own operators


def test_the_exporter_by_torch_jit(onnxruntime):
    """It is on its way out, and works."""
    module, example, file = Net().eval(), ids((2, 5)), io.BytesIO()
    torch.onnx.export(
        module, (example,), file, dynamo=False, input_names=["x"], dynamic_axes={"x": {0: "batch", 1: "length"}}
    )
    session = onnxruntime.InferenceSession(file.getvalue())
    (got,), want = session.run(None, {"x": ids((4, 9), seed=1).numpy()}), module(ids((4, 9), seed=1))
    torch.testing.assert_close(torch.from_numpy(got), want.detach(), atol=1e-6, rtol=1e-6)
