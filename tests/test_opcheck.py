"""Every registered op under `torch.library.opcheck`, and its fake kernel against the real one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import make
import pytest
import torch
from helpers import assert_same_bits
from make import B, D, T, V
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from posenc_ext.functional import add_positional_encoding, embed, positional_encoding

ops = torch.ops.posenc_ext

TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

PREFIX = "posenc_ext::"
REGISTERED = sorted(n.removeprefix(PREFIX) for n in torch._C._dispatch_get_all_op_names() if n.startswith(PREFIX))
PUBLIC = sorted(set(REGISTERED) - set(make.TWINS))
# Outputs of unknown length. When they need a gradient the last check adds up the sums of the outputs in place, starting
# with the integer one, and fails on that alone: test_sparse_gradient_traced takes its place.
SPARSE = ("embed_backward_sparse", "_embed_bwd_sparse", "embed_general_backward_sparse")
raw_ops_have_no_formula = pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")


def assert_checked(call: make.OpCall, traced: bool = True) -> None:
    """`traced` adds the slow last check, which traces everything."""
    tests = TESTS if traced and not (call.requires_grad and call.op in SPARSE) else TESTS[:-1]
    found = opcheck(call.overload, call.args, call.kwargs, test_utils=tests)
    assert found == dict.fromkeys(tests, "SUCCESS"), call.op


# Kinds of call that differ for the machinery around an op, not only for its kernel; the first two are traced.
KINDS = ("batch", "no tokens", "table with strides", "padding", "one token", "transposed ids", "positions of a row")


@make.each("op", PUBLIC)
@make.each("kind", KINDS)
def test_opcheck(op, kind):
    for requires_grad in (False, True):
        (sample,) = (s for s in make.samples("cpu", torch.float32, requires_grad) if s.name == kind)
        call = make.op_calls(sample)[op]
        if call.requires_grad == requires_grad:
            assert_checked(call, traced=kind in KINDS[:2])


@make.each("op", PUBLIC)
@make.each("dtype", make.DTYPES[1:])
def test_opcheck_of_other_dtypes(op, dtype):
    assert_checked(make.op_calls(make.samples("cpu", dtype, False)[0])[op], traced=False)


@make.each("raw", list(make.TWINS))
@raw_ops_have_no_formula
def test_raw_ops_are_registered_like_their_public_twins(raw):
    assert_checked(make.raw_calls(make.samples("cpu", torch.float32, False)[0])[raw])


@make.each("raw", list(make.TWINS))
def test_a_raw_op_is_its_public_twin(raw):
    """One function pointer under two names: the same bits, and the same refusal."""
    for dtype in make.DTYPES:
        for sample in make.samples("cpu", dtype, requires_grad=False):
            got, want = (calls(sample)[name]() for calls, name in _both(raw))
            for a, b in zip(as_tuple(got), as_tuple(want), strict=True):
                assert_same_bits(a, b, f"{sample.name}, {dtype}")
    bad = make.Sample("", make.table(), make.ids(), {"positions": make.ids().half(), "padding_idx": V})
    refusals = []
    for calls, name in _both(raw):
        with pytest.raises(ValueError, match="posenc_ext::") as refusal:
            calls(bad)[name]()
        refusals.append(str(refusal.value).splitlines()[0])
    assert refusals[0] == refusals[1]


def _both(raw: str) -> tuple[tuple[Callable[..., Any], str], ...]:
    return (make.raw_calls, raw), (make.op_calls, make.TWINS[raw])


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value or ())


def test_no_op_is_left_out():
    calls = make.op_calls(make.samples("cpu", torch.float32, False)[0])
    assert set(calls) == set(PUBLIC)


@make.each("requires_grad", [False, True])
def test_sparse_gradient_traced(requires_grad):
    """The number of rows is known only at run time: a traced call carries it as a symbol."""
    given = torch.tensor([[3, 1, 3], [0, 3, 2]])

    def function(grad: Tensor) -> tuple[Tensor, Tensor]:
        return ops.embed_backward_sparse(grad, given, 5, 1.75, 2, True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    grad = make.x((2, 3, 4), grad=requires_grad)
    for got, expected in zip(compiled(grad), function(grad), strict=True):
        assert torch.equal(got, expected)
    if requires_grad:
        gradients = [torch.autograd.grad(f(grad)[1].sin().sum(), grad)[0] for f in (compiled, function)]
        assert torch.equal(*gradients)
        assert gradients[0].count_nonzero() > 0


def test_sparse_flag_of_embed():
    """Its gradient is sparse, which tracing refuses; the rest of the checks hold."""
    arguments = (make.table(5, 4, grad=True), torch.tensor([1, 2, 1]), None, 0, 1.75, *make.spec(), -1, False, True)
    assert_checked(make.OpCall("embed", arguments), traced=False)


@make.each("op", ["embed_general", "add_general", "embed_general_backward", "embed_general_backward_sparse"])
def test_ops_that_drop(op):
    for requires_grad in (False, True):
        call = make.op_calls(make.samples("cpu", torch.float32, requires_grad)[0])[op]
        call.kwargs |= {"seed": torch.tensor(7), "dropout_p": 0.3}
        assert_checked(call)


def test_embed_without_encoding():
    assert_checked(make.OpCall("embed", (make.table(), make.ids(), None, 0, 1.75, *make.NONE)))


# ---- fake kernels ----------------------------------------------------------------------------------------------------


def described(value: Any) -> list[tuple[Any, ...]]:
    return [
        (tuple(t.shape), t.stride(), t.dtype, t.device, t.requires_grad, t.storage_offset()) for t in as_tuple(value)
    ]


STRIDES = {
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


def strided_calls(stride: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Iterator[make.OpCall]:
    """Every op on ids and positions of these strides; where it applies, on activations and output gradients as well."""
    options = {"positions": stride(torch.randint(90, (3, 4))), "offset": 3, "convention": "tensor2tensor"}
    sample = make.Sample("", make.table(5, 12, dtype=dtype)[:, ::2], stride(make.ids((3, 4), 5)), options)
    for call in itertools.chain(make.op_calls(sample).values(), make.raw_calls(sample).values()):
        takes_x = "backward" in call.op or "bwd" in call.op or "add_" in call.op
        if takes_x:
            call.args = (stride(make.x((3, 4, 6), dtype=dtype)), *call.args[1:])
        yield call


@make.each("stride", STRIDES)
@make.each("dtype", [torch.float32, torch.bfloat16])
def test_fake_outputs_are_laid_out_as_real_ones(stride, dtype):
    """A compiled program is built for the strides of the fake output, and reads the real one by them."""
    for call in strided_calls(stride, dtype):
        if call.op in SPARSE:  # an output of unknown length, which test_sparse_gradient_traced traces
            continue
        real = described(call())
        with FakeTensorMode() as mode:
            fake = described(call.moved(mode.from_tensor)())
        assert fake == real, call.op
        if not call.op.endswith("out") and call.op != "check_embed":
            # And so do meta tensors, on their own device.
            (meta,), ((*sizes, device, _, _),) = described(call.moved(lambda t: t.to("meta"))()), real
            assert meta[:3] == tuple(sizes)
            assert (meta[3].type, device.type) == ("meta", "cpu")


IDS, WEIGHT, A = make.ids(), make.table(), make.x()
BAD = {
    "ids of floats": lambda: embed(IDS.float(), WEIGHT),
    "weight of integers": lambda: embed(IDS, WEIGHT.long()),
    "weight of no width": lambda: embed(IDS, WEIGHT[:, :0]),
    "positions of halves": lambda: embed(IDS, WEIGHT, positions=IDS.half()),
    "op, flat weight": lambda: ops.embed(WEIGHT[0], IDS, None, 0, 1.5, *make.spec()),
    "op, other positions": lambda: ops.embed(WEIGHT, IDS, IDS[0], 0, 1.5, *make.spec()),
    "out of another shape": lambda: embed(IDS, WEIGHT, out=A[..., 1:]),
    "out of another type": lambda: embed(IDS, WEIGHT, out=A.double()),
    "x of integers": lambda: add_positional_encoding(A.long()),
    "x, other positions": lambda: ops.add_positional_encoding(A, IDS[0], 0, *make.spec()),
    "x, out of another shape": lambda: add_positional_encoding(A, out=torch.empty(B, T, D + 1)),
    "scalar x": lambda: add_positional_encoding(A[0, 0, 0]),
    "encoding of integers": lambda: positional_encoding(3, D, dtype=torch.int64),
    "encoding at halves": lambda: positional_encoding(A.half(), D),
    "encoding of no width": lambda: positional_encoding(3, 0),
    "encoding of negative width": lambda: positional_encoding(3, -2),
    "encoding, out of another shape": lambda: positional_encoding(3, D, out=torch.empty(3, D + 1)),
    "gradient of another shape": lambda: ops.embed_backward(A, IDS[:, 1:], V, 1.5, -1, False),
    "gradient of too few axes": lambda: ops.embed_backward(A[0], IDS, V, 1.5, -1, False),
    "gradient of integers": lambda: ops.embed_backward(A.long(), IDS, V, 1.5, -1, False),
    "gradient, ids of floats": lambda: ops.embed_backward(A, IDS.float(), V, 1.5, -1, False),
    "sparse gradient of another shape": lambda: ops.embed_backward_sparse(A, IDS[:, 1:], V, 1.5, -1, False),
}


@make.each("call", BAD)
def test_fake_kernels_refuse_what_real_ones_refuse(call):
    """Found while tracing, with the same first words, and not by the compiled program at run time."""
    with pytest.raises(ValueError, match="posenc_ext::") as real:
        call()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(Exception, match="posenc_ext::") as fake:
        call()
    # Up to the requirement: the values got may be written in another way.
    assert str(fake.value).partition(" must ")[0] in str(real.value)
    assert fake.type is ValueError
