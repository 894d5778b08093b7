"""What of docs/cuda.md's list a run on a GPU has shown.

    python -m bench.ticks RESULTS    the folder that bench/gpu.sh wrote

Prints a line for each item: done, failed, or not run, with the tests and steps that say so.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

LIST = Path(__file__).parent.parent / "docs/cuda.md"


def items() -> list[tuple[str, list[str]]]:
    """Each item's text, and the tests and steps that it needs."""
    found = re.findall(r"^- \[ \] (.*) \(([\w, ]+)\)$", LIST.read_text(), re.MULTILINE)
    return [(text, names.split(", ")) for text, names in found]


def results(folder: Path) -> dict[str, str]:
    """What became of each step and each test: done, failed or not run. A test is done where all its cases are."""
    said = {}
    summary = folder / "summary.txt"
    for line in summary.read_text().splitlines() if summary.exists() else ():
        if match := re.match(r"(\w+)\s+(ok|FAILED|out of time|left out|skipped)\b", line):
            said[match[1]] = {"ok": "done", "skipped": "not run", "left out": "not run"}.get(match[2], "failed")
    tests = folder / "tests.xml"
    for case in ElementTree.parse(tests).iter("testcase") if tests.exists() else ():
        name = case.get("name", "").partition("[")[0]
        bad = case.find("failure") is not None or case.find("error") is not None
        now = "failed" if bad else "not run" if case.find("skipped") is not None else "done"
        order = ("done", "not run", "failed")
        said[name] = max(said.get(name, "done"), now, key=order.index)
    return said


def main(folder: str) -> None:
    """Print the list."""
    said = results(Path(folder))
    for text, names in items():
        states = {name: said.get(name, "not run") for name in names}
        state = next((s for s in ("failed", "not run") if s in states.values()), "done")
        open_ones = [f"{name} {s}" for name, s in states.items() if s != "done"]
        print(f"{state:8} {text}" + (f" ({', '.join(open_ones)})" if open_ones else ""))


if __name__ == "__main__":
    main(sys.argv[1])
