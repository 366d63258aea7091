"""CONTRIBUTING.md as somebody follows it: its recipes are carried out in order, and their commands run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

import fedkin
from fedkin.cli.application import app
from fedkin.data import SOURCES
from fedkin.methods import METHODS
from fedkin.registry import Registry
from fedkin.robust import ATTACKS, RULES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.M | re.S)
ADDED = re.findall(r"^@METHODS\.register\(\"([^\"]+)\"\)", PAGE, re.M)
REGISTRIES: tuple[Registry[Any], ...] = (METHODS, ATTACKS, RULES, SOURCES)


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path))


def commands(program: str) -> Iterator[list[str]]:
    """What the page says to type that begins with this."""
    for language, body in BLOCKS:
        if not language:
            yield from (shlex.split(line) for line in body.splitlines() if line.startswith(f"{program} "))


def test_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("contributing")  # dataclasses and docstrings look a class's module up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    added = 0
    before = [set(registry) for registry in REGISTRIES]
    for language, body in BLOCKS:
        if language == "python":
            exec(compile(body, "CONTRIBUTING.md", "exec", dont_inherit=True), vars(module))
        for line in body.splitlines():
            if not language and line.startswith("fedkin "):
                outcome = CliRunner().invoke(app, shlex.split(line)[1:])
                assert outcome.exit_code == 0, f"{line}\n{outcome.output}"
                added += 1
    assert added == len(list(commands("fedkin"))) == 8
    assert [len(set(now) - then) for now, then in zip(REGISTRIES, before, strict=True)] == [1, 1, 1, 1]


def test_tests_that_are_named_are_there() -> None:
    """A file, a test in it, or words that stand in the names of tests and of the methods that these run over."""
    lines = list(commands("python"))
    assert len(lines) == 5
    names = {
        name for path in (ROOT / "tests").glob("*.py") for name in re.findall(r"^def (\w+)", path.read_text(), re.M)
    }
    for line in lines:
        file, _, test = line[3].partition("::")
        assert (ROOT / file).exists()
        assert not test or f"def {test}(" in (ROOT / file).read_text()
        for word in line[5].split(" and ") if "-k" in line else []:
            assert any(word in name for name in {*names, *METHODS, *ADDED}), word


def test_what_make_is_asked_for_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    asked = set(re.findall(r"\bmake ([a-z-]+)\b`", PAGE)) | {words[1] for words in commands("make")}
    assert asked == {"test", "test-slow", "lint", "docs"}
    assert asked <= set(targets)


def test_files_and_modules_that_are_named_exist() -> None:
    files = set(re.findall(r"`((?:src|tests)/[\w/]+(?:\.\w+)?)`", PAGE)) | set(re.findall(r"\]\(([^)#]+)\)", PAGE))
    assert len(files) > 12
    assert [f for f in files if "NAME" not in f and not (ROOT / f).exists()] == []
    modules = set(re.findall(r"`fedkin((?:\.\w+)+)`", PAGE))
    assert modules
    for module in modules:
        path = ROOT / "src" / "fedkin" / module[1:].replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), module


def test_the_citation_is_of_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    said = dict(re.findall(r"^([\w-]+): (.+)$", citation, re.M))
    assert said["cff-version"] == "1.2.0"
    assert said["version"] == fedkin.__version__
    assert f"## {said['version']} ({said['date-released'].strip(chr(34))})" in (ROOT / "CHANGELOG.md").read_text()
    assert f'license = "{said["license"]}"' in (ROOT / "pyproject.toml").read_text()
