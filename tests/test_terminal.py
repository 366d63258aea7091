"""Text of strangers on a terminal: names of columns and classes, words of a run folder or a site, control nothing."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli import deploy, live
from fedkin.cli.application import app
from fedkin.cli.console import Screen, messages, screen, table
from fedkin.deploy.greeting import Facts, misfit

EVIL = "a\x1b]0;PWNED\x07\x1b[31m\u202eb"
TINY = {"clients": 4, "rounds": 1, "epochs": 1, "device": "cpu"}


def clean(text: str) -> bool:
    return "PWNED" in text and not {"\x1b", "\x07", "\u202e", "\x9b"} & {*text}


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A table with an evil name of a column, which is spoken of because it has words in it."""
    rows = [f"{i % 7}.5,{'uv'[i % 3 == 0]},{'yes' if i % 2 else 'no'}" for i in range(80)]
    (tmp_path / "evil.csv").write_text("\n".join([f"x,{EVIL},label", *rows]), encoding="utf-8")
    return str(tmp_path / "evil.csv")


def test_names_of_columns_control_no_terminal(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "runs"))
    words = [word for name, value in TINY.items() for word in (f"--{name}", str(value))]
    for command in (["run", "fedavg"], ["compare", "fedavg", "--fresh"]):
        done = CliRunner().invoke(app, [*command, "--data", data, *words])
        assert done.exit_code == 0, done.stderr
        assert clean(done.stderr)
        assert "\x1b" not in done.stdout
    fk.run("fedavg", data=data, verbose=True, **TINY)  # type: ignore[arg-type]
    assert clean(capsys.readouterr().err)


def test_whatever_is_put_on_a_screen_controls_nothing() -> None:
    for made in (screen(), messages()):
        assert isinstance(made, Screen)
    for markup in (True, False):
        made = Screen(file=io.StringIO(), width=200)
        rows = table(EVIL, EVIL, caption=EVIL)
        rows.add_row(EVIL)
        made.print(EVIL, rows, Table(title=EVIL), markup=markup)
        assert clean(made.file.getvalue())  # type: ignore[attr-defined]
    made = Screen(file=io.StringIO(), width=200)
    live.PlainRun(made).say(EVIL)
    live.LiveRun(made).say(EVIL)
    assert clean(made.file.getvalue())  # type: ignore[attr-defined]


def test_what_a_site_names_controls_no_terminal_of_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    def site(name: str, labels: list[str]) -> Facts:
        told = {"samples": 40, "tests": None, "shape": [4], "dtype": "float32", "labels": labels}
        return Facts.of({"site": name, "targets": "classes", "width": 1, "vocabulary": 0, **told})

    why = misfit([site("oslo", ["a", EVIL])], site("riga", ["c"]))
    assert why is not None
    assert clean(why)
    deploy._say(f"site 'riga': {EVIL}")
    deploy._line(f"the server says {EVIL}")
    said = capsys.readouterr()
    assert clean(said.err)
    assert clean(said.out)


def test_numbers_stay_as_they_are() -> None:
    made = Screen(file=io.StringIO(), width=200)
    made.print(f"[bold]{np.float64(1.5)}[/] ± 0.1 · ▁▂█ é 中\nnext", highlight=False)
    assert made.file.getvalue() == "1.5 ± 0.1 · ▁▂█ é 中\nnext\n"  # type: ignore[attr-defined]
