"""PyTorch's own tools, used on a layer and on the textbook's modules: what comes out is the same."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import make
import pytest
import torch
from alike import Model, assert_alike, given, part, trained
from helpers import assert_refused, assert_same_bits, is_fused, wide
from make import B, D, T, V, argument, twins
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as registry
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import posenc_ext
from posenc_ext import CONVENTIONS, functional

pytestmark = pytest.mark.usefixtures("torchs_dropout")

Seen = list[tuple[str, Tensor]]
IDS = argument("Embeddings")


@pytest.fixture(autouse=True)
def _one_thread(threads):
    threads(1)  # models this small only wait for the others, long so on a busy machine


def replace(module: nn.Module, name: str, make_new: Callable[[Any], nn.Module]) -> None:
    """Put another module in the place of a part, by setattr."""
    old = part(module, name)
    parent, attribute = next((m, n) for m in module.modules() for n, child in m.named_children() if child is old)
    setattr(parent, attribute, make_new(old))


# ---- hooks, and forwards of an instance ------------------------------------------------------------------------------

PLACES = {
    "lut of Embeddings": ("Embeddings", "lut"),
    "lut": ("TransformerEmbedding", "lut"),
    "dropout": ("TransformerEmbedding", "dropout"),
    "dropout of PositionalEncoding": ("PositionalEncoding", "dropout"),
    "dropout of LearnedPositionalEmbedding": ("LearnedPositionalEmbedding", "dropout"),
    "Embeddings": ("Embeddings", "layer"),
    "TransformerEmbedding": ("TransformerEmbedding", "layer"),
    "PositionalEncoding": ("PositionalEncoding", "layer"),
}


def noisy(y: Tensor) -> Tensor:
    """Noise on embeddings, as NEFTune puts it there in training."""
    return y + torch.empty_like(y).uniform_(-1, 1) * 5 / math.sqrt(T * D)


def on_gradients(seen: Seen, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A backward hook: for ids there is no gradient of the input to change."""

    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        seen.append(("backward", grad_output[0].clone()))
        return tuple(g if g is None else change(g) for g in grad_input)

    return hook


def replaced_forward(module: Any, change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    before = module.forward
    module.forward = lambda *args, **kwargs: change(before(*args, **kwargs))
    return lambda: delattr(module, "forward")


def replaced_class(module: Any, change: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    kind, before = type(module), type(module).forward
    kind.forward = lambda self, *args, **kwargs: change(before(self, *args, **kwargs))
    return lambda: setattr(kind, "forward", before)


def record(seen: Seen, name: str, result: Any = None) -> Callable[..., Any]:
    """A forward hook, which may return something else."""

    def hook(module: nn.Module, args: Any, y: Tensor | None = None) -> Any:
        seen.append((name, (args[0] if y is None else y).detach().clone()))
        return None if result is None else result(args[0] if y is None else y)

    return hook


# Each does something to a module and gives back what undoes it.
CHANGES: dict[str, Callable[[Any, Seen], Callable[[], None]]] = {
    "forward hook": lambda m, seen: m.register_forward_hook(record(seen, "y")).remove,
    "forward hook, output changed": lambda m, seen: m.register_forward_hook(record(seen, "y", noisy)).remove,
    "forward hook, always called": lambda m, seen: (
        m.register_forward_hook(record(seen, "y"), always_call=True, prepend=True).remove
    ),
    "forward hook with keywords": lambda m, seen: (
        m.register_forward_hook(lambda m, a, k, y: y * 1.5, with_kwargs=True).remove
    ),
    "forward pre-hook": lambda m, seen: m.register_forward_pre_hook(record(seen, "x")).remove,
    "forward pre-hook, input changed": lambda m, seen: (
        m.register_forward_pre_hook(record(seen, "x", lambda x: (x.flip(1),))).remove
    ),
    "full backward hook": lambda m, seen: m.register_full_backward_hook(on_gradients(seen, lambda g: g * 3)).remove,
    "full backward pre-hook": lambda m, seen: m.register_full_backward_pre_hook(lambda m, g: (g[0] * 3,)).remove,
    "backward hook, old": lambda m, seen: m.register_backward_hook(on_gradients(seen, lambda g: g * 3)).remove,
    "forward of the instance": lambda m, seen: replaced_forward(m, noisy),
    "forward of the class": lambda m, seen: replaced_class(m, lambda y: y * 1.5),
}


@make.each("place", PLACES)
@make.each("change", CHANGES)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
def test_hooks(change, place):
    """They see what they see in the textbook's modules, what they change is changed, and they can be taken off."""
    kind, name = place
    mine, book = twins(kind, **({} if kind == "Embeddings" else {"dropout": 0.5}))
    before, seen = mine.eval()(argument(kind)), ([], [])
    with contextlib.ExitStack() as undo:
        for module, list_ in zip((mine, book), seen, strict=True):
            undo.callback(change(part(module, name), list_))
        assert_alike(mine.train(), book.train(), given(kind))
        assert [n for n, _ in seen[0]] == [n for n, _ in seen[1]]
        for (_, a), (_, b) in zip(*seen, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
        assert name != "lut" or not is_fused(mine, IDS)
    restored = twins(kind)[0]
    mine.load_state_dict(restored.state_dict())
    assert torch.equal(mine.eval()(argument(kind)), before)
    assert kind not in make.OF_IDS or is_fused(mine, IDS)


GLOBAL = {
    "forward hook": lambda hook: registry.register_module_forward_hook(lambda m, a, y: hook(m, y)),
    "forward pre-hook": lambda hook: registry.register_module_forward_pre_hook(lambda m, a: hook(m, a[0])),
    "full backward hook": lambda hook: registry.register_module_full_backward_hook(lambda m, _, g: hook(m, g[0])),
    "full backward pre-hook": lambda hook: registry.register_module_full_backward_pre_hook(lambda m, g: hook(m, g[0])),
}


@make.each("register", GLOBAL)
@make.each_layer
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_hooks_on_all_modules(kind, register):
    modules = twins(kind, **({} if kind == "Embeddings" else {"dropout": 0.0}))
    seen: list[list] = []

    def hook(module: nn.Module, tensor: Tensor) -> None:
        if isinstance(module, nn.Embedding | nn.Dropout):
            seen[-1].append((type(module), tensor.detach().clone()))

    handle = register(hook)
    try:
        for module in modules:
            seen.append([])
            trained(module, given(kind))
    finally:
        handle.remove()
    assert [child for child, _ in seen[0]] == [child for child, _ in seen[1]]
    assert len(seen[0]) > 0
    for (_, a), (_, b) in zip(*seen, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert kind not in make.OF_IDS or is_fused(modules[0], IDS)


class Louder(nn.Embedding):
    """A subclass that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2 + 1


class Wrapper(nn.Module):
    """Another module's place taken, as adapters and offloading do."""

    def __init__(self, inner: nn.Embedding) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids) + 0.5


def factorised(_: nn.Embedding) -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(nn.Embedding(V, 3), nn.Linear(3, D, bias=False))


LUTS: dict[str, Callable[[nn.Embedding], nn.Module]] = {
    "subclass": lambda lut: Louder(V, D, _weight=lut.weight.detach().clone()),
    "wrapper": Wrapper,
    "factorised": factorised,
    "a lookup of its own": lambda lut: nn.Embedding.from_pretrained(lut.weight.detach() * 2, freeze=False),
}


@make.each("lut", LUTS)
@make.each_layer_of_ids
def test_another_lut(kind, lut):
    mine, book = twins(kind)
    for module in (mine, book):
        replace(module, "lut", lut)
    assert is_fused(mine, IDS) == (type(mine.lut) is nn.Embedding)
    assert_alike(mine, book, IDS)


@make.each_layer_of_ids
def test_a_lut_of_another_width_is_refused(kind):
    mine = make.layer(kind)
    assert_refused(lambda: setattr(mine, "lut", nn.Embedding(V, 5)), kind, "lut must have width 8, got 5")
    mine.lut = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, 5))
    assert_refused(lambda: mine(IDS), kind, "lut must return shape [3, 7, 8]", "[3, 7]", "got [3, 7, 5]")
    mine.lut = nn.Sequential(nn.Embedding(V, D), nn.Flatten())
    assert_refused(lambda: mine(IDS), kind, "lut must return shape [3, 7, 8]", "got [3, 56]")


KEYWORDS: dict[str, dict[str, Any]] = {
    "offset": {"offset": 5},
    "offset, 0-d": {"offset": torch.tensor(5)},
    "offset of each row": {"offset": torch.tensor([5, 1, 30])},
    "positions": {"positions": torch.arange(B * T).reshape(B, T)},
    "positions of the sequence": {"positions": torch.arange(T, 0, -1), "offset": 3},
}
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fairseq": {"convention": "fairseq"},
    "exact": {"precision": "exact"},
    "sequence first": {"batch_first": False},
    "scale": {"token_scale": -0.7},
}


@make.each("given", KEYWORDS)
@make.each("recipe", RECIPES)
def test_arguments_mean_the_same_where_lut_is_called(recipe, given):
    mine = make.layer(**recipe)
    if "batch_first" in recipe:
        given = {
            name: value.t().contiguous() if isinstance(value, Tensor) and value.dim() == 2 else value
            for name, value in given.items()
        }
    ids = IDS.t() if "batch_first" in recipe else IDS
    want = mine(ids, **given)
    mine.lut.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(mine(ids, **given), want)


# ---- weights made of others ------------------------------------------------------------------------------------------


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def pruned_for_good(lut: nn.Embedding) -> None:
    prune.l1_unstructured(lut, "weight", amount=0.3)
    prune.remove(lut, "weight")


def constrained(lut: nn.Embedding) -> None:
    parametrize.register_parametrization(lut, "weight", Doubled())
    lut.max_norm = 1.0


PARAMETRISED: dict[str, Callable[[nn.Embedding], object]] = {
    "parametrization": lambda lut: parametrize.register_parametrization(lut, "weight", Doubled()),
    "parametrization and max_norm": constrained,
    "pruned": lambda lut: prune.l1_unstructured(lut, "weight", amount=0.3),
    "pruned for good": pruned_for_good,
    "weight_norm": parametrizations.weight_norm,
    "weight_norm, old": lambda lut: torch.nn.utils.weight_norm(lut),
    "spectral_norm": parametrizations.spectral_norm,
    "spectral_norm, old": lambda lut: torch.nn.utils.spectral_norm(lut),
}


def parametrised(kind: str, tool: Callable[[nn.Embedding], object], seed: int) -> tuple[Any, nn.Module]:
    modules = twins(kind)
    for module in modules:
        torch.manual_seed(seed)  # spectral_norm draws
        tool(part(module, "lut"))
    return modules


@make.each("tool", PARAMETRISED)
@make.each_layer_of_ids
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_parametrised_weights(kind, tool):
    mine, book = parametrised(kind, tool, 1)
    assert_alike(mine, book, IDS)
    state, want = mine.state_dict(), mine.eval()(IDS)
    if mine.max_norm is not None:
        rows = want - make.twins("PositionalEncoding")[0](torch.zeros(B, T, D)) * (kind == "TransformerEmbedding")
        assert (rows / mine.token_scale).norm(dim=-1).max() <= 1.001
    assert [key.removeprefix("0.") for key in book.state_dict() if not key.endswith("pe")] == list(state)
    sources = [state]
    if tool is not PARAMETRISED["spectral_norm, old"]:  # which keeps a version under the path of its module
        sources.append(book.state_dict())
    for source in sources:  # into a layer that had other numbers and had been called
        fresh, _ = parametrised(kind, tool, 2)
        fresh(IDS)
        fresh.load_state_dict(source)
        torch.testing.assert_close(fresh.eval()(IDS), want)
    mine.requires_grad_(False)(IDS)  # the old tools leave a tensor with a history, and only leaves are copied
    torch.testing.assert_close(copy.deepcopy(mine)(IDS), want)
    if not parametrize.is_parametrized(mine.lut):  # those are saved by their state alone
        torch.save(mine, file := io.BytesIO())
        file.seek(0)
        torch.testing.assert_close(torch.load(file, weights_only=False)(IDS), want)


@make.each_layer_of_ids
def test_a_parametrization_that_is_removed_leaves_a_fused_layer(kind):
    mine, book = parametrised(kind, PARAMETRISED["parametrization"], 1)
    for module in (mine, book):
        parametrize.remove_parametrizations(part(module, "lut"), "weight")
    assert is_fused(mine, IDS)
    assert_alike(mine, book, IDS)


# ---- models that look for embeddings ---------------------------------------------------------------------------------


def tie(model: Model) -> None:
    model.head.weight = part(model.layer, "lut").weight


def tie_back(model: Model) -> None:
    # A layer passes it on to its lut, whose weight may be set through either.
    owner = model.layer if hasattr(type(model.layer), "weight") else part(model.layer, "lut")
    owner.weight = model.head.weight


def initialise_by_type(model: Model) -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    torch.manual_seed(2)
    model.apply(init)


def initialise_by_attribute(model: Model) -> None:
    def init(module: nn.Module) -> None:
        if hasattr(module, "weight") and module.weight.dim() > 1:
            nn.init.constant_(module.weight, 0.25)

    model.apply(init)


def freeze(model: Model) -> None:
    model.layer.requires_grad_(False)


def average(decay: float | None) -> Callable[[Model], nn.Module]:
    def wrap(model: Model) -> nn.Module:
        swa = torch.optim.swa_utils
        averaged = swa.AveragedModel(model, multi_avg_fn=swa.get_ema_multi_avg_fn(decay) if decay else None)
        for factor in (1.0, 0.5, 2.0):
            with torch.no_grad():
                part(model, "lut").weight.mul_(factor)
            averaged.update_parameters(model)
        return averaged

    return wrap


def swap(model: Model) -> None:
    """Tensors are swapped under their names, and keep them."""
    before = {id(p) for p in model.parameters()}
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64).to(torch.float32)
        state = {name: value * 0.5 for name, value in model.state_dict().items() if not name.endswith("pe")}
        model.load_state_dict(state, strict=False)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert {id(p) for p in model.parameters()} == before
    torch.utils.swap_tensors(part(model, "lut").weight, nn.Parameter(torch.full((V, D), 0.125)))


class Checkpointed(nn.Module):
    def __init__(self, model: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, ids: Tensor) -> Tensor:
        anchor = torch.ones((), requires_grad=True)  # a reentrant checkpoint asks for an input with a gradient
        return checkpoint(lambda ids, one: self.model(ids) * one, ids, anchor, use_reentrant=self.reentrant)


class Stateless(nn.Module):
    """Called with a table that it does not own, in place of its own."""

    def __init__(self, model: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.call, self.table = [model], call, nn.Parameter(make.table(seed=9))

    def forward(self, ids: Tensor) -> Tensor:
        names = [name for name, _ in self.model[0].named_parameters() if name.endswith("lut.weight")]
        return self.call(self.model[0], dict.fromkeys(names, self.table), (ids,))


USES: dict[str, Callable[[Model], nn.Module | None]] = {
    "tied": tie,
    "tied the other way": tie_back,
    "initialised by type": initialise_by_type,
    "initialised by attribute": initialise_by_attribute,
    "frozen": freeze,
    "deepcopy": copy.deepcopy,
    "averaged": average(None),
    "averaged with decay": average(0.9),
    "swapped": swap,
    "checkpoint": lambda model: Checkpointed(model, False),
    "checkpoint, reentrant": lambda model: Checkpointed(model, True),
    "functional_call": lambda model: Stateless(model, torch.func.functional_call),
    "stateless": lambda model: Stateless(model, torch.nn.utils.stateless.functional_call),
    "float64": lambda model: model.double(),
}


@pytest.mark.filterwarnings("ignore:.*functional_call` is deprecated:FutureWarning")
@make.each("hooked", {"fused": False, "lut called": True})
@make.each("use", USES)
@make.each_layer_of_ids
def test_models(kind, use, hooked):
    modules, seen = [], []
    for module in twins(kind):
        if hooked:
            part(module, "lut").register_forward_hook(record(seen, "y"))
        model = Model(module)
        modules.append(use(model) or model)
    assert_alike(*modules, IDS)
    assert bool(seen) == hooked
    assert len(list(modules[0].parameters())) == len(list(modules[1].parameters()))


@make.each("cast", [nn.Module.half, nn.Module.bfloat16, nn.Module.double, lambda m: m.to("cpu", torch.float16)])
@make.each("hooked", {"fused": False, "lut called": True})
@make.each_layer_of_ids
def test_casts(kind, hooked, cast):
    mine, book = (cast(module) for module in twins(kind))
    if hooked:
        mine.lut.register_forward_hook(lambda *_: None)
    assert mine(IDS).dtype == mine.lut.weight.dtype == book(IDS).dtype
    eps = max(torch.finfo(mine.lut.weight.dtype).eps, 1e-7)  # the textbook rounds its table too, and its sum twice
    torch.testing.assert_close(mine(IDS), book(IDS), atol=4 * eps, rtol=4 * eps)


@make.each_layer_of_ids
def test_weight_decay_groups_by_type(kind):
    """Every parameter is decayed or not, by the type of the module that owns it."""
    groups: list[dict[str, set[str]]] = []
    for module in twins(kind):
        groups.append({"decay": set(), "no decay": set()})
        for owner, child in Model(module).named_modules():
            for name, _ in child.named_parameters(recurse=False):
                group = "decay" if isinstance(child, nn.Linear) else "no decay"
                assert isinstance(child, nn.Linear | nn.Embedding | nn.LayerNorm), owner
                groups[-1][group].add(f"{owner}.{name}".replace("layer.0.", "layer."))
    assert groups[0] == groups[1]


@make.each("hooked", {"fused": False, "lut called": True})
@make.each_layer_of_ids
def test_transforms_over_the_table(kind, hooked):
    """`grad`, and `vmap` over stacked tables, of a layer as a function of its table."""
    results = []
    for module in twins(kind):
        if hooked:
            part(module, "lut").register_forward_hook(record([], "y"))
        key = next(name for name, _ in module.named_parameters())

        def loss(table: Tensor, module: nn.Module = module, key: str = key) -> Tensor:
            return torch.func.functional_call(module, {key: table}, (IDS,)).square().mean()

        stacked = torch.stack([make.table(seed=s) for s in range(3)])
        per_table = torch.func.vmap(torch.func.grad_and_value(loss))(stacked)
        results.append([*per_table, torch.func.grad(loss)(stacked[0]), torch.func.jacrev(loss)(stacked[1])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


@make.each_layer_of_ids
def test_symbolic_trace(kind):
    mine, _ = twins(kind)
    traced = torch.fx.symbolic_trace(mine)
    assert torch.equal(traced(IDS), mine(IDS))
    with torch.no_grad():
        mine.lut.weight.mul_(2)  # the program holds the Parameter, not its numbers
    assert torch.equal(traced(IDS), mine(IDS))


@make.each_layer_of_ids
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pytorchs_own_quantisation(kind):
    quantization = pytest.importorskip("torch.ao.quantization", reason="torch has given up its own quantisation")
    spec = {nn.Embedding: quantization.float_qparams_weight_only_qconfig}
    mine, book = (quantization.quantize_dynamic(module, spec, dtype=torch.quint8) for module in twins(kind))
    assert "quantized" in type(mine.lut).__module__
    torch.testing.assert_close(mine(IDS), book(IDS))


# ---- the dropout child -----------------------------------------------------------------------------------------------


def set_p(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.8


def monte_carlo(module: nn.Module) -> None:
    """All in evaluation, dropout alone in training."""
    module.eval()
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.train()


def stop_dropout(module: nn.Module) -> None:
    for child in module.modules():
        if type(child).__name__.endswith("Dropout"):
            child.eval()


class Kept(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + 1


DROPOUTS: dict[str, Callable[[nn.Module], object]] = {
    "p set": set_p,
    "dropout in training alone": monte_carlo,
    "dropout alone in evaluation": stop_dropout,
    "evaluation": nn.Module.eval,
    "identity in its place": lambda module: replace(module, "dropout", lambda _: nn.Identity()),
    "another kind in its place": lambda module: replace(module, "dropout", lambda _: nn.AlphaDropout(0.3)),
    "a subclass in its place": lambda module: replace(module, "dropout", lambda _: Kept(0.3)),
    "in place": lambda module: setattr(part(module, "dropout"), "inplace", True),
}


@make.each("change", DROPOUTS)
@make.each_layer_with_positions
def test_dropout_is_a_child(kind, change):
    mine, book = twins(kind, dropout=0.4)
    assert_alike(mine, book, given(kind))
    for module in (mine, book):
        change(module)
    assert_alike(mine, book, given(kind))


# ---- what is set later -----------------------------------------------------------------------------------------------

OWN = CONVENTIONS["tensor2tensor"]
OF_LUT: dict[str, Any] = {
    "padding_idx": 2,
    "max_norm": 1.0,
    "norm_type": 1.0,
    "scale_grad_by_freq": True,
    "sparse": True,
}
OF_ENCODING: dict[str, Any] = {"convention": OWN, "precision": "exact", "batch_first": False}
SETTINGS = [
    *(("Embeddings", name, value) for name, value in OF_LUT.items()),
    *(("TransformerEmbedding", name, value) for name, value in OF_LUT.items()),
    *(("TransformerEmbedding", name, value) for name, value in OF_ENCODING.items()),
    *(("PositionalEncoding", name, value) for name, value in OF_ENCODING.items()),
    ("TransformerEmbedding", "token_scale", 0.5),
    ("LearnedPositionalEmbedding", "batch_first", False),
    ("PositionalEncoding", "max_len", 9),
]


@pytest.mark.parametrize(("kind", "name", "value"), SETTINGS, ids=str)
def test_what_is_set_later_acts_at_once(kind, name, value):
    more = {"max_norm": 1.0} if name == "norm_type" else {}
    late, early = make.layer(kind, **more), make.layer(kind, **{"max_len": 40, **more, name: value})
    x = argument(kind) if kind in make.OF_IDS else 10 * argument(kind)
    before = late(x).detach()
    late = make.layer(kind, **more)
    late(x)
    late.load_state_dict(early.state_dict())
    setattr(late, name, value)
    assert getattr(late, name) == value
    if hasattr(late, "pe"):
        assert_same_bits(late.pe, early.pe)
    for got, want in zip(trained(late, x), trained(early, x), strict=True):
        assert_same_bits(got, want)
    acts_on_gradients = {"padding_idx", "scale_grad_by_freq", "sparse", "max_len"}
    assert name in acts_on_gradients or not torch.equal(early(x), before)


@make.each("name", ["token_scale", "embed_scale"])
@make.each_layer_of_ids
def test_the_scale_has_two_names(kind, name):
    mine, book = twins(kind)
    setattr(mine, name, 3.0)
    assert mine.token_scale == mine.embed_scale == 3.0
    part(book, "lut").weight.data.mul_(3.0 / math.sqrt(D))
    torch.testing.assert_close(mine(IDS), book(IDS))


@make.each("frozen", {"Parameter": False, "frozen Parameter": True})
@make.each_layer_of_ids
def test_a_weight_set_later(kind, frozen):
    mine, _ = twins(kind)
    weight = nn.Parameter(make.table(seed=9), requires_grad=not frozen)
    mine.weight = weight
    assert mine.weight is mine.lut.weight is weight
    assert list(mine.parameters()) == [weight]
    assert mine(IDS).requires_grad != frozen
    with pytest.raises(TypeError, match="Parameter"):
        mine.weight = make.table()  # as an nn.Embedding refuses a bare tensor


FIXED = [
    *((kind, name) for kind in make.OF_IDS for name in ("d_model", "vocab_size")),
    *(("LearnedPositionalEmbedding", name) for name in ("d_model", "max_len")),
    ("PositionalEncoding", "pe"),
]


@pytest.mark.parametrize(("kind", "name"), FIXED, ids=str)
def test_what_cannot_be_set(kind, name):
    mine = make.layer(kind)
    with pytest.raises(AttributeError, match=name):
        setattr(mine, name, 16)


@make.each("freeze", [True, False])
@make.each_layer_of_ids
def test_from_pretrained(kind, freeze):
    table = make.table(seed=9)
    mine = getattr(posenc_ext, kind).from_pretrained(table, freeze=freeze, padding_idx=1)
    book = nn.Embedding.from_pretrained(table, freeze=freeze, padding_idx=1)
    assert mine.weight.data_ptr() == table.data_ptr()
    assert mine.weight.requires_grad == book.weight.requires_grad == (not freeze)
    assert (mine.num_embeddings, mine.embedding_dim, mine.padding_idx) == (V, D, 1)
    assert not any(p.is_meta for p in mine.parameters())
    want = book(IDS) * math.sqrt(D)
    if kind == "TransformerEmbedding":
        want = functional.add_positional_encoding(want)
    torch.testing.assert_close(mine(IDS), want)
    assert_refused(lambda: getattr(posenc_ext, kind).from_pretrained(table[0]), "must have 2 dimensions", "[8]")


def test_the_key_of_version_0_1():
    """There the weight was the layer's own."""
    mine, _ = twins("TransformerEmbedding")
    state = {"weight": make.table(seed=9)}
    assert not any(mine.load_state_dict(state))
    assert torch.equal(mine.lut.weight, make.table(seed=9))
    nested = nn.Sequential(mine)
    assert not any(nested.load_state_dict({"0.weight": make.table(seed=8)}))
    assert torch.equal(mine.lut.weight, make.table(seed=8))


# ---- tensors of other kinds ------------------------------------------------------------------------------------------


class Plain(Tensor):
    """A subclass that overrides nothing."""


class Recording(Tensor):
    """A subclass that sees which functions are called on it."""

    seen: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, cls):
                value.__dict__.setdefault("seen", []).append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


WEIGHT, X = make.table(seed=4), argument("PositionalEncoding")
# Each form, its tensors, and the one whose type is another.
ARGUMENTS: dict[str, tuple[Callable[..., Tensor], dict[str, Tensor], str]] = {
    "ids": (functional.embed, {"input": IDS, "weight": WEIGHT}, "input"),
    "weight": (functional.embed, {"input": IDS, "weight": WEIGHT}, "weight"),
    "ids alone": (functional.scaled_embedding, {"input": IDS, "weight": WEIGHT}, "input"),
    "weight alone": (functional.scaled_embedding, {"input": IDS, "weight": WEIGHT}, "weight"),
    "x": (functional.add_positional_encoding, {"x": X}, "x"),
    "positions": (lambda positions: functional.positional_encoding(positions, D), {"positions": IDS}, "positions"),
}


@make.each("kind", {"overriding nothing": Plain, "recording": Recording})
@make.each("case", ARGUMENTS)
def test_tensor_subclasses(case, kind):
    """They get what every function of PyTorch gives them: a call of `__torch_function__`, and results of their type."""
    function, tensors, name = case
    other = tensors[name].clone().as_subclass(kind)
    given, want = {**tensors, name: other}, function(**tensors)
    got = function(**given)
    assert type(got) is kind
    assert torch.equal(got.as_subclass(Tensor), want)
    if kind is Recording:
        assert getattr(function, "__name__", "").replace("<lambda>", "positional_encoding") in other.seen
    if other.is_floating_point():
        leaf, plain = tensors[name].clone().as_subclass(kind).requires_grad_(), tensors[name].clone().requires_grad_()
        for tensor in (leaf, plain):
            function(**{**tensors, name: tensor}).square().sum().backward()
        torch.testing.assert_close(leaf.grad.as_subclass(Tensor), plain.grad)


@make.each("subclass", {"overriding nothing": Plain, "recording": Recording})
@make.each_layer_of_ids
def test_layers_of_tensor_subclasses(kind, subclass):
    mine = make.layer(kind)
    want, before = mine(IDS), mine.weight
    assert torch.equal(mine(IDS.as_subclass(subclass)).as_subclass(Tensor), want)
    mine.lut.weight = nn.Parameter(mine.lut.weight.detach().as_subclass(subclass))
    got = mine(IDS)
    assert type(got) is subclass
    assert subclass is Plain or "embedding" in mine.lut.weight.seen  # a quantised weight knows that one
    torch.testing.assert_close(got.as_subclass(Tensor), want.detach())
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), w)[0] for y, w in ((got, mine.weight), (want, before))))


@make.each("hooked", {"fused": False, "lut called": True})
@make.each_layer_of_ids
def test_fake_tensors(kind, hooked):
    with FakeTensorMode() as mode:
        mine, ids = make.layer(kind), torch.zeros(B, T, dtype=torch.long)
        if hooked:
            mine.lut.register_forward_hook(lambda *_: None)
        y = mine(ids)
        y.sum().backward()
    assert y.fake_mode is mode
    assert y.shape == (B, T, D)
    assert mine.lut.weight.grad.shape == (V, D)
    assert is_fused(make.layer(kind), IDS)  # outside all is as before


class Named(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


MODES = {"device": lambda: torch.device("meta"), "functions": Named}


@make.each("given", KEYWORDS)
@make.each("mode", MODES)
def test_calls_inside_a_mode(mode, given):
    """No tensor of a call is made where nobody said."""
    layers = [make.layer(kind) for kind in make.WITH_POSITIONS]
    values = [argument(kind) for kind in make.WITH_POSITIONS]
    want = [layer(x, **given) for layer, x in zip(layers, values, strict=True)]
    with mode() as active:
        got = [layer(x, **given) for layer, x in zip(layers, values, strict=True)]
    for a, b in zip(got, want, strict=True):
        assert_same_bits(a, b)
    if isinstance(active, Named):
        assert {"embed", "add_positional_encoding"} <= set(active.names)


# ---- nested jagged tensors -------------------------------------------------------------------------------------------

STARTS = torch.tensor([0, 3, 3, 7, 8])
LENGTHS = STARTS.diff().tolist()


def tokens(kind: str) -> Tensor:
    return make.ids(8, seed=6) if kind in make.OF_IDS else make.x((8, D), seed=6, grad=True)


def nested(values: Tensor, **options: Any) -> Tensor:
    """Rows of 3, 0, 4 and 1 tokens."""
    return torch.nested.nested_tensor_from_jagged(values, STARTS, **options)


NESTED: dict[str, dict[str, Any]] = {
    "running": {},
    "offset": {"offset": 5},
    "offset, 0-d": {"offset": torch.tensor(5)},
    "offset of each row": {"offset": torch.tensor([5, 1, 7, 0])},
    "positions": {"positions": nested(torch.arange(8))},
    "positions and offsets": {
        "positions": nested(torch.arange(8)),
        "offset": torch.tensor([5, 1, 7, 0]),
    },
}


def of_row(given: dict[str, Any], i: int) -> dict[str, Any]:
    """What the keywords of a nested call say of one row."""
    row = dict(given)
    if "positions" in given:
        row["positions"] = given["positions"].values()[STARTS[i] : STARTS[i + 1]]
    if isinstance(given.get("offset"), Tensor) and given["offset"].dim():
        row["offset"] = int(given["offset"][i])
    return row


NESTED_CALLS = [
    *((kind, "fused", name) for kind in make.WITH_POSITIONS for name in NESTED),
    *((kind, "lut called", name) for kind in make.OF_IDS for name in ("running", "positions and offsets")),
    ("Embeddings", "fused", "running"),
    ("TransformerEmbedding", "compiled", "positions and offsets"),
    ("PositionalEncoding", "compiled", "running"),
]


@pytest.mark.parametrize(("kind", "how", "name"), NESTED_CALLS)
def test_nested_rows(kind, how, name):
    """Each row is what it is on its own, and so are the gradients."""
    given = NESTED[name] if kind != "Embeddings" else {}
    mine = make.layer(kind)
    if how == "lut called":
        mine.lut.register_forward_hook(lambda *_: None)
    whole = torch.__version__ >= (2, 12)  # before, the tracer does not know locals(), and the graph breaks
    call = torch.compile(mine, backend="aot_eager", fullgraph=whole) if how == "compiled" else mine
    values = tokens(kind)
    x = nested(values, min_seqlen=0, max_seqlen=4)
    got = call(x, **given)
    assert got.shape == (4, x.shape[1], D)  # of the same rows: other tensors of them can be added
    assert got._maybe_max_seqlen == 4
    want = [mine(row, **of_row(given, i)) for i, row in enumerate(values.split(LENGTHS))]
    for a, b in zip(got.unbind(), want, strict=True):
        torch.testing.assert_close(a, b)
    leaves = [values] if kind == "PositionalEncoding" else list(mine.parameters())
    probe = torch.randn(8, D)
    gradients = torch.autograd.grad((got.values() * probe).sum(), leaves)
    expected = torch.autograd.grad((torch.cat(want) * probe).sum(), leaves)
    torch.testing.assert_close(gradients, expected)


@make.each("mode", MODES)
def test_nested_rows_inside_a_mode(mode):
    mine, x = make.layer(), nested(make.ids(8))
    want = mine(x, offset=NESTED["offset of each row"]["offset"])
    with mode():
        got = mine(x, offset=NESTED["offset of each row"]["offset"])
    assert_same_bits(got.values(), want.values())


@make.each_layer
def test_spare_values_behind_nested_rows(kind):
    """Buffers of one size for batches of many: the last row ends before the values do."""
    mine, x = make.layer(kind), tokens(kind)
    starts = STARTS[:-1].clone()
    got, want = (mine(torch.nested.nested_tensor_from_jagged(v, starts)).values() for v in (x, x[: starts[-1]]))
    assert len(got) == 8
    assert torch.equal(got[: starts[-1]], want)


@make.each_layer_with_positions
def test_nested_tensors_of_other_kinds_are_refused(kind):
    mine, x = make.layer(kind), nested(tokens(kind))
    others = torch.nested.nested_tensor_from_jagged(torch.arange(8), STARTS.clone())
    for call, words in (
        (lambda: mine(nested(tokens(kind), lengths=torch.tensor([2, 0, 3, 1]))), "no holes between its rows"),
        (lambda: mine(x, offset=torch.tensor([1, 2])), "offset must be 0-d or have shape [4], got [2]"),
        (lambda: mine(x, positions=others), "positions must be nested in the rows of"),
        (lambda: mine(x, positions=torch.arange(8)), "positions must be nested in the rows of"),
        (lambda: make.layer(kind, batch_first=False)(x), "is batch-first, got batch_first=False"),
    ):
        assert_refused(call, "posenc_ext::", words)
    assert_refused(lambda: mine(x, offset=torch.tensor([True] * 4)), "offset must have dtype int64", error=TypeError)


def test_nested_arguments_of_the_functional_forms():
    ids, x, weight = nested(make.ids(8)), nested(make.x((8, D))), make.table()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strided = torch.nested.nested_tensor([torch.arange(3), torch.arange(4)])
    for call, words in (
        (lambda: functional.scaled_embedding(strided, weight), "must have layout torch.jagged, got torch.strided"),
        (lambda: functional.embed(ids, weight, out=x.values()), "embed: out= cannot be combined with a nested input"),
        (lambda: functional.embed(ids.unsqueeze(-1), weight), "embed: a nested input must be [B, length], got [4"),
        (lambda: functional.add_positional_encoding(x.transpose(1, 2)), "x must be jagged in axis 1, got axis 2"),
    ):
        assert_refused(call, words)
    got = functional.positional_encoding(ids, D)  # of the ids, as positions
    assert torch.equal(got.values(), functional.positional_encoding(ids.values(), D))


# ---- PyTorch's own samples of F.embedding ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples_of_embedding() -> Any:
    pytest.importorskip("expecttest", reason="PyTorch's op database needs expecttest")
    from torch.testing._internal.common_methods_invocations import op_db

    (info,) = [info for info in op_db if info.name == "nn.functional.embedding"]
    return info


# Each form, and the same from F.embedding.
FORMS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "scaled_embedding": (functional.scaled_embedding, nn.functional.embedding),
    "embed": (
        functional.embed,
        lambda ids, weight, **k: functional.add_positional_encoding(nn.functional.embedding(ids, weight, **k)),
    ),
}


@make.each("form", FORMS)
@make.each("requires_grad", {"all samples": False, "differentiable ones": True})
@make.each_dtype
def test_samples_of_embedding(dtype, requires_grad, form, samples_of_embedding):
    mine, book = form
    count = 0
    for sample in samples_of_embedding.sample_inputs("cpu", dtype, requires_grad=requires_grad):
        (ids,), weight, options = sample.args, sample.input.detach(), dict(sample.kwargs)
        table, other, precise = (weight.to(t).clone().requires_grad_() for t in (dtype, dtype, wide(dtype)))
        got, want = mine(ids, table, token_scale=1.0, **options), book(ids, other, **options)
        assert_same_bits(got, want)
        assert_same_bits(table, other)  # scaled down in place, under max_norm
        probe = torch.randn(*ids.shape, weight.shape[1]).to(dtype)
        got.backward(probe)
        assert table.grad.is_sparse == options.pop("sparse", False)  # PyTorch refuses it together with the frequency
        # PyTorch sums in 16 bits, where there are no more.
        book(ids, precise, **options).backward(probe.to(precise.dtype))
        torch.testing.assert_close(table.grad.to_dense(), precise.grad.to(dtype))
        count += 1
    assert count == (3 if requires_grad else 10)


def test_error_samples_of_embedding(samples_of_embedding):
    errors = list(samples_of_embedding.error_inputs("cpu"))
    assert errors
    for error in errors:
        given = error.sample_input
        with pytest.raises(error.error_type, match=error.error_regex):
            nn.functional.embedding(given.args[0], given.input)
        for form, _ in FORMS.values():
            assert_refused(lambda given=given, form=form: form(given.args[0], given.input), "weight must have 2 dim")
