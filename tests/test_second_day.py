"""The second day: every command of docs/second-day.md, in its order, in one sitting."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedkin.cli import app

PAGE = (Path(__file__).parent.parent / "docs" / "second-day.md").read_text()


def commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.S)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.slow
def test_the_second_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "runs"))
    exec(compile(re.findall(r"```python\n(.*?)```", PAGE, re.S)[0], "make_clinics.py", "exec"), {})
    said = {}
    for line in commands():
        program, *words = shlex.split(line)
        assert program == "fedkin"
        outcome = CliRunner().invoke(app, words)
        assert outcome.exit_code == 0, (line, outcome.output)
        said[words[0]] = said.get(words[0], "") + outcome.output
    assert list(said) == ["run", "show", "report", "resume", "join", "export", "predict", "tune", "compare"]
    assert "round 10/10" in said["resume"]
    rows = [line.split() for line in said["join"].splitlines() if line.split()[:1] == ["malmo"]]
    assert [row[1] for row in rows] == ["0", "5", "20", "120"]
    assert float(rows[-1][-3]) > float(rows[0][-3]) + 10  # accuracy: with all samples, and before
    assert len(re.findall(r"\b(?:ill|well)\b", said["predict"])) >= 6
    assert (tmp_path / "models" / "rome.safetensors").is_file()
    assert "fedper" in (tmp_path / "methods.md").read_text()
    assert list((tmp_path / "first-look").rglob("*.html"))
