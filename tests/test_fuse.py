"""What `fuse` may and may not replace, and `unfuse`, the way back."""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import make
import pytest
import torch
from helpers import assert_close, assert_refused, assert_same_bits, fields, message
from make import B, D, T, V, argument, layer, pair
from torch import Tensor, nn
from torch.nn import functional as F

import posenc_ext
from posenc_ext import CONVENTIONS, Convention, functional, fuse, reference, unfuse
from posenc_ext.conventions import PRECISIONS
from posenc_ext.reference import sinusoid_table

pytestmark = pytest.mark.usefixtures("torchs_dropout")

SCALE = math.sqrt(D)


@pytest.fixture
def ids() -> Tensor:
    return argument("TransformerEmbedding")


def lookup(rows: int = V, width: int = D, **options) -> nn.Embedding:
    torch.manual_seed(5)
    return nn.Embedding(rows, width, **options)


def encoded(first: nn.Module, width: int = D, **options) -> nn.Sequential:
    return nn.Sequential(first, posenc_ext.PositionalEncoding(width, **options))


def sequence(kind: str, dropout: float | None = None) -> nn.Sequential:
    """What fuse takes, of the package's modules, of the textbook's, or of one each."""
    parts = list(pair(posenc_ext if kind == "fused" else reference))
    if kind == "mixed":
        parts[1] = posenc_ext.PositionalEncoding(D)
    return nn.Sequential(*parts, *([] if dropout is None else [nn.Dropout(dropout)]))


KINDS = ["fused", "reference", "mixed"]


def close_to(kind: str, got: Tensor, expected: Tensor) -> bool:
    # The textbook table may be off in the last bit of a frequency; between fused modules nothing may differ.
    return torch.allclose(got, expected, atol=4e-6, rtol=0) if kind == "reference" else torch.equal(got, expected)


# ---- the package's modules and their twins ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropout", [None, 0.0, 0.4])
def test_fuse(kind, dropout, ids):
    module = sequence(kind, dropout)
    fused = fuse(module)
    assert type(fused) is posenc_ext.TransformerEmbedding
    assert fused.lut is module[0].lut
    assert fused.dropout.p == (dropout or 0.0)
    assert fused.training
    torch.manual_seed(8)
    expected = module(ids)
    torch.manual_seed(8)
    assert close_to(kind, fused(ids), expected)
    fused = fuse(module.eval())  # the mode goes over too
    assert not any(m.training for m in fused.modules())
    assert close_to(kind, fused(ids), module(ids))


def test_fuse_takes_the_spec_over(ids):
    options = {"convention": "fairseq", "precision": "exact", "dropout": 0.3, "batch_first": False}
    module = encoded(posenc_ext.Embeddings(D, V), **options)
    fused = fuse(module.requires_grad_(False))
    found = {name: getattr(fused, name) for name in options}
    assert found | {"convention": fused.convention.name, "dropout": fused.dropout.p} == options
    assert not fused.weight.requires_grad
    assert torch.equal(fused.eval()(ids), module.eval()(ids))


FLAGS = {"none": {}, "all": {"padding_idx": 2, "max_norm": 1.0, "scale_grad_by_freq": True}, "sparse": {"sparse": True}}


@pytest.mark.parametrize("source", [posenc_ext, reference], ids=["fused", "reference"])
@make.each("flags", FLAGS)
def test_the_table_of_tokens_stays_itself_with_all_its_flags(flags, source, ids):
    module = pair(source)
    module[0].lut = lookup(**flags)
    twin, lut = copy.deepcopy(module), module[0].lut
    before = lut.weight.detach().clone()
    fused = fuse(module)
    assert fused.lut is lut
    assert torch.equal(lut.weight, before)  # max_norm too has scaled no row yet
    got, expected = fused(ids), twin(ids)
    torch.testing.assert_close(got, expected, atol=4e-6 if source is reference else 0, rtol=0)
    probe = torch.randn_like(got)
    for result in (got, expected):
        (result * probe).sum().backward()
    gradients = [weight.grad for weight in (lut.weight, twin[0].lut.weight)]
    assert gradients[0].layout == gradients[1].layout
    torch.testing.assert_close(*(g.to_dense() for g in gradients), atol=1e-5, rtol=1e-6)


def test_a_bare_embedding_has_factor_one(ids):
    module = encoded(lookup(), dropout=0.2).eval()
    fused = fuse(module)
    assert (fused.lut, fused.dropout, fused.token_scale) == (module[0], module[1].dropout, 1.0)
    assert torch.equal(fused(ids), module(ids))


def test_fuse_keeps_a_scale_that_was_changed(ids):
    """token_scale is a public attribute; models without the factor set it to 1."""
    module = pair()
    module[0].token_scale = 1.0
    assert torch.equal(fuse(module)(ids), module(ids))


def test_fuse_draws_nothing(monkeypatch):
    """Neither numbers, nor those that meta tensors pretend to draw: that imports 800 modules of torch."""
    modules = [sequence(kind) for kind in KINDS]
    monkeypatch.setattr(nn.init, "normal_", lambda *_: pytest.fail("drawn"))
    before = torch.get_rng_state()
    for module in modules:
        fuse(module)
    assert torch.equal(torch.get_rng_state(), before)


# ---- inside a model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_fuse_inside_a_model(kind, ids):
    """Encoder and decoder inputs of a larger model, one deep inside, and an output layer tied to the table."""
    model = nn.ModuleDict(
        {"source": sequence(kind), "decoder": nn.ModuleList([nn.ModuleDict({"target": sequence(kind, 0.1)})])}
    )
    model["output"] = nn.Linear(D, V, bias=False)
    model["output"].weight = model["source"][0].lut.weight
    model.eval()
    expected = [model["source"](ids), model["decoder"][0]["target"](ids)]
    parameters = set(model.parameters())
    assert fuse(model) is model
    assert type(model["source"]) is posenc_ext.TransformerEmbedding
    assert set(model.parameters()) == parameters
    for got, value in zip((model["source"](ids), model["decoder"][0]["target"](ids)), expected, strict=True):
        assert close_to(kind, got, value)
    assert model["output"].weight is make.weight_of(model["source"])


def test_fuse_keeps_sharing_a_layer_used_twice(ids):
    """Encoder and decoder that share one input layer still share one after fusing."""
    shared = pair()
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"embed": shared}), "decoder": nn.ModuleDict({"embed": shared})})
    model["again"] = shared
    model["list"] = nn.ModuleList([shared])
    expected = shared(ids)
    fuse(model)
    layers = [model["encoder"]["embed"], model["decoder"]["embed"], model["again"], model["list"][0]]
    assert [type(m) for m in layers] == [posenc_ext.TransformerEmbedding] * 4
    assert all(a is b for a, b in itertools.pairwise(layers))
    assert torch.equal(layers[0](ids), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dropout_in_another_mode_stays_in_it(kind, ids):
    """Monte Carlo dropout, and a frozen input layer of a model in training, set the mode of a part."""
    for training in (True, False):
        module = sequence(kind, 0.4).train(training)
        module[2].train(not training)
        fused = fuse(module)
        assert (fused.training, fused.dropout.training) == (training, not training)
        assert fused.dropout is module[2]
        results = []
        for each in (module, fused):
            torch.manual_seed(8)
            results.append(each(ids))
        assert close_to(kind, results[1], results[0])
        assert (results[1] == 0).any() == (not training)


# ---- what it refuses -------------------------------------------------------------------------------------------------


class Quieter(posenc_ext.PositionalEncoding):
    def forward(self, x: Tensor, **options) -> Tensor:
        return super().forward(x, **options) / 2


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def edited(module: nn.Sequential, edit) -> nn.Sequential:
    edit(module)
    return module


def hooked(at: str, register: str) -> nn.Sequential:
    module = pair()
    part = module.get_submodule(at)
    getattr(part, register)(lambda *a: None)
    return module


PAIR = "Embeddings, PositionalEncoding"
# What looks like the pair and computes something else, or is no pair at all; and words of the refusal.
NOT_FUSIBLE = {
    "nothing": (lambda: nn.Linear(2, 2), "embeddings: none; position encodings with a table of a known"),
    "embeddings alone": (lambda: nn.Sequential(posenc_ext.Embeddings(D, V)), "embeddings: '0' (Embeddings); position"),
    "embeddings, no container": (lambda: posenc_ext.Embeddings(D, V), "embeddings: module (Embeddings); position"),
    "already fused": (layer, "embeddings: module (TransformerEmbedding)"),
    "encoding alone": (lambda: posenc_ext.PositionalEncoding(D), "embeddings: none; position", "module (Positional"),
    "other order": (
        lambda: nn.Sequential(*reversed(pair())),
        "'1' (Embeddings)",
        "'0' (Pos",
        "do not follow each other",
    ),
    "something between": (lambda: nn.Sequential(pair()[0], nn.ReLU(), pair()[1]), "do not follow each other"),
    "learned positions": (
        lambda: nn.Sequential(lookup(), posenc_ext.LearnedPositionalEmbedding(50, D)),
        "'0' (Embedding); position encodings with a table of a known convention: none",
    ),
    "norm after": (
        lambda: nn.Sequential(*pair(), nn.LayerNorm(D)),
        f"({PAIR})",
        "LayerNorm is in the same nn.Sequential, where only an nn.Dropout may follow",
    ),
    "norm before": (lambda: nn.Sequential(nn.Identity(), *pair()), f"({PAIR})", "Identity is in the same"),
    "dropout by channel": (lambda: nn.Sequential(*pair(), nn.Dropout1d(0.1)), f"({PAIR})", "Dropout1d is in the same"),
    "dropout by channel within": (
        lambda: edited(pair(), lambda m: setattr(m[1], "dropout", nn.Dropout1d(0.5))),
        "results differ",
        "in training",
    ),
    "more after": (lambda: nn.Sequential(*pair(), nn.Dropout(0.1), nn.Identity()), "Identity is in the same"),
    "subclass of encoding": (lambda: nn.Sequential(lookup(), Quieter(D)), "(Embedding, Quieter)", "results differ"),
    "subclass of Sequential": (lambda: Doubled(*pair()), f"({PAIR})", "Doubled is no plain nn.Sequential"),
    "two dropouts": (
        lambda: nn.Sequential(*encoded(lookup(), dropout=0.1), nn.Dropout(0.2)),
        "two dropouts, 0.1 and 0.2,",
    ),
    "two widths": (lambda: encoded(lookup(), D + 2), f"the widths {D} and {D + 2} differ"),
    "an edited table": (
        lambda: edited(pair(reference), lambda m: m[1].pe.mul_(0.5)),
        "the table 'pe' of PositionalEncoding follows no known convention",
    ),
    "a parameter more": (
        lambda: edited(pair(), lambda m: m[0].register_parameter("gain", nn.Parameter(torch.ones(1)))),
        "no place for the parameter '0.gain'",
    ),
    "on meta": (lambda: pair(reference).to("meta"), "on meta"),
    "forward replaced": (lambda: edited(pair(), lambda m: setattr(m[1], "forward", lambda x: x)), "forward of its own"),
    "forward of the table replaced": (
        lambda: edited(pair(reference), lambda m: setattr(m[0].lut, "forward", lambda x: x)),
        "cannot be called for a comparison",
        "Embedding has hooks, or a forward of its own",
    ),
}


@make.each("case", NOT_FUSIBLE)
def test_fuse_refuses_what_computes_something_else(case):
    make_it, *words = case
    module = make_it()
    assert_refused(lambda: fuse(module), "posenc_ext.fuse: module must be", f"got {type(module).__name__}", *words)
    # Inside a model it is left as it is.
    model = nn.Sequential(nn.Sequential(pair(), nn.Identity()), module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert fuse(model)[1] is module
    assert type(model[0][0]) is posenc_ext.TransformerEmbedding


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
    "register_state_dict_pre_hook",
    "register_load_state_dict_pre_hook",
    "register_load_state_dict_post_hook",
    "_register_state_dict_hook",
)


@pytest.mark.parametrize("at", ["", "0", "1"])
@pytest.mark.parametrize("register", HOOKS)
def test_fuse_refuses_hooks_of_any_kind(register, at):
    module = hooked(at, register)
    name = type(module.get_submodule(at)).__name__
    assert_refused(lambda: fuse(module), f"({PAIR}) stays: {name} has hooks")


def test_hooks_of_what_stays_go_on_being_called(ids):
    module = nn.Sequential(*pair(), nn.Dropout(0.5)).eval()
    calls = []
    module[0].lut.register_forward_hook(lambda m, args, out: calls.append("lut") or out * 2)
    module[2].register_forward_hook(lambda m, args, out: calls.append("dropout"))
    expected = module(ids)
    assert torch.equal(fuse(module)(ids), expected)
    assert calls == ["lut", "dropout"] * 2


def test_a_table_of_tokens_that_is_more_is_called(ids):
    class Counting(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) + 1

    for source in (posenc_ext, reference):
        module = pair(source)
        module[0].lut = Counting(V, D)
        torch.testing.assert_close(fuse(module)(ids), module(ids), atol=4e-6, rtol=0)
    module = encoded(Counting(V, D))
    assert torch.equal(fuse(module)(ids), module(ids))


def test_every_pair_that_stays_is_named():
    """In the error where none is replaced, in a warning where others are."""
    bad = nn.ModuleDict({"a": nn.Sequential(*pair(), nn.ReLU()), "b": nn.ModuleList([hooked("1", HOOKS[0])])})
    bad["c"] = nn.ModuleDict({"tok": lookup(), "pos": posenc_ext.PositionalEncoding(D)})
    words = [f"'a' ({PAIR}) stays: ReLU is in the same", f"'b.0' ({PAIR}) stays: PositionalEncoding has hooks"]
    words += ["'c' holds embeddings 'tok' (Embedding) and position encoding 'pos' (PositionalEncoding) as siblings"]
    assert_refused(lambda: fuse(bad), *words)
    good = nn.ModuleDict({"bad": bad, "good": pair()})
    with pytest.warns(UserWarning, match=message(*(word.replace("'", "'bad.", 1) for word in words))):
        fuse(good)
    assert type(good["good"]) is posenc_ext.TransformerEmbedding
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fuse(nn.ModuleDict({"good": pair()}))


# ---- classes of the user's -------------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Embeddings as a user writes them."""

    def __init__(self, scale: float = SCALE, **options) -> None:
        super().__init__()
        self.emb = lookup(**options)
        self.scale = scale

    def forward(self, ids: Tensor) -> Tensor:
        return self.emb(ids) * self.scale


class Positions(nn.Module):
    """A position encoding as a user writes it, with its table as a buffer, an attribute or a frozen parameter."""

    def __init__(self, convention="vaswani", kind="buffer", batch_first=True, dropout=0.1, rows=60, dtype=None):
        super().__init__()
        chosen = convention if isinstance(convention, Convention) else CONVENTIONS[convention]
        numbers = sinusoid_table(torch.arange(rows).numpy(), D, **fields(chosen))
        table = torch.from_numpy(numbers).to(dtype or torch.float32).unsqueeze(0 if batch_first else 1)
        self.first, self.batch_first = chosen.first_position, batch_first
        if kind == "buffer":
            self.register_buffer("table", table, persistent=False)
        else:
            self.table = table if kind == "attribute" else nn.Parameter(table, requires_grad=False)
        self.drop = nn.Dropout(dropout)

    def rows(self, x: Tensor) -> Tensor:
        table = self.table.transpose(0, 0 if self.batch_first else 1)[:, self.first :]
        length = x.size(1 if self.batch_first else 0)
        return table[:, :length].transpose(0, 0 if self.batch_first else 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x + self.rows(x))


# Sizes of the difference that is rounding: a sum and a product, and the fp32 table against fp32 angles.
ROUNDING = {torch.float32: 4e-6, torch.float64: 2e-6, torch.bfloat16: 0.08}


def assert_fuses(module: nn.Sequential, ids: Tensor, dtype: torch.dtype = torch.float32, **options):
    fused = fuse(module, **options)
    assert type(fused) is posenc_ext.TransformerEmbedding
    for training in (False, True):
        results = []
        for each in (module.train(training), fused.train(training)):
            torch.manual_seed(8)
            results.append(each(ids))
        assert results[0].dtype == results[1].dtype == dtype
        torch.testing.assert_close(results[1], results[0], atol=ROUNDING[dtype], rtol=0)
    return fused


@make.each("convention", [*CONVENTIONS, Convention(base=500.0), Convention(base=20000.0, layout="sin_cos")])
@pytest.mark.parametrize("batch_first", [True, False])
def test_classes_of_the_user_are_recognised_by_what_they_hold(convention, batch_first, ids):
    module = nn.Sequential(Tokens(), Positions(convention, batch_first=batch_first))
    weight, dropout = module[0].emb.weight, module[1].drop
    fused = assert_fuses(module, ids)
    assert (fused.weight, fused.dropout) == (weight, dropout)
    assert (fused.batch_first, fused.token_scale) == (batch_first, SCALE)
    chosen = convention if isinstance(convention, Convention) else CONVENTIONS[convention]
    for name in ("base", "divisor", "layout", "first_position"):
        assert getattr(fused.convention, name) == getattr(chosen, name)


@make.each("dtype", list(ROUNDING))
@pytest.mark.parametrize("scale", [1.0, SCALE, 3.7, D**0.25, -2.0])
def test_the_factor_is_found(scale, dtype, ids):
    module = nn.Sequential(Tokens(scale), Positions()).to(dtype)
    fused = assert_fuses(module, ids, dtype)
    assert fused.token_scale == (scale if scale != D**0.25 else pytest.approx(scale, rel=1e-9))


@pytest.mark.parametrize("kind", ["buffer", "attribute", "parameter"])
def test_wherever_the_table_is(kind, ids):
    assert_fuses(nn.Sequential(Tokens(), Positions(kind=kind)), ids)
    assert_fuses(nn.Sequential(lookup(), Positions(kind=kind), nn.Dropout(0.0)), ids)


def test_a_table_in_double_precision_is_exact(ids):
    """The table tells by its last rows how its angles were rounded."""
    assert fuse(nn.Sequential(Tokens(), Positions(rows=3000))).precision == "exact"
    assert fuse(nn.Sequential(Tokens(), reference.PositionalEncoding(D, 3000))).precision == "reference"


def test_the_factor_may_be_in_the_encoding(ids):
    """ESPnet's form: x * sqrt(d) + PE in one module, after a bare nn.Embedding."""

    class Scaled(Positions):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * SCALE)

    assert assert_fuses(nn.Sequential(lookup(), Scaled()), ids).token_scale == SCALE


class FunctionalDropout(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x + self.rows(x), 0.1, self.training)


class DropoutFirst(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x) + self.rows(x)


class NoDropout(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows(x)


class MovedByOne(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[:, 1 : x.size(1) + 1]


class Twice(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return x + 2 * self.rows(x)


class SevenOnly(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows(x) * (x.size(1) == 7)


class Wide(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


class Transposed(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1)


class Several(Positions):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), x


class Asking(Positions):
    def forward(self, x: Tensor, start: int) -> Tensor:
        return super().forward(x)


class WithoutPadding(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (ids != self.emb.padding_idx).unsqueeze(-1)


class Noisy(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        rows = super().forward(ids)
        return rows + torch.randn_like(rows) if self.training else rows


class Normal(Tokens):
    def forward(self, ids: Tensor) -> Tensor:
        return F.normalize(super().forward(ids), dim=-1)


LOOKS_ALIKE = {
    "functional dropout": (
        lambda: (Tokens(), FunctionalDropout()),
        "(Tokens, FunctionalDropout)",
        "differ",
        "in training",
    ),
    "dropout before the sum": (lambda: (Tokens(), DropoutFirst()), "in training"),
    "a dropout that is not used": (lambda: (Tokens(), NoDropout()), "in training"),
    "moved by one": (lambda: (Tokens(), MovedByOne(dropout=0.0)), "differ from those of the layer by", "in evaluation"),
    "added twice": (lambda: (Tokens(), Twice(dropout=0.0)), "differ from those of the layer by 1 in"),
    "only for one length": (lambda: (Tokens(), SevenOnly(dropout=0.0)), "differ"),
    "another type": (
        lambda: (Tokens(), Wide()),
        "it returns torch.float64 [2, 7, 8], and a layer torch.float32 [2, 7, 8]",
    ),
    "another shape": (lambda: (Tokens(), Transposed()), "it returns torch.float32 [7, 2, 8]"),
    "two results": (lambda: (Tokens(), Several()), "it returns tuple"),
    "two arguments": (lambda: (Tokens(), Asking()), "copying and calling it raised TypeError", "start"),
    "zeros at padding": (lambda: (WithoutPadding(rows=90, padding_idx=50), Positions()), "differ"),
    "noise in training": (lambda: (Noisy(), Positions()), "in training"),
    "rows that are not scaled alike": (lambda: (Normal(), Positions()), "differ"),
    "scaled encodings": (
        lambda: (Tokens(), edited(Positions(), lambda m: m.table.mul_(0.1))),
        "'table' of Positions follows no",
    ),
    "hooks on the table": (
        lambda: edited((Tokens(), Positions()), lambda m: m[0].emb.register_forward_hook(print)),
        "Embedding has hooks",
    ),
    "a frozen table of other things": (
        lambda: (Tokens(), edited(nn.Linear(D, 60, bias=False), lambda m: m.requires_grad_(False))),
        "embeddings: '0' (Tokens); position encodings with a table of a known convention: none",
    ),
}


@make.each("case", LOOKS_ALIKE)
def test_what_looks_alike_is_refused_by_its_results(case):
    make_them, *words = case
    assert_refused(lambda: fuse(nn.Sequential(*make_them())), *words)


class AlwaysNoisy(Positions):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(1)


@make.each("inside", {"alike": Positions, "refused": FunctionalDropout, "raising": Asking, "drawing": AlwaysNoisy})
def test_a_comparison_leaves_no_trace(inside):
    """Not in the modes, the random numbers, the weight or the attributes, whether it ends well or not."""

    class Growing(inside):
        calls = ()

        def rows(self, x: Tensor) -> Tensor:
            self.calls += (x.shape,)
            return super().rows(x)

    module = nn.Sequential(Tokens(max_norm=0.1), Growing())
    module[0].eval()
    module[1].drop.eval()
    modes = {m: m.training for m in module.modules()}
    weight, state = module[0].emb.weight.detach().clone(), torch.get_rng_state()
    if inside is Positions:
        fuse(module)
    else:
        assert_refused(lambda: fuse(module))
    assert {m: m.training for m in module.modules()} == modes
    assert_same_bits(module[0].emb.weight, weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert module[1].calls == ()
    assert module[1].drop.p == 0.1


def test_ids_for_the_comparison_may_be_given(ids):
    class Padded(Tokens):  # an id that nothing tells about
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * (ids != 50).unsqueeze(-1)

    def module() -> nn.Sequential:
        return nn.Sequential(Padded(rows=90), Positions())

    assert type(fuse(module())) is posenc_ext.TransformerEmbedding
    assert type(fuse(module(), probe=torch.tensor([[3, 4, 5]], dtype=torch.int32))) is posenc_ext.TransformerEmbedding
    assert_refused(lambda: fuse(module(), probe=torch.tensor([[3, 50, 5]])), "results differ")
    assert_refused(lambda: fuse(module(), probe=torch.tensor([[3, 90]])), "raised IndexError")
    assert_refused(lambda: fuse(module(), probe=torch.tensor([[3]])), "do not tell which axis is the sequence")
    for wrong, found in ((torch.tensor([[0.5]]), "torch.float32 [1, 1]"), ([1, 2], "list")):
        words = f"posenc_ext.fuse: probe must be a tensor of ids, int64 or int32, got {found}"
        assert_refused(lambda wrong=wrong: fuse(module(), probe=wrong), words, error=TypeError)


class Model(nn.Module):
    """The usual form: two attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = Tokens(), Positions()
        self.head = nn.Linear(D, V)


def test_siblings_are_reported_and_stay():
    words = (
        "holds embeddings 'tok' (Tokens) and position encoding 'pos' (Positions) as siblings: their order is in the "
    )
    words += "forward of Model; use posenc_ext.TransformerEmbedding there"
    assert_refused(lambda: fuse(Model()), "module " + words)
    model = nn.ModuleDict({"old": Model(), "new": pair()})
    with pytest.warns(UserWarning, match=message("'old' " + words)):
        fuse(model)
    assert (type(model["old"].tok), type(model["old"].pos)) == (Tokens, Positions)
    apart = nn.ModuleDict({"a": nn.ModuleList([Tokens()]), "b": nn.ModuleList([Positions()])})
    assert_refused(lambda: fuse(apart), "embeddings: 'a.0' (Tokens); position encodings", "'b.0' (Positions)")


# ---- unfuse ----------------------------------------------------------------------------------------------------------


def plain(module: nn.Module) -> bool:
    return all(type(m).__module__.startswith(("torch.nn", "posenc_ext.reference")) for m in module.modules())


@make.each_convention
@pytest.mark.parametrize("width", [8, 7])
def test_there_and_back(convention, width, ids):
    """The same bits in every form, since the table holds what the layer adds, and tells what it was."""
    for order, precision, dtype in itertools.product((True, False), PRECISIONS, (torch.float32, torch.float64)):
        first = layer(width=width, convention=convention, precision=precision, dtype=dtype, batch_first=order)
        lut, want = first.lut, first(ids)
        old = unfuse(first, max_len=T)
        assert plain(old)
        assert [type(m).__name__ for m in old] == ["Embeddings", "PositionalEncoding"]
        assert old[0].lut is lut
        shape = (1, T, width) if order else (T, 1, width)
        assert {k: v.shape for k, v in old.state_dict().items()} == {"0.lut.weight": (V, width), "1.pe": shape}
        assert_same_bits(old(ids), want)
        again = fuse(old)
        assert (again.lut, again.batch_first) == (lut, order)
        assert_same_bits(again(ids), want)


@pytest.mark.parametrize("options", [{"token_scale": 3.7}, {"convention": Convention(base=500.0)}], ids=str)
def test_there_and_back_with_numbers_of_ones_own(options, ids):
    first = layer(**options)
    assert_same_bits(unfuse(first)(ids), first(ids))
    again = fuse(unfuse(first))
    assert_same_bits(again(ids), first(ids))
    assert (again.token_scale, again.convention.base) == (first.token_scale, first.convention.base)


@make.each("name", ["vaswani", "tensor2tensor", "opennmt_tf", "musicgen", "marian", "xlm", "sin_cos"])
def test_the_convention_keeps_its_name_and_precision(name):
    """Some differ by precision only."""
    again = fuse(unfuse(layer(convention=name)))
    assert (again.convention, again.precision) == (CONVENTIONS[name], CONVENTIONS[name].precision)


@make.each_half
def test_sixteen_bit_types_differ_by_rounding(dtype):
    """The textbook rounds product, table and sum, the layer the sum: half a unit each."""
    first, many = layer(width=64, rows=99, dtype=dtype), make.ids((4, 300), 99)
    first.requires_grad_(False)
    got, want = unfuse(first)(many), first(many)
    assert got.dtype == dtype
    product = (first.weight[many].double() * first.token_scale).abs()
    size = torch.maximum(product, want.double().abs()).clamp(min=1)
    assert_close(got, want.double().numpy(), (2 * torch.finfo(dtype).eps * size).numpy())


def test_unfuse_in_place(ids):
    """All three layers, in a model with a shared one, and what is not ours stays."""
    shared = layer(dropout=0.3)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared]), "pair": pair(), "head": nn.Linear(D, V)})
    model["pair"][1].dropout.p = 0.2
    model["learned"] = posenc_ext.LearnedPositionalEmbedding(9, D)
    model["head"].weight = shared.lut.weight
    model.eval()
    shared.dropout.train()
    inner, parameters = model["pair"][1].dropout, set(model.parameters())
    want, state = [shared.eval()(ids), model["pair"](ids)], torch.get_rng_state()
    shared.dropout.train()
    assert unfuse(model, max_len=9) is model
    assert torch.equal(torch.get_rng_state(), state)
    old = model["a"]
    assert plain(old)
    assert plain(model["pair"])
    assert old is model["b"][0]
    assert old[2] is shared.dropout
    assert (old.training, old[1].training, old[2].training) == (False, False, True)
    assert model["pair"][1].dropout is inner
    assert model["pair"][1].pe.shape == (1, 9, D)
    assert type(model["learned"]) is posenc_ext.LearnedPositionalEmbedding
    assert set(model.parameters()) == parameters
    assert_same_bits(old.eval()(ids), want[0])
    assert_same_bits(model["pair"](ids), want[1])
    fuse(model.requires_grad_(True))
    assert [type(model[k]) for k in ("a", "pair")] == [posenc_ext.TransformerEmbedding] * 2
    assert (model["a"].dropout, model["pair"].dropout) == (shared.dropout, inner)


def test_unfuse_what_fuse_made(ids):
    for kind in KINDS:
        old = unfuse(fuse(sequence(kind, 0.1)))
        assert [type(m) for m in old] == [reference.Embeddings, reference.PositionalEncoding, nn.Dropout]
        torch.testing.assert_close(old.eval()(ids), sequence(kind).eval()(ids), atol=4e-6, rtol=0)
    fresh = nn.Sequential(reference.Embeddings(D, V), reference.PositionalEncoding(D))
    fresh.load_state_dict(old.state_dict())  # a checkpoint that the plain modules load
    assert unfuse(nn.Linear(2, 2)).in_features == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_unfuse_makes_can_be_scripted(ids):
    """Where a custom op or a table that is made when read cannot go."""
    for options in ({"dropout": 0.1}, {"batch_first": False}):
        old = unfuse(layer(**options)).eval()
        assert_same_bits(torch.jit.script(old)(ids), old(ids))


@make.each("kind", ["Embeddings", "PositionalEncoding"])
def test_unfuse_one_layer(kind):
    module, value = layer(kind), argument(kind)
    old = unfuse(module)
    assert plain(old)
    assert_same_bits(old(value), module(value))
    assert unfuse(layer(kind).to("meta"))(value.to("meta")).shape == (B, T, D)


def test_unfuse_refuses_what_does_more():
    class Louder(posenc_ext.Embeddings):
        pass

    with_hook, own_forward = layer(), layer()
    with_hook.register_forward_hook(print)
    own_forward.forward = print
    for kind, each in (
        ("TransformerEmbedding", with_hook),
        ("TransformerEmbedding", own_forward),
        ("Louder", Louder(D, V)),
    ):
        model = nn.ModuleDict({"first": layer(), "second": each})
        assert_refused(
            lambda model=model: unfuse(model), f"posenc_ext.unfuse: 'second' ({kind}) has a class, hooks or a"
        )
        assert type(model["first"]) is posenc_ext.TransformerEmbedding
    for wrong in (0, -1, 2.0, None):
        assert_refused(
            lambda wrong=wrong: unfuse(layer(), max_len=wrong), f"max_len must be a positive int, got {wrong}"
        )


def test_what_unfuse_says_is_lost(ids):
    old = unfuse(layer(), max_len=T)
    assert_refused(lambda: old(ids, offset=1), error=TypeError)
    assert_refused(lambda: old(ids.repeat(1, 2)), "at most max_len")
    assert_refused(lambda: old(ids[0]), "the axes of a batch, a length and d_model")
    assert functional.embed(ids[0], old[0].lut.weight).shape == (T, D)
