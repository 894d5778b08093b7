"""Every registered op under `torch.library.opcheck`, and its fake kernel against the real one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import DTYPES, Sample, name_of, sample_inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from posenc_ext import CONVENTIONS, functional
from posenc_ext.conventions import NO_WAVES

ops = torch.ops.posenc_ext

TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

PREFIX = "posenc_ext::"
REGISTERED = sorted(n.removeprefix(PREFIX) for n in torch._C._dispatch_get_all_op_names() if n.startswith(PREFIX))


@dataclasses.dataclass
class Case:
    """One call `torch.ops.posenc_ext.<op>(*arguments)`."""

    op: str
    name: str
    arguments: tuple[Any, ...]

    def overload(self) -> Callable[..., Any]:
        return getattr(ops, self.op).default

    def __str__(self) -> str:
        return f"{self.op}, {self.name}"


def call_of(sample: Sample) -> dict[str, Any]:
    """The arguments of the ops for a call of `functional.embed`."""
    options = dict(sample.kwargs)
    batch_first = options.pop("batch_first", True)
    convention = CONVENTIONS[options.pop("convention", "vaswani")]
    positions = options.pop("positions", None)
    if positions is not None:
        positions = positions.expand(sample.input.shape)
    return {
        "positions": positions,
        "offset": options.pop("offset", 0),
        "scale": options.pop("token_scale", 1.75),
        "recipe": convention.recipe(options.pop("precision", None), batch_first),
        "padding_idx": options.pop("padding_idx", -1),
        "by_frequency": options.pop("scale_grad_by_freq", False),
        **options,
    }


def cases_of(sample: Sample) -> Iterator[Case]:
    """The call of every op that a sample describes."""
    weight, ids, call = sample.weight, sample.input, call_of(sample)
    positions, offset, scale, recipe = call["positions"], call["offset"], call["scale"], call["recipe"]
    flags = (call["padding_idx"], call["by_frequency"])
    width = weight.shape[1]
    x = torch.randn(*ids.shape, width).to(weight.dtype).requires_grad_(weight.requires_grad)
    head = (weight, ids, positions, offset, scale, *recipe)
    backward = (x, ids, weight.shape[0], scale, *flags)
    fresh = weight.new_empty(*ids.shape, width)
    yield Case("embed", sample.name, (*head, *flags, False))
    yield Case("_embed_fwd", sample.name, head)
    yield Case("embed_out", sample.name, (*head, fresh.clone()))
    checked = (weight, ids, positions, offset, *recipe)
    yield Case("check_embed", sample.name, checked)
    yield Case("check_embed", f"{sample.name}, out", (*checked, fresh.clone()))
    for op in ("embed_backward", "_embed_bwd", "embed_backward_sparse", "_embed_bwd_sparse"):
        yield Case(op, sample.name, backward)
    adding = (x, positions, offset, *recipe)
    yield Case("add_positional_encoding", sample.name, adding)
    yield Case("_add_positional_encoding_fwd", sample.name, adding)
    yield Case("add_positional_encoding_out", sample.name, (*adding, fresh.clone()))
    encoding = (ids if positions is None else positions, width, offset, *recipe)
    yield Case("positional_encoding", sample.name, (*encoding, weight.dtype))
    yield Case("positional_encoding_out", sample.name, (*encoding, fresh.clone()))


# Kinds of call that differ for the machinery around an op, not only for its kernel.
FEW = ("batch", "no tokens", "table with strides", "padding")
# Outputs of unknown length. When they need a gradient the last check adds up the sums of the outputs in place, starting
# with the integer one, and fails on that alone: test_sparse_gradient_traced takes its place.
SPARSE = ("embed_backward_sparse", "_embed_bwd_sparse")


def checked(dtype: torch.dtype, requires_grad: bool) -> Iterator[Any]:
    for sample in sample_inputs("cpu", dtype, requires_grad):
        for case in cases_of(sample):
            if requires_grad and not any(isinstance(a, Tensor) and a.requires_grad for a in case.arguments):
                continue
            # The slow last check, which traces everything, once for each way through the dispatcher.
            tests = TESTS if sample.name in FEW[: 4 if dtype == torch.float32 else 1] else TESTS[:-1]
            if requires_grad and case.op in SPARSE:
                tests = TESTS[:-1]
            kind = f"{case}, {name_of(dtype)}{', grad' if requires_grad else ''}"
            yield pytest.param(case, tests, id=kind)


CHECKED = [
    parameter
    for dtype in DTYPES
    for requires_grad in (False, True)
    if dtype == torch.float32 or requires_grad
    for parameter in checked(dtype, requires_grad)
]


def test_no_op_is_left_out():
    def ops_under(tests: tuple[str, ...]) -> set[str]:
        return {p.values[0].op for p in CHECKED if set(tests) <= set(p.values[1])}

    assert ops_under(TESTS) == ops_under(TESTS[:1]) == set(REGISTERED)


@pytest.mark.parametrize(("case", "tests"), CHECKED)
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")  # raw ops: tests/test_autograd.py
def test_opcheck(case, tests):
    assert opcheck(case.overload(), case.arguments, test_utils=tests) == dict.fromkeys(tests, "SUCCESS")


@pytest.mark.parametrize("op", SPARSE)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_sparse_gradient_traced(op, requires_grad):
    """The number of rows is known only at run time: a traced call carries it as a symbol."""
    ids = torch.tensor([[3, 1, 3], [0, 3, 2]])
    call = getattr(ops, op)

    def function(grad: Tensor) -> tuple[Tensor, Tensor]:
        return call(grad, ids, 5, 1.75, 2, True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    grad = torch.randn(2, 3, 4, requires_grad=requires_grad)
    for got, expected in zip(compiled(grad), function(grad), strict=True):
        assert torch.equal(got, expected)
    if requires_grad and not op.startswith("_"):
        gradients = [torch.autograd.grad(f(grad)[1].sin().sum(), grad)[0] for f in (compiled, function)]
        assert torch.equal(*gradients)
        assert gradients[0].count_nonzero() > 0


def test_sparse_flag_of_embed():
    """Its gradient is sparse, which tracing refuses; the rest of the checks hold."""
    weight = torch.randn(5, 4, requires_grad=True)
    arguments = (weight, torch.tensor([1, 2, 1]), None, 0, 1.75, *CONVENTIONS["vaswani"].recipe(), -1, False, True)
    opcheck(ops.embed.default, arguments, test_utils=TESTS[:-1])


@pytest.mark.parametrize("op", ["embed", "_embed_fwd"])
def test_recipe_without_waves(op):
    arguments = (torch.randn(5, 4), torch.tensor([[1, 2, 1]]), None, 0, 1.75, *NO_WAVES)
    opcheck(getattr(ops, op).default, arguments)


# ---- fake kernels ----------------------------------------------------------------------------------------------------


def described(value: Any) -> list[tuple[Any, ...]]:
    tensors = [value] if isinstance(value, Tensor) else list(value or ())
    return [(tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad, t.storage_offset()) for t in tensors]


LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, 1),
    "expanded": lambda t: t[:1].expand(4, *t.shape[1:]),
    "strided": lambda t: t[:, ::2],
    "offset": lambda t: t[1:],
    "empty": lambda t: t[:0],
    "empty, transposed": lambda t: t[:, :0].transpose(0, 1),
    "one token": lambda t: t[0, 0],
    "four axes, permuted": lambda t: t.unsqueeze(0).expand(2, *t.shape).movedim((0, 1, 2), (2, 0, 1)),
}


def layout_cases(layout: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Iterator[Case]:
    """Every op on ids of this layout; where it applies, on activations and output gradients of it as well."""
    ids = layout(torch.randint(5, (3, 4)))
    positions = layout(torch.randint(90, (3, 4)))
    x = layout(torch.randn(3, 4, 6).to(dtype))
    weight = torch.randn(5, 12).to(dtype)[:, ::2]
    recipe = CONVENTIONS["tensor2tensor"].recipe()
    out = torch.empty(x.shape, dtype=dtype)
    head = (weight, ids, positions, 3, 1.5, *recipe)
    yield Case("embed", "", (*head, 1, True, False))
    yield Case("_embed_fwd", "", head)
    yield Case("embed_out", "", (*head, out))
    yield Case("check_embed", "", (weight, ids, positions, 3, *recipe, out))
    for op in ("embed_backward", "_embed_bwd"):
        yield Case(op, "", (x, ids, 5, 1.5, 1, True))
    for op in ("add_positional_encoding", "_add_positional_encoding_fwd"):
        yield Case(op, "", (x, positions, 3, *recipe))
    yield Case("add_positional_encoding_out", "", (x, positions, 3, *recipe, out))
    yield Case("positional_encoding", "", (positions, 6, 3, *recipe, dtype))
    yield Case("positional_encoding_out", "", (positions, 6, 3, *recipe, out))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
def test_fake_outputs_are_laid_out_as_real_ones(layout, dtype):
    """A compiled program is built for the strides of the fake output, and reads the real one by them."""
    seen = set()
    for case in layout_cases(layout, dtype):
        seen.add(case.op)
        real = described(case.overload()(*case.arguments))
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in case.arguments]
            fake = described(case.overload()(*fakes))
        assert fake == real, case.op
        if not case.op.endswith("out") and case.op != "check_embed":
            assert len(real) == 1
            # And so do meta tensors, on their own device.
            metas = [a.to("meta") if isinstance(a, Tensor) else a for a in case.arguments]
            (meta,), ((*sizes, device, _, _),) = described(case.overload()(*metas)), real
            assert meta[:3] == tuple(sizes)
            assert meta[3].type == "meta"
            assert device.type == "cpu"
    # The sparse ops have an output of unknown length, which the test above traces.
    assert seen == set(REGISTERED) - set(SPARSE)


BAD = {
    "ids of floats": lambda: functional.embed(torch.ones(2, 3), torch.randn(5, 4)),
    "weight of integers": lambda: functional.embed(torch.ones(2, 3).long(), torch.ones(5, 4).long()),
    "positions of floats": lambda: functional.embed(
        torch.ones(2, 3).long(), torch.randn(5, 4), positions=torch.ones(2, 3)
    ),
    "op, flat weight": lambda: ops.embed(
        torch.randn(5), torch.ones(2, 3).long(), None, 0, 1.5, *CONVENTIONS["vaswani"].recipe()
    ),
    "op, other positions": lambda: ops.embed(
        torch.randn(5, 4), torch.ones(2, 3).long(), torch.ones(3).long(), 0, 1.5, *CONVENTIONS["vaswani"].recipe()
    ),
    "x of integers": lambda: functional.add_positional_encoding(torch.ones(2, 3, 4).long()),
    "x, other positions": lambda: ops.add_positional_encoding(
        torch.randn(2, 3, 4), torch.ones(3).long(), 0, *CONVENTIONS["vaswani"].recipe()
    ),
    "encoding of integers": lambda: functional.positional_encoding(3, 4, dtype=torch.int64),
    "encoding at floats": lambda: functional.positional_encoding(torch.ones(3), 4),
    "encoding of no width": lambda: functional.positional_encoding(3, 0),
    "encoding of negative width": lambda: functional.positional_encoding(3, -2),
    "weight of no width": lambda: functional.embed(torch.ones(2, 3).long(), torch.randn(5, 0)),
    "scalar x": lambda: functional.add_positional_encoding(torch.tensor(1.0)),
    "gradient of another shape": lambda: ops.embed_backward(torch.randn(2, 4), torch.ones(3).long(), 5, 1.5, -1, False),
    "gradient of too few axes": lambda: ops.embed_backward(torch.randn(3), torch.ones(3).long(), 5, 1.5, -1, False),
    "gradient of integers": lambda: ops.embed_backward(
        torch.ones(3, 4).long(), torch.ones(3).long(), 5, 1.5, -1, False
    ),
    "sparse gradient of another shape": lambda: ops.embed_backward_sparse(
        torch.randn(2, 4), torch.ones(3).long(), 5, 1.5, -1, False
    ),
    "out of another shape": lambda: functional.embed(
        torch.ones(2, 3).long(), torch.randn(5, 4), out=torch.empty(2, 3, 5)
    ),
    "out of another type": lambda: functional.embed(
        torch.ones(2, 3).long(), torch.randn(5, 4), out=torch.empty(2, 3, 4).double()
    ),
    "x, out of another shape": lambda: functional.add_positional_encoding(
        torch.randn(2, 3, 4), out=torch.empty(2, 3, 5)
    ),
    "encoding, out of another shape": lambda: functional.positional_encoding(3, 4, out=torch.empty(3, 5)),
    "gradient, ids of floats": lambda: ops.embed_backward(torch.randn(3, 4), torch.ones(3), 5, 1.5, -1, False),
}


@pytest.mark.parametrize("call", BAD.values(), ids=BAD)
def test_fake_kernels_refuse_what_real_ones_refuse(call):
    """Found while tracing, with the same first words, and not by the compiled program at run time."""
    with pytest.raises(ValueError, match="posenc_ext::") as real:
        call()
    with FakeTensorMode(), pytest.raises(Exception, match="posenc_ext::") as fake:
        call()
    # Up to the requirement: the values got may be written in another way.
    assert str(fake.value).partition(" must ")[0] in str(real.value)
    assert fake.type is ValueError
