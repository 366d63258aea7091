"""Every Python example in docs/ runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedkin.methods import METHODS

DOCS = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


@pytest.fixture(autouse=True)
def _forget_the_examples() -> Iterator[None]:
    """What a page registers must not be there for the next test."""
    before = dict(METHODS)
    yield
    METHODS._entries.clear()
    METHODS._entries.update(before)


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.stem)
def test_examples_run(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks, f"{page.name} has no example"
    scope: dict[str, object] = {"__name__": f"docs.{page.stem}"}
    for block in blocks:
        exec(compile(block, str(page), "exec"), scope)
