"""Derivatives: right to the second order, by every route that torch has to them, and never dropped in silence."""

from __future__ import annotations

import functools
import itertools

import make
import pytest
import torch
from helpers import assert_same_bits, true_gradient
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import posenc_ext
from posenc_ext import reference
from posenc_ext.functional import add_positional_encoding, embed, positional_encoding, scaled_embedding
from posenc_ext.ops import add

ops = torch.ops.posenc_ext

V, D, B, T = 6, 5, 2, 3
SCALE = 1.75
SPEC = make.spec()
IDS = torch.tensor([[1, 4, 1], [0, 1, 5]])


def weight64() -> Tensor:
    return make.table(V, D, dtype=torch.float64, seed=1, grad=True)


def x64() -> Tensor:
    return make.x((B, T, D), dtype=torch.float64, seed=2, grad=True)


def op_embed(w: Tensor, i: Tensor = IDS, *, positions: Tensor | None = None) -> Tensor:
    return ops.embed(w, i, positions, 2, SCALE, *SPEC)


# Every way to call the layer, as functions of the one tensor that is differentiated.
CALLS = {
    "embed": (lambda w: embed(IDS, w), weight64),
    "embed, positions": (lambda w: embed(IDS, w, positions=IDS * 3 - 1, offset=2), weight64),
    "embed, sequence first": (lambda w: embed(IDS, w, batch_first=False), weight64),
    "scaled_embedding": (lambda w: scaled_embedding(IDS, w, token_scale=SCALE), weight64),
    "add": (lambda x: add_positional_encoding(x, offset=3), x64),
    "add, positions": (lambda x: add_positional_encoding(x, positions=IDS), x64),
    "add, scaled": (lambda x: add.run(x, None, 3, SPEC, SCALE), x64),
    "ops.embed": (op_embed, weight64),
    "ops.embed, positions": (lambda w: op_embed(w, positions=IDS), weight64),
    "ops.add": (lambda x: ops.add_positional_encoding(x, None, 2, *SPEC), x64),
    "ops.add_general": (lambda x: ops.add_general(x, IDS, token_scale=SCALE), x64),
}
every_call = make.each(("function", "argument"), CALLS)
FUNCTIONAL = {k: v for k, v in CALLS.items() if "ops" not in k}
every_functional = make.each(("function", "argument"), FUNCTIONAL)
every_direct = make.each(("function", "argument"), {k: v for k, v in CALLS.items() if "ops" in k})


# ---- first and second order ------------------------------------------------------------------------------------------


@every_call
def test_derivatives(function, argument):
    """Forward mode is that of the functional forms: a direct call of an op has none."""
    forward = (function, argument) in FUNCTIONAL.values()
    modes = {"check_forward_ad": forward, "check_batched_forward_grad": forward}
    assert gradcheck(function, argument(), check_batched_grad=True, **modes)
    assert gradgradcheck(function, argument(), check_batched_grad=forward, check_fwd_over_rev=forward)


@make.each("op", ["embed", "embed_general"])
@make.each("sample", [s for s in make.samples("cpu", torch.float64, True) if s.differentiable])
def test_derivatives_of_every_kind_of_call(sample, op):
    call = make.op_calls(sample)[op]

    def function(weight: Tensor) -> Tensor:
        if op == "embed":
            return embed(sample.input, weight, **sample.kwargs)
        return call.overload(weight, *call.args[1:], **call.kwargs)

    assert gradcheck(function, sample.weight, fast_mode=True)
    assert gradgradcheck(function, sample.weight, fast_mode=True)
    # Through an op of its own before it: a weight that is no leaf.
    assert gradcheck(lambda weight: function(weight.sin()), sample.weight, fast_mode=True)


def double(module: nn.Module) -> nn.Module:
    torch.manual_seed(3)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter)
    return module


@make.each_layer
def test_derivatives_through_modules(kind):
    module = double(make.layer(kind, rows=V, width=D, max_len=9))
    value = IDS if kind in make.OF_IDS else x64()
    names = [name for name, _ in module.named_parameters()]
    arguments = [parameter.detach().clone().requires_grad_() for parameter in module.parameters()]
    arguments += [value] if value.requires_grad else []
    options = {} if kind == "Embeddings" else {"offset": 2}

    def function(*tensors: Tensor) -> Tensor:
        x = tensors[-1] if value.requires_grad else value
        return torch.func.functional_call(module, dict(zip(names, tensors, strict=False)), (x,), options)

    assert gradcheck(function, arguments, check_forward_ad=True)
    assert gradgradcheck(function, arguments)


# ---- the backward ops ------------------------------------------------------------------------------------------------

FLAGS = list(itertools.product([-1, 1, 3], [False, True]))  # 3 is looked up nowhere
every_flag = pytest.mark.parametrize(("padding_idx", "by_frequency"), FLAGS)
every_id_type = pytest.mark.parametrize("id_type", [torch.int64, torch.int32])


def dense(rows: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(V, D, dtype=values.dtype).index_add(0, rows, values)


@every_flag
@every_id_type
@make.dense_and_sparse
def test_the_weight_gradient_is_differentiable_in_the_output_gradient(padding_idx, by_frequency, id_type, sparse):
    """It is linear in it whatever the flags, even those that make it no derivative itself."""
    arguments = (IDS.to(id_type), V, SCALE, padding_idx, by_frequency)

    def function(grad: Tensor) -> Tensor:
        return dense(*ops.embed_backward_sparse(grad, *arguments)) if sparse else ops.embed_backward(grad, *arguments)

    grad = x64()
    expected, bound = true_gradient(grad, IDS, V, SCALE, padding_idx, by_frequency)
    assert (function(grad).detach() - torch.from_numpy(expected)).abs().le(torch.from_numpy(bound) + 1e-15).all()
    assert gradcheck(function, grad, fast_mode=True)
    assert gradgradcheck(function, grad, fast_mode=True)


@every_flag
@make.dense_and_sparse
@pytest.mark.parametrize("form", ["functional", "op"])
def test_double_backward_through_embed(padding_idx, by_frequency, sparse, form):
    """create_graph: the weight gradient knows the output gradient it came from."""
    weight, grad = weight64(), x64()
    if form == "functional":
        flags = {"scale_grad_by_freq": by_frequency, "sparse": sparse}
        y = embed(IDS, weight, token_scale=SCALE, padding_idx=None if padding_idx < 0 else padding_idx, **flags)
    else:
        y = ops.embed(weight, IDS, None, 0, SCALE, *SPEC, padding_idx, by_frequency, sparse)
    (first,) = torch.autograd.grad(y, weight, grad, create_graph=True)
    assert first.grad_fn is not None
    assert first.is_sparse == sparse
    probe = torch.randn(V, D, dtype=torch.float64)
    (second,) = torch.autograd.grad((first.to_dense() * probe).sum(), grad)
    # The transpose of the map from output gradient to weight gradient.
    counts = torch.bincount(IDS.flatten(), minlength=V)[IDS].unsqueeze(-1)
    expected = probe[IDS] * SCALE / (counts if by_frequency else 1) * IDS.ne(padding_idx).unsqueeze(-1)
    torch.testing.assert_close(second, expected)


@make.dense_and_sparse
def test_double_backward_with_nothing_but_padding(sparse):
    weight, ids = weight64(), torch.full((B, T), 2)
    y = embed(ids, weight, padding_idx=2, sparse=sparse)
    (first,) = torch.autograd.grad(y.square().sum(), weight, create_graph=True)
    (second,) = torch.autograd.grad(first.to_dense().square().sum(), weight, allow_unused=True)
    assert first.to_dense().count_nonzero() == 0
    assert second is None or second.to_dense().count_nonzero() == 0


# ---- nothing is dropped ----------------------------------------------------------------------------------------------


@every_call
def test_the_output_requires_a_gradient_when_the_input_does(function, argument):
    value = argument()
    want = function(value)
    assert want.requires_grad
    (gradient,) = torch.autograd.grad(want.square().sum(), value)
    assert gradient.grad_fn is None  # without create_graph
    assert not function(value.detach()).requires_grad
    with torch.no_grad():
        assert not function(value).requires_grad
    with torch.inference_mode():
        result, made = function(value), value.detach().clone()
        assert result.is_inference()
    assert torch.equal(result, want)
    assert torch.equal(function(made), want)  # what was made in inference mode may be used outside it


RAW = {
    "_embed_fwd": (lambda w: ops._embed_fwd(w, IDS, None, 0, SCALE, *SPEC), weight64),
    "_embed_bwd": (lambda g: ops._embed_bwd(g, IDS, V, SCALE, -1, False), x64),
    "_embed_bwd_sparse": (lambda g: ops._embed_bwd_sparse(g, IDS, V, SCALE, -1, False)[1], x64),
    "_add_positional_encoding_fwd": (lambda x: ops._add_positional_encoding_fwd(x, None, 0, *SPEC), x64),
}


@make.each(("function", "argument"), RAW)
@pytest.mark.filterwarnings("error")
def test_raw_ops_do_not_pass_for_differentiable(function, argument):
    """They have no formula. Who differentiates one hears of it, from an error or a warning."""
    words = r"autograd kernel was not registered|does not require grad"
    with pytest.raises((RuntimeError, UserWarning), match=words):
        function(argument()).sum().backward()


@every_functional
def test_dual_tensors(function, argument):
    """Forward mode: the layer is linear but for the encoding, which has no tangent."""
    value = argument().detach()
    tangent = torch.randn_like(value)
    with forward_ad.dual_level():
        result = function(forward_ad.make_dual(value, tangent))
        primal, got = forward_ad.unpack_dual(result)
    assert torch.equal(primal, function(value))
    torch.testing.assert_close(got, function(tangent) - function(torch.zeros_like(tangent)))


@every_call
def test_forward_mode_over_the_backward_pass(function, argument):
    """A forward pass of long ago, and a dual output gradient now."""
    value = argument()
    y = function(value)
    grad, tangent = torch.randn_like(y), torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, value, tangent, retain_graph=True)
    with forward_ad.dual_level():
        try:
            (result,) = torch.autograd.grad(y, value, forward_ad.make_dual(grad, tangent))
            got = forward_ad.unpack_dual(result).tangent
        except (NotImplementedError, RuntimeError):
            return
    assert got is not None
    torch.testing.assert_close(got, expected)


def test_ids_changed_before_the_backward_pass_are_noticed():
    for form in (lambda w, i: embed(i, w), op_embed):
        ids = IDS.clone()
        y = form(weight64(), ids)
        ids.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_the_graph_can_be_walked_twice_if_kept():
    weight = weight64()
    y = embed(IDS, weight)
    with torch.no_grad():
        weight.zero_()  # it is not kept: the gradient does not depend on it
    y.sum().backward(retain_graph=True)
    once = weight.grad.clone()
    assert once.count_nonzero() > 0
    y.sum().backward()
    assert torch.equal(weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


# ---- torch.func ------------------------------------------------------------------------------------------------------


def textbook_loss(ids: Tensor, weight: Tensor) -> Tensor:
    """The formula of `functional.embed` from torch's own ops."""
    rows = F.embedding(ids, weight) * weight.shape[-1] ** 0.5
    return (rows + positional_encoding(ids.shape[-1], weight.shape[-1], dtype=weight.dtype)).sin().sum()


def loss(ids: Tensor, weight: Tensor) -> Tensor:
    return embed(ids, weight).sin().sum()


@pytest.mark.parametrize("transform", ["grad", "jacrev", "jacfwd", "hessian"])
def test_transforms_of_a_loss(transform):
    weight = weight64().detach()
    transformed = getattr(torch.func, transform)
    got = transformed(loss, argnums=1)(IDS, weight)
    torch.testing.assert_close(got, transformed(textbook_loss, argnums=1)(IDS, weight))
    assert got.count_nonzero() > 0


@pytest.mark.parametrize("padding_idx", [1, -1])
def test_jacobians_agree_under_padding(padding_idx):
    """Both modes leave the padding row out, or forward mode refuses: they may not differ."""
    weight, function = weight64().detach(), functools.partial(embed, IDS, padding_idx=padding_idx)
    reverse = torch.func.jacrev(function)(weight)
    assert reverse[..., padding_idx, :].count_nonzero() == 0
    torch.testing.assert_close(torch.func.jacfwd(function)(weight), reverse)


VMAPPED = {
    "ids": (lambda i, w, p: embed(i, w), (0, None, None)),
    "ids of the second axis": (lambda i, w, p: embed(i, w), (1, None, None)),
    "weights": (lambda i, w, p: embed(i, w), (None, 0, None)),
    "ids and weights": (lambda i, w, p: embed(i, w, offset=4), (0, 0, None)),
    "positions": (lambda i, w, p: embed(i, w, positions=p), (0, None, 0)),
    "ids, sequence first": (lambda i, w, p: embed(i, w, batch_first=False), (0, None, None)),
    "no encoding": (lambda i, w, p: scaled_embedding(i, w), (0, None, None)),
    "x": (lambda i, w, p: add_positional_encoding(w, offset=2), (None, 0, None)),
    "x, positions": (lambda i, w, p: add_positional_encoding(w[:T], positions=p[0]), (None, 0, 0)),
    "x, scaled": (lambda i, w, p: add.run(w, None, 2, SPEC, SCALE), (None, 0, None)),
    "ops.embed, ids": (lambda i, w, p: op_embed(w, i), (0, None, None)),
    "ops.embed, weights": (lambda i, w, p: op_embed(w, i), (None, 0, None)),
    "ops.add": (lambda i, w, p: ops.add_positional_encoding(w, None, 2, *SPEC), (None, 0, None)),
    "positional_encoding": (lambda i, w, p: positional_encoding(p, D), (None, None, 0)),
}


@make.each(("function", "axes"), VMAPPED)
@make.each("dtype", [torch.float32, torch.bfloat16])
def test_vmap(function, axes, dtype):
    """The values of a loop, to the bit."""
    n = 3
    arguments = [torch.randint(V, (n, B, n)), torch.randn(n, V, D).to(dtype), torch.randint(-50, 50, (n, B, n))]
    arguments = [a if axis is not None else a[0] for a, axis in zip(arguments, axes, strict=True)]
    loop = [
        function(*(a if axis is None else a.select(axis, k) for a, axis in zip(arguments, axes, strict=True)))
        for k in range(B if axes[0] == 1 else n)
    ]
    assert_same_bits(torch.func.vmap(function, axes)(*arguments), torch.stack(loop))


@pytest.mark.parametrize("flags", [{}, {"padding_idx": 1}, {"scale_grad_by_freq": True}])
def test_gradients_per_sample(flags):
    """`grad` inside `vmap`: the gradient of each row of the batch on its own."""
    weight = weight64()

    def function(ids: Tensor, w: Tensor) -> Tensor:
        return embed(ids, w, **flags).sin().sum()

    got = torch.func.vmap(torch.func.grad(function, argnums=1), (0, None))(IDS, weight.detach())
    for row, ids in zip(got, IDS, strict=True):
        torch.testing.assert_close(row, torch.autograd.grad(function(ids, weight), weight)[0])


def test_ensembles():
    """Stacked modules run as one."""
    modules = [posenc_ext.TransformerEmbedding(V, D) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(modules)

    def call(p: dict, b: dict, ids: Tensor) -> Tensor:
        return torch.func.functional_call(modules[0], (p, b), (ids,))

    got = torch.func.vmap(call, (0, 0, None))(parameters, buffers, IDS)
    assert torch.equal(got, torch.stack([module(IDS) for module in modules]))


@every_direct
def test_grad_transform_of_the_ops_is_right_or_refused(function, argument):
    """Forward mode over a direct call of an op is not: see posenc_ext/ops."""
    leaf = argument()
    function(leaf).sin().sum().backward()
    try:
        got = torch.func.grad(lambda v: function(v).sin().sum())(leaf.detach())
    except (NotImplementedError, RuntimeError):
        return
    torch.testing.assert_close(got, leaf.grad)


# ---- autocast --------------------------------------------------------------------------------------------------------


@make.each("dtype", [torch.float32, torch.bfloat16])
@make.each("form", {"functional": lambda w: embed(IDS, w), "op": op_embed})
def test_autocast_leaves_the_dtype_of_the_weight(form, dtype):
    """As `F.embedding` does; and the backward pass sees the type that the forward pass gave."""
    weight = torch.randn(V, D, dtype=dtype, requires_grad=True)
    seen = []
    with torch.autocast("cpu", torch.bfloat16):
        y = form(weight)
        y.register_hook(lambda grad: seen.append(grad.dtype))
        z = F.linear(add_positional_encoding(y), torch.randn(D, D))
    assert y.dtype == dtype == F.embedding(IDS, weight).dtype
    assert z.dtype == torch.bfloat16
    z.float().sum().backward()
    assert seen == [dtype]
    assert weight.grad.dtype == dtype
    assert torch.equal(form(weight), y)


# ---- inside training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_activation_checkpointing(reentrant, dropout):
    module = make.layer(rows=V, width=D, dropout=dropout)
    encoding = make.layer("PositionalEncoding", width=D, dropout=dropout)
    anchor = torch.ones((), requires_grad=True)  # a reentrant checkpoint asks for an input with a gradient

    def block(ids: Tensor, factor: Tensor) -> Tensor:
        return encoding(module(ids) * factor).sin()

    gradients = []
    for run in (block, lambda *a: checkpoint(block, *a, use_reentrant=reentrant)):
        torch.manual_seed(5)
        module.zero_grad()
        run(IDS, anchor).sum().backward()
        gradients.append(make.weight_of(module).grad)
    assert torch.equal(*gradients)
    assert gradients[0].count_nonzero() > 0


class Tiny(nn.Module):
    """A layer of attention on top, so that the gradients are those of a real model."""

    def __init__(self, input_layer: nn.Module) -> None:
        super().__init__()
        self.input_layer = input_layer
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.output = nn.Linear(8, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.block(self.input_layer(ids)))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("kind", ["pair", "whole"])
def test_training_equals_training_the_textbook_model(optimizer, kind, threads):
    threads(1)  # a model this small only waits for the others, long so on a busy machine
    ids = torch.randint(V, (4, 6), generator=torch.Generator().manual_seed(0))

    def train(fused: bool) -> tuple[list[float], Tensor]:
        torch.manual_seed(6)
        source = posenc_ext if fused and kind == "pair" else reference
        pair = nn.Sequential(source.Embeddings(8, V), source.PositionalEncoding(8))
        model = Tiny(posenc_ext.fuse(pair) if fused and kind == "whole" else pair)
        steps = optimizer(model.parameters(), lr=0.02)
        losses = []
        for _ in range(6):
            steps.zero_grad()
            value = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            value.backward()
            steps.step()
            losses.append(value.item())
        assert isinstance(model.input_layer, posenc_ext.TransformerEmbedding) == (fused and kind == "whole")
        return losses, next(model.parameters()).detach()

    losses, weight = train(True)
    expected_losses, expected = train(False)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    torch.testing.assert_close(weight, expected, atol=2e-4, rtol=1e-3)
    assert losses[-1] < losses[0]
