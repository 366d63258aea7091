"""Every Python example in docs/ runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


@pytest.mark.parametrize("page", DOCS, ids=lambda p: p.stem)
def test_examples_run(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    assert blocks, f"{page.name} has no example"
    scope: dict[str, object] = {"__name__": f"docs.{page.stem}"}
    for block in blocks:
        exec(compile(block, str(page), "exec"), scope)
