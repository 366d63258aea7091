"""docs/architecture.md and its drawing speak of the code that there is."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_imports import imported, sources, unit

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "architecture.md").read_text(encoding="utf-8")
SVG = "{http://www.w3.org/2000/svg}"
NOT_DRAWN = {"__init__", "__main__"}
OTHERS = {"fed.ask"}
"""Names in the text that are not those of a module: `fed` is an argument."""


def drawn() -> dict[str, float]:
    """Each package and module of the drawing, and how far down it stands."""
    boxes = ElementTree.parse(DOCS / "house.svg").iter(f"{SVG}g")
    return {box.attrib["id"]: float(box.find(f"{SVG}rect").attrib["y"]) for box in boxes}  # type: ignore[union-attr]


def named() -> list[str]:
    """Dotted names in backticks, and calls of them, but not files."""
    words = re.findall(r"`([a-z]\w*(?:\.\w+)+)(?:\([^`]*\))?`", PAGE)
    return sorted({w for w in words if not w.endswith((".md", ".py", ".svg"))} - OTHERS)


def found(name: str) -> Any:
    """What a dotted name below `fedkin` stands for."""
    parts = name.split(".")
    inside = max(n for n in range(len(parts) + 1) if is_module(".".join(["fedkin", *parts[:n]])))
    thing: Any = import_module(".".join(["fedkin", *parts[:inside]]))
    for part in parts[inside:]:
        thing = getattr(thing, part)
    return thing


def is_module(path: str) -> bool:
    try:
        return find_spec(path) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


@pytest.mark.parametrize("name", named())
def test_what_is_named_exists(name: str) -> None:
    assert found(name) is not None


def test_a_name_that_does_not_exist_is_found() -> None:
    with pytest.raises(AttributeError, match="steer"):
        found("rounds.loop.steer")
    assert len(named()) > 40


def test_files_that_are_named_exist() -> None:
    files = set(re.findall(r"`([\w/]+\.py)`", PAGE))
    assert files
    assert [f for f in files if not (DOCS.parent / f).exists()] == []


def test_everything_is_drawn() -> None:
    assert set(drawn()) == {unit(path) for path in sources()} - NOT_DRAWN
    assert all(f">{name}</text>" in (DOCS / "house.svg").read_text() for name in drawn())


def test_imports_point_down() -> None:
    """Only among the small modules at the bottom may one import another of its row."""
    height = drawn()
    bottom = max(height.values())
    for path in sources():
        here = unit(path)
        if here in NOT_DRAWN:
            continue
        for name in imported(ast.parse(path.read_text())):
            there = name.split(".")[1]
            down = height[there] > height[here] or there == here or height[there] == height[here] == bottom
            assert down, f"{here} imports {name}, which is not drawn below it"
