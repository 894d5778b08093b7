"""The documentation: its samples run, its links lead somewhere, and docstrings are complete and true."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib
import inspect
import io
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import posenc_ext
from posenc_ext import conventions, functional, reference

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Their samples take seconds: they trace programs, or import other projects.
SLOW = {"guide.md", "migration.md"}
MODULES = (
    "conventions",
    "decompositions",
    "errors",
    "functional",
    "fuse",
    "identify",
    "modules",
    "ops",
    "reference",
    "vocabulary",
)

# ---- pages -----------------------------------------------------------------------------------------------------------

SAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.M | re.S)


def run_samples(text: str, name: str) -> int:
    """The Python samples of a page, one after the other. A block of text behind one is what it prints."""
    names: dict[str, Any] = {"__name__": name}
    samples = [match.groups() for match in SAMPLE.finditer(text)]
    for code, printed in samples:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, name, "exec"), names)
        assert printed in (None, output.getvalue()), f"{code}prints\n{output.getvalue()}"
    return len(samples)


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.name, marks=[pytest.mark.slow] if p.name in SLOW else []) for p in PAGES]
)
@pytest.mark.filterwarnings("ignore")  # of other projects about one another
def test_samples(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    try:
        assert run_samples(text, page.name) == text.count("```python")
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} is not installed")


def test_samples_fail():
    with pytest.raises(NameError):
        run_samples("```python\nunknown\n```\n", "page")
    with pytest.raises(AssertionError, match=r"prints\n *2"):
        run_samples("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n", "page")


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", text)):
        if not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """Those of the headings, as mkdocs and GitHub make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    documented = set(re.findall(r"^::: (\S+)", text, re.M))
    return documented | {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def dead_links(page: Path) -> list[str]:
    dead = []
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    return dead


LINKING = [
    *ROOT.glob("*.md"),
    *(p for folder in ("docs", "bench", "tests", "examples") for p in (ROOT / folder).rglob("*.md")),
]


@pytest.mark.parametrize("page", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in sorted(LINKING)])
def test_links(page):
    assert dead_links(page) == []


def test_dead_links_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Some title\n[a](page.md#some-title) [b](page.md#other) [c](other.md) [d](https://example.org)\n")
    assert dead_links(page) == ["page.md#other", "other.md"]


def test_one_version():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f'__version__ = "{version}"' in (ROOT / "posenc_ext/__init__.py").read_text()


# ---- docstrings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module", [pytest.param(m, marks=[pytest.mark.slow] if m == "decompositions" else []) for m in MODULES]
)
@pytest.mark.filterwarnings("ignore")  # of torch.export about itself
def test_doctests(module):
    """With nothing but what an example imports."""
    found = doctest.testmod(importlib.import_module(f"posenc_ext.{module}"), globs={})
    assert found.attempted
    assert not found.failed


def public() -> Iterator[tuple[str, Any]]:
    """Functions and classes that are documented, and the methods of these."""
    given = {f"posenc_ext.{name}": getattr(posenc_ext, name) for name in posenc_ext.__all__}
    for module in (functional, reference, conventions):
        listed = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
        given |= {f"{module.__name__}.{name}": getattr(module, name) for name in listed}
    for name, value in given.items():
        owner = getattr(value, "__module__", "")
        helpers = owner == "posenc_ext.ops.call"  # `functional` hands them on to other modules
        if not callable(value) or not owner.startswith("posenc_ext") or helpers:
            continue
        yield name, value
        if not isinstance(value, type):
            continue
        for method in dir(value):
            found = inspect.getattr_static(value, method)
            found = found.__func__ if isinstance(found, (classmethod, staticmethod)) else found
            ours = inspect.isfunction(found) and (found.__module__ or "").startswith("posenc_ext")
            if ours and not method.startswith("_") and method != "extra_repr":
                yield f"{name}.{method}", found


def missing(function: Any) -> list[str]:
    """What a docstring lacks of what a reader must know."""
    doc = inspect.getdoc(function) or ""
    sections = dict(re.findall(r"^(\w+):\n((?:(?:    .*)?\n)+)", doc + "\n", re.M))
    parameters = inspect.signature(function).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [stars.get(p.kind, "") + p.name for p in parameters if p.name not in ("self", "cls")]
    fields = isinstance(function, type) and issubclass(function, tuple)
    given = sections.get("Attributes" if fields else "Args", "")
    lacks = [name for name in names if not re.search(rf"^    {re.escape(name)}: \S", given, re.M)]
    described = re.findall(r"^    ([*\w]+): ", given, re.M)
    lacks += [f"no argument is called {name}" for name in described if name not in names]
    source = textwrap.dedent(inspect.getsource(function))
    raises = any(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(source)))
    hints = source.split('"""')[0] if not isinstance(function, type) else str(inspect.signature(function))
    wanted = {
        "Raises": raises or (names and not fields),
        "Returns": not isinstance(function, type) and "-> None" not in hints,
        "Examples": True,
    }
    lacks += [section for section, needed in wanted.items() if needed and section not in sections]
    if ">>> " not in sections.get("Examples", ""):
        lacks.append("a doctest")
    if re.search(r"\b(as in|see|as there) `(?!nn\.|torch)|see above|\bas there\b", doc):
        lacks.append("what it looks up elsewhere")
    if isinstance(function, type) and issubclass(function, nn.Module):
        return lacks
    if re.search(r"Tensor|FloatArray", hints) and "Module" not in hints:
        lacks += [] if re.search(r"\[[\w.*, ]+\]|shape", doc) else ["a shape"]
        lacks += [] if re.search(r"int64|float32|float64|dtype", doc) else ["a dtype"]
    return lacks


PUBLIC = dict(public())


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_are_complete(name):
    assert missing(PUBLIC[name]) == []


def test_the_list_is_that_of_the_design():
    classes = {f"posenc_ext.{name}" for name in ("TransformerEmbedding", "Vocabulary", "Convention")}
    methods = {"posenc_ext.Embeddings.forward", "posenc_ext.Embeddings.from_pretrained", "posenc_ext.Vocabulary.encode"}
    assert classes | methods | {"posenc_ext.functional.embed", "posenc_ext.fuse"} <= PUBLIC.keys()


def test_incomplete_docstrings_are_found():
    def function(x: torch.Tensor, scale: float) -> torch.Tensor:
        """Scale.

        Args:
            x: as in `embed`.
            other: nothing.
        """
        raise ValueError(x, scale)

    assert missing(function) == [
        "scale",
        "no argument is called other",
        "Raises",
        "Returns",
        "Examples",
        "a doctest",
        "what it looks up elsewhere",
        "a shape",
        "a dtype",
    ]
