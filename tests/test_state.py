"""Modules hold no encoding: nothing a model is put through can damage one, and old checkpoints still load."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle

import make
import numpy as np
import pytest
import torch
from helpers import fields, message
from torch import Tensor, nn

import posenc_ext
from posenc_ext import CONVENTIONS, functional, reference

V, D, T, ROWS = 11, 16, 7, 64
SIZES = {"rows": V, "width": D, "max_len": ROWS}

IDS, X = make.argument("Embeddings"), make.argument("PositionalEncoding", width=D)
KEYS = {
    "Embeddings": ["lut.weight"],
    "TransformerEmbedding": ["lut.weight"],
    "PositionalEncoding": [],
    "LearnedPositionalEmbedding": ["weight"],
}
TRAINED = [kind for kind, keys in KEYS.items() if keys]
NAMED = list(CONVENTIONS.values())


def layer(kind: str = "TransformerEmbedding", **options) -> nn.Module:
    return make.layer(kind, **SIZES, **options)


def argument(kind: str) -> Tensor:
    return IDS if "Positional" not in kind else X


def table(convention: str = "vaswani", rows: int = ROWS, d_model: int = D, first: int = 0) -> Tensor:
    """What a project of that convention would have saved, made without the ops: fp32 [rows, d_model]."""
    positions = torch.arange(first, first + rows).numpy()
    return torch.from_numpy(reference.sinusoid_table(positions, d_model, **fields(CONVENTIONS[convention]))).float()


# ---- what is state ---------------------------------------------------------------------------------------------------


@make.each_layer
def test_state_is_the_weight_and_nothing_else(kind):
    module = layer(kind)
    assert list(module.state_dict()) == KEYS[kind]
    assert [name for name, _ in module.named_parameters()] == KEYS[kind]
    # A buffer may say where the module lives; an encoding or a frequency would have elements.
    assert all(buffer.numel() == 0 for buffer in module.buffers())
    attributes = [value for value in vars(module).values() if isinstance(value, Tensor)]
    assert attributes == []


@make.each_layer
@pytest.mark.parametrize("assign", [False, True])
def test_round_trip_of_the_state(kind, assign):
    """By assignment as large models are loaded: shapes first, then the tensors of the file themselves."""
    first, second = layer(kind), layer(kind, **({"device": "meta"} if assign and kind in TRAINED else {}))
    for parameter in second.parameters():
        assert parameter.is_meta == assign
        nn.init.zeros_(parameter)
    result = second.load_state_dict(first.state_dict(), strict=True, assign=assign)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert torch.equal(second(argument(kind)), first(argument(kind)))


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved_and_loaded}


@make.each_layer
@make.each("copied", COPIES)
def test_copies_compute_the_same(kind, copied):
    module = layer(kind)
    twin = copied(module)
    assert torch.equal(twin(argument(kind)), module(argument(kind)))
    for a, b in zip(twin.parameters(), module.parameters(), strict=True):
        assert a.data_ptr() != b.data_ptr()


def test_copies_keep_the_spec():
    convention = posenc_ext.Convention(base=500.0, layout="cos_sin", name="mine")
    module = layer(convention=convention, precision="exact", batch_first=False, dropout=0.2)
    twin = pickle.loads(pickle.dumps(module)).eval()
    assert repr(twin) == repr(module)
    assert torch.equal(twin(IDS, offset=3), module.eval()(IDS, offset=3))


# ---- casts and devices -----------------------------------------------------------------------------------------------

CASTS = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "to": lambda module: module.to(torch.bfloat16),
    "there and back": lambda module: module.half().float(),
}


@make.each("cast", CASTS)
@make.each_precision
@pytest.mark.parametrize("start", [250, 1850])
def test_encodings_stay_exact_under_casts(cast, precision, start):
    """Positions past 256 are not whole numbers of bfloat16, and past 2048 not of float16."""
    module = cast(make.layer(width=32, precision=precision))
    nn.init.zeros_(make.weight_of(module))
    got = module(torch.zeros(11, dtype=torch.long), offset=start)
    dtype = make.weight_of(module).dtype
    assert got.dtype == dtype
    expected = torch.from_numpy(reference.sinusoid_table(range(start, start + 11), 32))
    # Half a unit of the 16-bit type, next to what the fp32 angle is off by.
    unit = torch.finfo(dtype).eps * expected.abs().clamp(min=2.0**-14)
    angle = start * 2.4e-7 if precision == "reference" else 5e-7
    assert ((got.double() - expected).abs() <= unit / 2 + angle).all()
    assert not torch.equal(got[6], got[7])  # 256 and 257

    adding = cast(make.layer("PositionalEncoding", width=32, precision=precision))
    assert torch.equal(adding(torch.zeros(1, 11, 32, dtype=dtype), offset=start)[0], got)


@make.each("cast", CASTS)
def test_a_cast_leaves_no_trace_in_the_encoding(cast):
    """fp32 activations through a module that was cast: the same bits as through a fresh one."""
    module = cast(layer("PositionalEncoding"))
    assert torch.equal(module(X, offset=4000), layer("PositionalEncoding")(X, offset=4000))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_pe_follows_the_module(dtype):
    module = layer("PositionalEncoding").to(dtype)
    assert module.pe.dtype == dtype
    truth = functional.positional_encoding(ROWS, D, dtype=torch.float64)
    assert torch.equal(module.pe[0], truth.to(dtype) if dtype == torch.float64 else truth.float().to(dtype))
    assert module.to("meta").pe.device.type == "meta"


@make.each_layer
def test_construction_on_the_meta_device(kind):
    ordinary = layer(kind)
    with torch.device("meta"):
        module = layer(kind)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module(argument(kind).to("meta")).shape == (3, T, D)

    module.to_empty(device="cpu")
    for parameter in (*module.parameters(), *ordinary.parameters()):
        nn.init.constant_(parameter, 0.5)
    assert torch.equal(module(argument(kind)), ordinary(argument(kind)))
    if kind == "PositionalEncoding":
        assert module.pe.device.type == "cpu"
        assert torch.equal(module.pe, ordinary.pe)


@make.each("kind", TRAINED[1:])
def test_reset_parameters_after_a_meta_start(kind):
    """And the types of construction."""
    module = layer(kind, device="meta", dtype=torch.float64).to_empty(device="cpu")
    torch.manual_seed(3)
    module.reset_parameters()
    assert torch.equal(make.weight_of(module), make.weight_of(layer(kind, dtype=torch.float64)))
    assert module(argument(kind).double() if kind.startswith("Learned") else IDS).dtype == torch.float64


# ---- old checkpoints -------------------------------------------------------------------------------------------------

BATCH_FIRST, SEQUENCE_FIRST = (1, ROWS, D), (ROWS, 1, D)

# Where projects keep their table: key, shape and convention.
SPELLINGS = {
    "annotated transformer": ("pe", BATCH_FIRST, "vaswani"),
    "pytorch examples": ("pe", SEQUENCE_FIRST, "vaswani"),
    "flat": ("pe", (ROWS, D), "vaswani"),
    "pytorch tutorials": ("pos_embedding", SEQUENCE_FIRST, "vaswani"),
    "fairseq": ("weights", (ROWS, D), "fairseq"),
    "nemo": ("pos_enc", (ROWS, D), "vaswani"),
    "whisper": ("positional_embedding", (ROWS, D), "tensor2tensor"),
    "ctranslate2": ("encodings", (ROWS, D), "opennmt_tf"),
    "marian": ("weight", (ROWS, D), "marian"),
    "whisper of transformers": ("weight", (ROWS, D), "tensor2tensor"),
    "fairseq2": ("freqs", (ROWS, D), "tensor2tensor"),
    "pos_encoding": ("pos_encoding", BATCH_FIRST, "vaswani"),
}


def around(inner: nn.Module) -> nn.ModuleDict:
    """A model around a position module, so that keys have a prefix."""
    return nn.ModuleDict({"encoder": nn.ModuleDict({"pos": inner, "proj": nn.Linear(2, 2)})})


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("nested", [False, True])
@make.each(("key", "shape", "convention"), SPELLINGS)
def test_tables_of_old_checkpoints_are_consumed(key, shape, convention, nested, strict):
    inner = layer("PositionalEncoding", convention=convention, batch_first=shape != SEQUENCE_FIRST)
    module = around(inner) if nested else inner
    prefix = "encoder.pos." if nested else ""
    state = {**module.state_dict(), prefix + key: table(convention).reshape(shape)}
    before = dict(state)
    result = module.load_state_dict(state, strict=strict)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert state.keys() == before.keys()
    assert all(state[k] is before[k] for k in before)
    assert prefix + key not in module.state_dict()


def test_fairseq_checkpoint():
    """Counted from padding_idx + 1, a row of zeros at padding_idx, and an empty marker of the dtype beside it."""
    weights, lookup = table("fairseq"), torch.randn(V, D)
    weights[1] = 0
    state = {"weights": weights, "_float_tensor": torch.empty(1)}
    layer("PositionalEncoding", convention="fairseq").load_state_dict(state)
    layer("PositionalEncoding").load_state_dict({"weights": torch.empty(0)})  # an empty table is no table
    module = layer(convention="fairseq")
    module.load_state_dict({"weight": lookup, **state})
    assert torch.equal(make.weight_of(module), lookup)


@pytest.mark.parametrize("first", [0, 1])
def test_tables_from_the_first_position(first):
    """A table may hold row p at index p, or the row of the first position at index 0."""
    module = layer("PositionalEncoding", convention="opennmt_tf")
    module.load_state_dict({"encodings": table("opennmt_tf", first=first)})


@pytest.mark.parametrize(
    ("lookup", "place"), [("weight", ""), ("lut.weight", ""), ("0.lut.weight", "1."), ("0.weight", "1.")]
)
@pytest.mark.parametrize("nested", [False, True])
def test_transformer_embedding_loads_the_textbook_pair(lookup, place, nested):
    twin = nn.Sequential(reference.Embeddings(D, V), reference.PositionalEncoding(D, ROWS))
    inner = layer()
    module = around(inner) if nested else inner
    prefix = "encoder.pos." if nested else ""
    state = module.state_dict()
    state.pop(prefix + "lut.weight")
    state[prefix + lookup] = twin[0].lut.weight.detach()
    state[prefix + place + "pe"] = twin[1].pe
    keys = list(state)
    result = module.load_state_dict(state, strict=True)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    assert list(state) == keys
    assert torch.equal(make.weight_of(inner), twin[0].lut.weight)
    torch.testing.assert_close(inner(IDS), twin(IDS), atol=4e-6, rtol=0)


def test_the_textbook_pair_loads_as_a_whole():
    """Both modules swapped in place: `state_dict()` of the one model loads strictly into the other.

    In 5000 rows the last bit of a frequency has grown to 3e-4.
    """
    for width in (D, 512):
        old, new = (
            nn.ModuleDict({"src_embed": nn.Sequential(source.Embeddings(width, V), source.PositionalEncoding(width))})
            for source in (reference, posenc_ext)
        )
        assert old.state_dict()["src_embed.1.pe"].shape == (1, 5000, width)
        new.load_state_dict(old.state_dict(), strict=True)
        torch.testing.assert_close(new["src_embed"](IDS), old["src_embed"](IDS), atol=4e-6, rtol=0)
    learned = layer("LearnedPositionalEmbedding")
    learned.load_state_dict(reference.LearnedPositionalEmbedding(ROWS, D).state_dict(), strict=True)


@make.each_convention
@make.each("dtype", make.DTYPES[1:])
@make.each_precision
def test_tables_of_any_floating_type(convention, dtype, precision):
    module = layer("PositionalEncoding", convention=convention, precision=precision)
    module.load_state_dict({"pe": table(convention.name, rows=500).to(dtype)})


def test_keys_of_no_table_stay_unexpected():
    for module in (layer("PositionalEncoding"), layer()):
        state = {**module.state_dict(), "beta": torch.ones(())}
        with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*beta"):
            module.load_state_dict(state)
    for key in ("alpha", "scale"):  # a factor of the rows, for all that is known
        with pytest.raises(RuntimeError, match=rf"Unexpected key\(s\).*{key}"):
            layer().load_state_dict({**layer().state_dict(), key: torch.ones(())})
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*weight"):
        layer().load_state_dict({"pe": table()})


# ---- frequencies and factors -----------------------------------------------------------------------------------------

FREQUENCIES = {"positional-encodings": "inv_freq", "TimesFM": "inv_timescales", "PyG": "frequency", "other": "freqs"}


@make.each("key", FREQUENCIES)
@make.each("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_frequencies_are_consumed_and_others_refused_by_name(key, dtype):
    own = reference.sinusoid_frequencies(D)
    other = reference.sinusoid_frequencies(D, divisor="half_minus_1")
    for module, prefix in ((layer("PositionalEncoding"), ""), (layer(), "1.")):
        whole = module.state_dict()
        module.load_state_dict({**whole, prefix + key: torch.from_numpy(own).to(dtype)}, strict=True)
        wrong = torch.from_numpy(other).to(dtype)
        text = rf"'{prefix}{key}' .* not hold the frequencies of convention 'vaswani' at width {D}: .* 'tensor2tensor'"
        with pytest.raises(RuntimeError, match=text):
            module.load_state_dict({**whole, prefix + key: wrong}, strict=False)
        for unknown in (wrong * 1.1, wrong[1:]):
            with pytest.raises(RuntimeError, match=rf"'{prefix}{key}' .* those of no known convention"):
                module.load_state_dict({**whole, prefix + key: unknown})


def test_frequencies_go_to_those_of_the_module():
    """Trained ones are loaded; given ones must be equal, and are what a table is compared with."""
    own = torch.linspace(1, 0.01, D // 2)
    trained = layer("PositionalEncoding", frequencies=nn.Parameter(torch.ones(D // 2)))
    trained.load_state_dict({"inv_freq": own})
    assert torch.equal(trained.frequencies.detach(), own)
    given = layer("PositionalEncoding", frequencies=own)
    rows = functional.positional_encoding(ROWS, D, frequencies=own)
    given.load_state_dict({"inv_freq": own, "pe": rows})
    with pytest.raises(RuntimeError, match=r"'inv_freq' .* not hold the frequencies that this module was given"):
        given.load_state_dict({"inv_freq": own * 1.01})
    with pytest.raises(RuntimeError, match=r"'pe' .* is not that of convention 'vaswani'"):
        given.load_state_dict({"pe": table()})


def test_a_cache_that_was_saved_is_consumed():
    """Of positional-encodings 6.0.2: the table of the last input, once for each row of its batch."""
    cache = table().unsqueeze(0).repeat(3, 1, 1)
    frequencies = torch.from_numpy(reference.sinusoid_frequencies(D)).float()
    module = layer("PositionalEncoding", convention="positional_encodings")
    module.load_state_dict({"inv_freq": frequencies, "cached_penc": cache})
    with pytest.raises(RuntimeError, match=r"'cached_penc' .* it follows 'tensor2tensor'"):
        module.load_state_dict({"cached_penc": table("tensor2tensor").unsqueeze(0)})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("key", ["alpha", "scale"])
def test_a_factor_goes_to_the_trained_scale(key, assign):
    for shape in ((), (1,)):
        for module, prefix in (
            (layer("PositionalEncoding", encoding_scale=nn.Parameter(torch.ones(shape))), ""),
            (layer(encoding_scale=nn.Parameter(torch.ones(shape))), "1."),
        ):
            state = {k: v for k, v in module.state_dict().items() if k != "encoding_scale"}
            around(module).load_state_dict(
                {f"encoder.pos.{k}": v for k, v in {**state, prefix + key: torch.tensor([0.25])}.items()},
                strict=False,
                assign=assign,
            )
            assert module.encoding_scale.shape == shape
            assert module.encoding_scale.item() == 0.25
            both = {**state, prefix + key: torch.tensor(0.5), "encoding_scale": torch.ones(shape)}
            with pytest.raises(RuntimeError, match=rf"'{prefix}{key}' .* and 'encoding_scale' are there together"):
                module.load_state_dict(both)


def test_a_factor_that_is_not_trained_must_be_the_module_s():
    for scale in (1.0, 0.25, torch.tensor(0.25)):
        module = layer("PositionalEncoding", encoding_scale=scale)
        module.load_state_dict({"alpha": torch.tensor(float(scale)), "scale": torch.tensor(0.0, device="meta")})
        with pytest.raises(RuntimeError, match=rf"factor 'alpha' .* is 0.75, and encoding_scale .* {float(scale):g}: "):
            module.load_state_dict({"alpha": torch.tensor(0.75)})
    for wrong, text in (
        (torch.ones(2), r"one floating number, got torch.float32 \[2\]"),
        (torch.tensor(1), "got torch.int64"),
        ("a", "a str"),
    ):
        with pytest.raises(RuntimeError, match=rf"factor 'scale' .* {text}"):
            layer("PositionalEncoding").load_state_dict({"scale": wrong})


def test_scaled_tables():
    """NeMo keeps its table divided by sqrt(D); a trained factor is kept apart from it."""
    scaled = {"pos_enc": table() / D**0.5}
    layer("PositionalEncoding", encoding_scale=D**-0.5).load_state_dict(scaled)
    layer(encoding_scale=D**-0.5).load_state_dict({"weight": torch.ones(V, D), **scaled})
    trained = layer("PositionalEncoding", encoding_scale=nn.Parameter(torch.tensor(0.5)))
    trained.load_state_dict({"pe": table(), "alpha": torch.tensor(0.5)})
    text = r"'pos_enc' .* not that of convention 'vaswani'{}: it follows 'vaswani' or .*'{}"
    for module, wrong, found in (
        (layer("PositionalEncoding"), "", r" times 0\.25\."),
        (trained, "", r" times 0\.25\."),
        (layer("PositionalEncoding", encoding_scale=0.5), r" times 0\.5", r" times 0\.25\."),
    ):
        with pytest.raises(RuntimeError, match=text.format(wrong, found)):
            module.load_state_dict(scaled, strict=False)
    with pytest.raises(RuntimeError, match=text.format(r" times 0\.25", r"\. Construct")):
        layer("PositionalEncoding", encoding_scale=D**-0.5).load_state_dict({"pos_enc": table()})
    with pytest.raises(RuntimeError, match=r"'xlm' .* from position 1\. Construct"):
        layer("PositionalEncoding").load_state_dict({"pe": table(first=1)})


# ---- tables that are not the module's --------------------------------------------------------------------------------


def same_table(a: posenc_ext.Convention, b: posenc_ext.Convention) -> bool:
    """Whether two conventions give one table at an even width, counted from 0."""
    return (a.base, a.divisor, a.layout) == (b.base, b.divisor, b.layout)


@pytest.mark.parametrize("strict", [True, False])
@make.each("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("found", NAMED, ids=lambda c: c.name)
def test_a_table_of_another_convention_is_refused_by_name(found, dtype, strict):
    mine = CONVENTIONS["vaswani"] if not same_table(found, CONVENTIONS["vaswani"]) else CONVENTIONS["tensor2tensor"]
    alike = [c.name for c in NAMED if same_table(c, found)]
    state = {"pe": table(found.name).to(dtype)}
    for module in (layer("PositionalEncoding", convention=mine), layer(convention=mine)):
        with pytest.raises(RuntimeError, match=f"table 'pe' .* not that of convention '{mine.name}'") as refusal:
            module.load_state_dict({**module.state_dict(), **state}, strict=strict)
        text = str(refusal.value)
        assert type(module).__name__ in text
        recognised = text.partition("it follows")[2]
        assert [c.name for c in NAMED if f"'{c.name}'" in recognised] == alike


def noise() -> Tensor:
    return make.x((ROWS, D), seed=0)


# Not a table of any convention: nothing of these may load in silence, strict or not.
WRONG_TABLES = {
    "random": noise,
    "trained away": lambda: table() + 0.01 * noise(),
    "one row wrong": lambda: table().index_copy(0, torch.tensor([40]), table()[41:42]),
    "never filled": lambda: torch.zeros(ROWS, D),
    "one row of NaN": lambda: table().index_fill(0, torch.tensor(3), float("nan")),
    "all NaN": lambda: torch.full((ROWS, D), float("nan")),
    "infinite": lambda: table() * float("inf"),
}


@pytest.mark.parametrize("strict", [True, False])
@make.each("wrong", WRONG_TABLES)
def test_a_table_of_no_convention_is_refused(wrong, strict):
    module = layer("PositionalEncoding")
    with pytest.raises(RuntimeError, match=r"'pe' .* not that of convention 'vaswani': it follows no known convention"):
        module.load_state_dict({"pe": wrong()}, strict=strict)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "wrong",
    [
        table(d_model=D + 2),
        table(d_model=D // 2),
        table().unsqueeze(0).repeat(2, 1, 1),
        torch.arange(ROWS * D).reshape(ROWS, D),
        torch.tensor(1.0),
        torch.ones(D),
        torch.ones(ROWS * D + 1),
    ],
    ids=lambda wrong: f"{make.name_of(wrong.dtype)} {list(wrong.shape)}",
)
def test_what_is_no_table_of_this_width_is_refused(wrong, strict):
    module = layer("PositionalEncoding")
    with pytest.raises(RuntimeError, match=rf"'pe' .* width {D}, got {wrong.dtype}") as refusal:
        module.load_state_dict({"pe": wrong}, strict=strict)
    assert str(list(wrong.shape)) in str(refusal.value)


@pytest.mark.parametrize("prefix", ["encoder.pos.", "encoder.pos.1."])
def test_a_refusal_names_the_key_of_the_whole_checkpoint(prefix):
    model = around(layer())
    with pytest.raises(RuntimeError, match=f"'{prefix}pe'"):
        model.load_state_dict({**model.state_dict(), prefix + "pe": table("tensor2tensor")})


@make.each("dtype", make.DTYPES)
@make.each("found", ["vaswani", "tensor2tensor", "opennmt_tf", "musicgen", "sin_cos"])
def test_a_table_of_another_base_is_refused_by_name_and_base(found, dtype):
    """Two divisors make the same numbers of two bases; the round one is named."""
    first = CONVENTIONS[found].first_position
    for base in (500.0, 20000.0, 1e6):
        convention = dataclasses.replace(CONVENTIONS[found], base=base)
        numbers = reference.sinusoid_table(range(first, ROWS), D, **fields(convention))
        state = {"pe": torch.from_numpy(numbers).to(dtype)}
        with pytest.raises(RuntimeError, match=r"'pe' .* not that of convention 'xlm': it follows") as refusal:
            layer("PositionalEncoding", convention="xlm").load_state_dict(state)
        same = [c.name for c in NAMED if (c.divisor, c.layout) == (convention.divisor, convention.layout)]
        start = f" from position {first}" if first else ""
        assert any(f"it follows '{name}' with base {base:g}{start}. " in str(refusal.value) for name in same)
        layer("PositionalEncoding", convention=convention).load_state_dict(state)


@pytest.mark.parametrize("kind", ["PositionalEncoding", "TransformerEmbedding"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_shape_of_a_table_says_which_axis_is_the_sequence(batch_first, kind):
    module = layer(kind, batch_first=batch_first)
    fitting = [(ROWS, D), (1, 1, D), BATCH_FIRST if batch_first else SEQUENCE_FIRST]
    for shape in fitting:
        rows = table(rows=shape[0] * shape[1]) if len(shape) == 3 else table()
        around(module).load_state_dict({"encoder.pos.pe": rows.reshape(shape)}, strict=False)
    wrong = table().reshape(SEQUENCE_FIRST if batch_first else BATCH_FIRST)
    words = f"the table 'encoder.pos.pe' in the checkpoint is {'sequence' if batch_first else 'batch'} first, "
    words += f"{list(wrong.shape)}: construct the module with batch_first={not batch_first}"
    with pytest.raises(RuntimeError, match=message(f"posenc_ext.{kind}: {words}")):
        around(module).load_state_dict({"encoder.pos.pe": wrong}, strict=False)


ODD_VALUES = {
    "None": (lambda: None, "None"),
    "list": (lambda: [[0.0] * D], "a list"),
    "text": (lambda: "pe", "a str"),
    "integers": (lambda: torch.zeros(ROWS, D, dtype=torch.int64), f"width {D}, got torch.int64 [{ROWS}, {D}]"),
    "complex": (lambda: table().cfloat(), f"width {D}, got torch.complex64"),
    "sparse": (lambda: table().to_sparse(), "a Tensor of layout torch.sparse_coo"),
    "csr": (lambda: table().to_sparse_csr(), "a Tensor of layout torch.sparse_csr"),
    "nested": (lambda: torch.nested.nested_tensor([table(), table(rows=3)]), "a nested Tensor"),
    "subclass": (lambda: table().as_subclass(type("Mine", (Tensor,), {})), "a Mine"),
    "objects": (lambda: np.array([None]), "an array of dtype object"),
    "bytes in another order": (lambda: table().numpy().astype(">f4"), "an array of dtype >f4"),
    "whole numbers": (lambda: np.zeros((ROWS, D), dtype=np.int32), "an array of dtype int32"),
    "another convention": (lambda: table("marian").numpy(), "not that of convention 'vaswani'", "'marian'"),
}


@pytest.mark.filterwarnings("ignore:.*(prototype|beta)")
@make.each("kind", ["PositionalEncoding", "TransformerEmbedding"])
@make.each("case", ODD_VALUES)
def test_odd_values_are_refused_in_words(case, kind):
    value, *words = case
    module = around(layer(kind))
    with pytest.raises(RuntimeError, match=message(f"posenc_ext.{kind}: the table 'encoder.pos.pe'", *words)):
        module.load_state_dict({**module.state_dict(), "encoder.pos.pe": value()})


@make.each("dtype", ["float16", "float32", "float64"])
def test_arrays_are_tables(dtype):
    layer("PositionalEncoding").load_state_dict({"pe": table().numpy().astype(dtype)})


def test_tables_without_numbers_are_dropped():
    """On meta and under fake tensors, as large models are loaded, there is nothing to check but the shape."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for value in (table().to("meta"), FakeTensorMode().from_tensor(table())):
        layer("PositionalEncoding").load_state_dict({"pe": value})
        with pytest.raises(RuntimeError, match="is batch first"):
            layer("PositionalEncoding", batch_first=False).load_state_dict({"pe": value.unsqueeze(0)})


# ---- subclasses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PositionalEncoding", "TransformerEmbedding"])
def test_what_a_subclass_owns_is_its_own(kind):
    """Parameters, buffers and children under names of tables."""

    class Mine(getattr(posenc_ext, kind)):
        def __init__(self, *args) -> None:
            super().__init__(*args)
            self.positional_embedding = nn.Parameter(torch.randn(3, D))
            self.register_buffer("pos_enc", torch.randn(2))
            self.register_buffer("weights", torch.zeros(2), persistent=False)
            self.encodings = nn.Linear(2, 2)
            self.add_module("0", nn.Linear(2, 2))
            self.add_module("1", nn.ParameterDict({"pe": nn.Parameter(torch.randn(4))}))

    def made() -> nn.Module:
        return Mine(V, D) if kind == "TransformerEmbedding" else Mine(D)

    first, second = made(), made()
    state = first.state_dict()
    second.load_state_dict({**state, "weights": table()})  # what is not saved is no state
    assert second.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in second.state_dict().items())
    with pytest.raises(RuntimeError, match=r"'encodings' .* not that of convention"):
        second.load_state_dict({**state, "encodings": table("marian")})


def test_a_weight_under_several_names_is_refused():
    for names in (("lut.weight", "weight"), ("weight", "0.lut.weight"), ("lut.weight", "0.lut.weight", "0.weight")):
        module = around(layer())
        state = {f"encoder.pos.{name}": torch.randn(V, D) for name in names}
        found = " and ".join(repr(key) for key in state)
        for strict in (True, False):
            with pytest.raises(
                RuntimeError, match=message(f"posenc_ext.TransformerEmbedding: {found} are in the checkpoint")
            ):
                module.load_state_dict(state, strict=strict)


class Subclass(posenc_ext.TransformerEmbedding):
    pass


@make.each("kind", {"class": posenc_ext.TransformerEmbedding, "subclass": Subclass})
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_old_files_load_in_every_way(nested, assign, kind):
    """A file of the textbook pair, with its metadata, into modules on the CPU and on meta, strict or not."""
    old = nn.Sequential(reference.Embeddings(D, V), reference.PositionalEncoding(D, ROWS))
    file = io.BytesIO()
    torch.save((around(old) if nested else old).state_dict(), file)
    for strict in (True, False):
        file.seek(0)
        state = torch.load(file, weights_only=True)
        assert state._metadata
        inner = kind(V, D, device="meta" if assign else None)
        module = around(inner) if nested else inner
        result = module.load_state_dict(state, strict=strict and not nested, assign=assign)
        assert ([k for k in result.missing_keys if "proj" not in k], result.unexpected_keys) == ([], [])
        assert torch.equal(inner.weight, old[0].lut.weight)
        torch.testing.assert_close(inner(IDS), old(IDS), atol=4e-6, rtol=0)
        state[("encoder.pos." if nested else "") + "1.pe"] = table("marian")
        with pytest.raises(RuntimeError, match=r"1\.pe' .* it follows 'marian'"):
            module.load_state_dict(state, strict=False, assign=assign)


# ---- sharded state ---------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh():
    """A group of one process, over gloo."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("torch was built without distributed support over gloo")
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["TransformerEmbedding", "pair"])
@pytest.mark.filterwarnings("ignore")  # of the distributed package about itself
def test_fully_sharded_training_step(kind, mesh):
    from torch.distributed.fsdp import fully_shard

    def model() -> nn.Sequential:
        torch.manual_seed(4)
        if kind == "pair":
            return nn.Sequential(posenc_ext.Embeddings(D, V), layer("PositionalEncoding"), nn.Linear(D, V))
        return nn.Sequential(layer(), nn.Linear(D, V))

    plain, sharded = model(), model()
    for part in sharded:
        if list(part.parameters()):
            fully_shard(part, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    losses = []
    for each in (plain, sharded):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(each(IDS).flatten(0, 1), IDS.flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-6)
    assert losses[1] < losses[0]
    weights = [p.full_tensor() for p in sharded.parameters()]
    for a, b in zip(weights, plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore")  # of the distributed package about itself
def test_a_sharded_table_is_refused_in_words(mesh):
    from torch.distributed.tensor import Replicate, distribute_tensor

    value = distribute_tensor(table(), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match=r"the table 'pe' .* must be a dense tensor, got a DTensor"):
        layer("PositionalEncoding").load_state_dict({"pe": value})
