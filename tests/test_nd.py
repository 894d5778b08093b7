"""Positions on several axes: to the bit what each axis gives in columns of its own, in every setting."""

from __future__ import annotations

import itertools

import make
import pytest
import torch
from helpers import Ops, assert_refused, assert_same_bits
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from posenc_ext.functional import (
    add_positional_encoding_nd,
    grid_positions,
    positional_encoding,
    positional_encoding_nd,
)

X = make.x((2, 6, 16))
GRID = grid_positions(2, 3).flatten(0, 1)


def composed(positions: Tensor, d_model: int, widths: list[int], order: str = "axes", **options) -> Tensor:
    """From the encodings of one axis."""
    each = [positional_encoding(positions[..., i], width, **options) for i, width in enumerate(widths)]
    if order == "functions":
        each = [part for half in (0, 1) for part in (e.chunk(2, -1)[half] for e in each)]
    return torch.cat(each, dim=-1)[..., :d_model]


def test_grid_positions():
    for sizes in ((3,), (2, 3), (2, 1, 4), (0, 2)):
        got = grid_positions(*sizes)
        assert (got.shape, got.dtype) == ((*sizes, len(sizes)), torch.int64)
        assert got.flatten(0, -2).tolist() == [list(cell) for cell in itertools.product(*map(range, sizes))]
    assert_refused(grid_positions, "grid_positions: sizes must have at least 1 number")


# Width, and columns of each axis where not None; then what they come to.
WIDTHS = {
    "equal": (16, None, [8, 8]),
    "three axes": (18, None, [6, 6, 6]),
    "diffusers 3-D": (16, (4, 6, 6), [4, 6, 6]),
    "cut": (10, None, [6, 6]),
    "cut three": (16, None, [6, 6, 6]),
    "odd": (13, (5, 8), [5, 8]),
    "odd and cut": (7, None, [4, 4]),
    "one axis": (9, (9,), [9]),
    "no columns for the last": (2, None, [2, 2]),
}


@make.each("case", WIDTHS)
@make.each("dtype", make.DTYPES)
def test_each_axis_has_columns_of_its_own(case, dtype):
    width, widths, full = case
    positions = torch.randint(-50, 50, (5, len(full)))
    x = make.x((3, 5, width), dtype=dtype)
    for convention in make.every_combination():
        want = composed(positions, width, full, convention=convention, dtype=dtype)
        options = {"widths": widths, "convention": convention}
        assert_same_bits(positional_encoding_nd(positions, width, dtype=dtype, **options), want)
        out = torch.full((5, width), torch.nan, dtype=dtype)
        assert positional_encoding_nd(positions, width, out=out, **options) is out
        assert_same_bits(out, want)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        encoding = composed(positions, width, full, convention=convention, dtype=wide)
        want = (x.to(wide) * 1.5 + encoding * 0.5).to(dtype)
        got = add_positional_encoding_nd(x, positions, token_scale=1.5, encoding_scale=0.5, **options)
        assert_same_bits(got, want)


@make.each("layout", ["sin_cos", "cos_sin"])
def test_all_sines_before_all_cosines(layout):
    from posenc_ext import Convention

    convention = Convention(layout=layout)
    for width, widths, full in ((16, None, [8, 8]), (24, None, [8, 8, 8]), (16, (4, 12), [4, 12])):
        positions = torch.randint(-50, 50, (5, len(full)))
        options = {"order": "functions", "convention": convention}
        want = composed(positions, width, full, **options)
        assert_same_bits(positional_encoding_nd(positions, width, widths=widths, **options), want)


@make.each("dtype", [torch.float32, torch.float64])
def test_positions_that_are_no_integers(dtype):
    positions = GRID.to(dtype) * 0.37
    want = composed(positions, 16, [8, 8], convention="marian")
    assert_same_bits(positional_encoding_nd(positions, 16, convention="marian"), want)
    assert_same_bits(add_positional_encoding_nd(X, positions, convention="marian"), X + want)


def test_one_pass():
    """Nothing is written but the result, and it once."""
    for call in (lambda: add_positional_encoding_nd(X, GRID), lambda: positional_encoding_nd(GRID, 16)):
        with Ops() as ops, torch.no_grad():
            call()
        # A dispatch mode sees the form that is traced; outside of one the blocks are written into one tensor.
        assert ops.names.count("posenc_ext::add_general") == 2
    with Ops() as ops, torch.no_grad():
        add_positional_encoding_nd(X, GRID, out=torch.empty_like(X))
    assert [name for name in ops.names if "cat" in name or "copy" in name] == []


def test_in_place_and_strided():
    want = X + composed(GRID, 16, [8, 8])
    x = X.clone()
    assert_same_bits(add_positional_encoding_nd(x, GRID, out=x), want)
    wide = torch.full((2, 6, 20), 7.0)
    add_positional_encoding_nd(X, GRID, out=wide[..., 2:18])
    assert_same_bits(wide[..., 2:18].contiguous(), want)
    assert (wide[..., :2] == 7).all()
    assert (wide[..., 18:] == 7).all()
    image = X.reshape(2, 2, 3, 16)
    assert_same_bits(add_positional_encoding_nd(image, grid_positions(2, 3)), want.reshape(image.shape))
    assert_same_bits(add_positional_encoding_nd(X.transpose(0, 1), GRID[:, None]), want.transpose(0, 1).contiguous())


def test_gradients():
    x, scale = X.double().requires_grad_(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    positions = (GRID.double() * 0.7).requires_grad_()

    def call(*tensors: Tensor, **options) -> Tensor:
        x, positions, scale = tensors
        return add_positional_encoding_nd(
            x, positions, encoding_scale=scale, token_scale=1.3, precision="exact", **options
        )

    assert torch.autograd.gradcheck(call, (x, positions, scale))
    functions = {"order": "functions", "convention": "marian"}
    assert torch.autograd.gradcheck(lambda *tensors: call(*tensors, **functions), (x, positions, scale))
    assert torch.autograd.gradcheck(
        lambda p: positional_encoding_nd(p, 10, precision="exact", dtype=torch.float64), (positions,)
    )
    y = add_positional_encoding_nd(X.clone().requires_grad_(), GRID, token_scale=1.5)
    probe = make.x(tuple(y.shape), seed=1)
    assert_same_bits(torch.autograd.grad(y, next(iter(inputs_of(y))), probe)[0], probe * 1.5)


def inputs_of(y: Tensor) -> list[Tensor]:
    return [f.variable for f, _ in y.grad_fn.next_functions if f is not None]


RECORDED = {
    "make_fx": lambda f: make_fx(f)(X, GRID),
    "symbolic make_fx": lambda f: make_fx(f, tracing_mode="symbolic")(X, GRID),
    "jit.trace": lambda f: torch.jit.trace(f, (X, GRID)),
    "vmap": lambda f: torch.func.vmap(f, in_dims=(0, None)),
    "fx": torch.fx.symbolic_trace,
}


@make.each("record", RECORDED)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_recorded(record):
    def call(x: Tensor, positions: Tensor) -> Tensor:
        return add_positional_encoding_nd(x, positions)

    recorded = record(call)
    other, positions = make.x((2, 6, 16), seed=4), GRID + 3
    assert_same_bits(recorded(other, positions), call(other, positions))


class Module(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return add_positional_encoding_nd(x, GRID, widths=(6, 10))


def test_exported():
    program = torch.export.export(Module(), (X,))
    assert_same_bits(program.module()(X), Module()(X))
    from posenc_ext import decompositions

    lowered = program.run_decompositions(decompositions())
    assert "posenc_ext" not in str(lowered.graph)
    torch.testing.assert_close(lowered.module()(X), Module()(X), atol=3e-7, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic):
    def call(x: Tensor, out: Tensor) -> Tensor:
        add_positional_encoding_nd(x.detach(), GRID, out=out)
        return add_positional_encoding_nd(x, GRID) + positional_encoding_nd(GRID, 16)

    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic)
    for batch in (2, 3):
        x, y = (make.x((batch, 6, 16), seed=batch).requires_grad_() for _ in range(2))
        outs = torch.empty(batch, 6, 16), torch.empty(batch, 6, 16)
        want, got = call(x, outs[0]), compiled(y, outs[1])
        assert_same_bits(got, want)
        assert_same_bits(outs[1], outs[0])
        got.sum().backward()
        assert (y.grad == 1).all()


def test_bad_arguments_are_refused():
    def add(x=X, positions=GRID, **options):
        return lambda: add_positional_encoding_nd(x, positions, **options)

    op = "posenc_ext::add_positional_encoding_nd: "
    for call, text in (
        (add(widths=(8,)), "widths must have one number for each of the 2 axes, got [8]"),
        (add(widths=(8, 6)), "widths must be positive and their sum at least d_model 16, got [8, 6]"),
        (add(widths=(16, 0)), "widths must be positive"),
        (add(order="sines"), "order must be one of 'axes', 'functions', got 'sines'"),
        (add(order="functions"), "order='functions' needs a convention of layout"),
        (add(order="functions", convention="marian", widths=(9, 7)), "must be even and sum to d_model 16, got [9, 7]"),
        (add(positions=GRID[:4]), "positions must be broadcastable to the tokens [2, 6]"),
        (add(positions=GRID[:, :0]), "positions must have at least 1 number in its last axis, got 0"),
        (add(positions=torch.tensor(1)), "positions must have shape [..., n], got a scalar"),
        (add(x=torch.tensor(1.0)), "x must have shape [..., d_model], got a scalar"),
        (add(convention="no"), "convention must be"),
        (add(out=torch.empty(2, 6, 15)), "out must have shape [2, 6, 16], got [2, 6, 15]"),
    ):
        assert_refused(call, op if not text.startswith("convention") else "", text)
    assert_refused(lambda: positional_encoding_nd(GRID, 0), "d_model must be positive, got 0")
    assert_refused(add(x=[1.0]), op, "x must be a torch.Tensor, got list", error=TypeError)
    assert_refused(add(positions=[[1, 2]]), op, "positions must be a torch.Tensor, got list", error=TypeError)
    nested = torch.nested.nested_tensor([X[0], X[1, :3]], layout=torch.jagged)
    assert_refused(add(x=nested), op, "x must not be nested", error=NotImplementedError)
    trained = X.clone().requires_grad_()
    assert_refused(add(x=trained, out=torch.empty_like(X)), op, "out= is not differentiable, but x requires")
    floats = GRID.float().requires_grad_()
    assert_refused(add(positions=floats, out=torch.empty_like(X)), op, "out= is not differentiable, but positions")
