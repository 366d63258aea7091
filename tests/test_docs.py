"""Every Python example in docs/ runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedkin.deploy.joining import TRAVELS
from fedkin.methods import METHODS
from fedkin.models import MODELS
from fedkin.tasks import TASKS

DOCS = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


@pytest.fixture(autouse=True)
def _forget_the_examples() -> Iterator[None]:
    """What a page registers must not be there for the next test."""
    kept = [(registry, dict(registry)) for registry in (METHODS, TASKS, MODELS)]
    yield
    for registry, before in kept:
        registry._entries.clear()  # type: ignore[attr-defined]
        registry._entries.update(before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.stem)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what examples write
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks, f"{page.name} has no example"
    scope: dict[str, object] = {"__name__": f"docs.{page.stem}"}
    for block in blocks:
        exec(compile(block, str(page), "exec"), scope)


def test_every_claim_about_security_names_tests_that_exist() -> None:
    """Each row of a table that says what shows it does so, by tests that there are."""
    found = {
        name
        for path in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M)
    }
    page = next(p for p in DOCS if p.stem == "security").read_text()
    named = re.findall(r"`(test_\w+)`", page)
    assert [name for name in named if name not in found and name not in TRAVELS] == []
    tables = re.findall(r"^\|.*\| shown by \|\n\|[ |-]+\n((?:\|.*\n)+)", page, re.M)
    assert len(tables) == 5  # a site, a stranger, the server, the policy, the disk
    for row in (row for table in tables for row in table.splitlines()):
        assert "`test_" in row.rsplit("|", 2)[1], row
