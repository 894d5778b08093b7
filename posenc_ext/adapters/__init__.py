"""Position modules of other projects, in a model that is loaded, with the numbers from the ops of this package.

    model = MarianMTModel.from_pretrained(...)
    print(posenc_ext.adapters.patch(model))

What there is a row for, what a row gains and what is left alone is in docs/adapters.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posenc_ext.adapters import diffusers, positional_encodings, transformers, x_transformers
from posenc_ext.adapters.twins import Refused, Row, Twin, qualified, twin_class

__all__ = ["ROWS", "Entry", "Report", "patch", "unpatch"]

# No project is imported for them: a class is known by its qualified name.
ROWS: tuple[Row, ...] = (*transformers.ROWS, *diffusers.ROWS, *x_transformers.ROWS, *positional_encodings.ROWS)
_BY_PATH = {row.path: row for row in ROWS}
# Names of modules that have to do with positions. Where there is no row, the report says so.
_POSITIONAL = re.compile(r"(^|_)(wpe|pe|pos|positions?|positional|rotary)(_|$)")
_POSITIONAL_CLASS = re.compile(r"Position|Rotary|Sinusoid|Timesteps")


class Entry(NamedTuple):
    """What happened to one module.

    Attributes:
        path: its name in the model.
        kind: the name of its class.
        done: `"patched"`, `"left"` or `"restored"`.
        why: how it is computed now, or why it was left alone.
    """

    path: str
    kind: str
    done: str
    why: str


class Report(tuple[Entry, ...]):
    """What `patch` or `unpatch` did, an `Entry` for each module; printed, it is a table."""

    __slots__ = ()

    @property
    def patched(self) -> list[str]:
        """Names of the modules that were replaced."""
        return [entry.path for entry in self if entry.done == "patched"]

    @property
    def left(self) -> dict[str, str]:
        """Names of the modules that were left alone, with the reason."""
        return {entry.path: entry.why for entry in self if entry.done == "left"}

    def __str__(self) -> str:
        if not self:
            return "no position module found"
        lines = [("module", "class", "", ""), *self]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        text = ["  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[3]]) for line in lines]
        return "\n".join(line.rstrip() for line in text)


def patch(model: nn.Module) -> Report:
    """Replace each known position module of a model by a twin that takes its numbers from the ops of this package.

    A twin is the module itself, with a class that overrides `forward`: constructor, arguments, attributes, parameters,
    hooks and state keys stay, so checkpoints load and save as before. Its recipe, its padding and its offset are those
    of the instance. It is compared with the original on several lengths, with a cache and with pads where it takes
    such, and over the whole table, and it is left alone where one number differs by more than rounding.

    A module that is known and cannot be replaced, or that looks like one of positions and is not known, is left alone.
    The table that a module holds stays in memory, for checkpoints and for `unpatch`; it is not read. Where it is
    trained later, the original's forward is called.

    Args:
        model: a module that holds such modules, or is one. It is changed in place.

    Returns:
        What was done, and what was not, with the reason. Printed, it is a table.
    """
    return Report(_patched(model))


def _patched(model: nn.Module) -> Iterator[Entry]:
    inside: set[nn.Module] = set()  # of modules that were replaced whole
    for path, module, parent, name in _walk(model):
        if module in inside:
            continue
        row, kind = _row_of(module, parent, name), type(module).__name__
        if isinstance(module, Twin):
            done, why = "left", "is patched already"
        elif row is None:
            if not (why := _unknown(module, name)):
                continue
            done = "left"
        else:
            try:
                _replace(module, row)
                done, why = "patched", row.positions
            except Refused as reason:
                done, why = "left", str(reason)
        if isinstance(module, Twin):
            inside.update(module.modules())
        yield Entry(path, kind, done, why)


def unpatch(model: nn.Module) -> Report:
    """Give the modules that `patch` replaced their own class back, with whatever was trained or loaded since.

    Args:
        model: what `patch` was called with, or a module that holds it. It is changed in place.

    Returns:
        The modules that were restored.
    """
    entries = []
    for path, module in model.named_modules():
        if isinstance(module, Twin):
            if type(module).__dict__.get("posenc_original") is None:
                raise TypeError(
                    f"posenc_ext.adapters.unpatch: {path or 'model'} must be a module as patch left it, got the class "
                    f"{qualified(type(module))}, which another tool made of it; undo that first"
                )
            module.__class__ = type(module).posenc_original  # type: ignore[assignment]
            del module.__dict__["_posenc"]
            entries.append(Entry(path, type(module).__name__, "restored", ""))
    return Report(entries)


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None, str]]:
    """Each module once, with its name, its parent and its name there."""
    yield "", model, None, ""
    seen = {model}
    for path, parent in list(model.named_modules()):
        for name, child in parent.named_children():
            if child not in seen:
                seen.add(child)
                yield f"{path}.{name}".removeprefix("."), child, parent, name


def _row_of(module: nn.Module, parent: nn.Module | None, name: str) -> Row | None:
    row = _BY_PATH.get(qualified(type(module)))
    if row is None and type(module) is nn.Embedding and parent is not None:
        row = _BY_PATH.get(f"{qualified(type(parent))}.{name}")
    return row


def _unknown(module: nn.Module, name: str) -> str:
    """Why a module without a row is in the report, if it is."""
    known = next((kind for kind in type(module).__mro__[1:] if qualified(kind) in _BY_PATH), None)
    if known is not None:
        return f"is a subclass of {known.__name__}, whose forward may be another"
    if _POSITIONAL.search(name) or _POSITIONAL_CLASS.search(type(module).__name__):
        return f"there is no row for {qualified(type(module))}"
    return ""


def _replace(module: nn.Module, row: Row) -> None:
    if row.form is None:
        raise Refused(str(row.recipe))
    if "forward" in vars(module):
        raise Refused("another tool has put a forward of its own over that of its class")
    if any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
        raise Refused("it is on the meta device, so nothing can be compared: load it first")
    original, twin = type(module), twin_class(type(module), row)
    modes = {child: child.training for child in module.modules()}
    module.__dict__["_posenc"] = row.recipe(module)  # type: ignore[operator]
    module.__class__ = twin
    try:
        with torch.no_grad():
            module.eval()
            module.follow()  # type: ignore[operator]
            module.check()  # type: ignore[operator]
            for arguments, options in module.probes():  # type: ignore[operator]
                want = original.forward(module, *arguments, **options)
                _compare(twin.forward(module, *arguments, **options), want, twin.posenc_ulps)
    except BaseException as error:
        module.__class__ = original
        del module.__dict__["_posenc"]
        if isinstance(error, Refused) or not isinstance(error, Exception):
            raise
        raise Refused(f"a call for comparison raised {type(error).__name__}: {error}") from error
    finally:
        for child, training in modes.items():
            child.training = training


def _compare(got: Any, want: Any, ulps: float) -> None:
    if isinstance(want, tuple):
        for mine, theirs in zip(got, want, strict=True):
            _compare(mine, theirs, ulps)
    elif isinstance(want, Tensor):
        if got.shape != want.shape or got.dtype != want.dtype:
            text = f"{got.dtype} {list(got.shape)} instead of {want.dtype} {list(want.shape)}"
            raise Refused(f"a twin would return {text}")
        far = float((got.double() - want.double()).abs().max()) if want.numel() else 0.0
        if not far <= ulps * torch.finfo(want.dtype).eps * max(1.0, float(want.abs().max()) if want.numel() else 0):
            raise Refused(f"its results differ by {far:.3g} from those of a twin")
