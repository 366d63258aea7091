"""Everything that `fedkin` exports says what it is: classes, functions, methods, properties and attributes."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fedkin

EXPORTED = [name for name in fedkin.__all__ if not name.startswith("__")]
SHORTEST = 20  # characters: "The round." says nothing


def ours(kind: type[Any]) -> list[type[Any]]:
    """A class and its bases, as far as they are FedKin's."""
    return [base for base in kind.__mro__ if base.__module__.split(".")[0] == "fedkin"]


def text_of(value: Any) -> str:
    """Its docstring or, where it overrides something, that of what it overrides; not one that Python made up."""
    made_up = dataclasses.is_dataclass(value) and (value.__doc__ or "").startswith(f"{value.__name__}(")
    return "" if made_up else inspect.getdoc(value) or ""


def silent_parts(kind: type[Any]) -> Iterator[str]:
    """Public parts of a class that nothing is said of.

    Attributes are described where their class is, by name and in backticks, or by the help of an option."""
    said = " ".join(text_of(base) for base in ours(kind))
    for base in ours(kind):
        for name, part in vars(base).items():
            function = getattr(part, "func", getattr(part, "fget", getattr(part, "__func__", part)))
            if (
                not name.startswith("_")
                and inspect.isroutine(function)
                and len(text_of(getattr(kind, name))) < SHORTEST
            ):
                yield name
        for name in vars(base).get("__annotations__", {}):
            field = getattr(base, "__dataclass_fields__", {}).get(name)
            helped = field is not None and field.metadata.get("help")
            if not name.startswith("_") and not helped and not re.search(rf"`+((fed|client|self)\.)?{name}\b", said):
                yield name


@pytest.mark.parametrize("name", EXPORTED)
def test_it_says_what_it_is(name: str) -> None:
    value = getattr(fedkin, name)
    assert len(text_of(value)) >= SHORTEST, f"fedkin.{name} has no docstring"
    if inspect.isclass(value):
        assert list(silent_parts(value)) == []


@pytest.mark.parametrize("name", EXPORTED)
def test_its_examples_are_true(name: str) -> None:
    value = getattr(fedkin, name)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return
    home = inspect.getmodule(value)
    assert isinstance(home, ModuleType)
    runner = doctest.DocTestRunner()
    for test in doctest.DocTestFinder().find(value, name, home, vars(home).copy()):
        assert runner.run(test).failed == 0


def test_the_reference_has_all_of_it_once() -> None:
    """The page of the site that is made of docstrings; its list is read, since what builds the site may not be here."""
    tree = ast.parse((Path(__file__).parent.parent / "docs" / "hooks.py").read_text(encoding="utf-8"))
    [listed] = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "REFERENCE"]
    assert sorted(name for names in ast.literal_eval(listed).values() for name in names) == sorted(EXPORTED)


def test_what_says_nothing_is_found() -> None:
    @dataclasses.dataclass
    class Silent:
        told: int
        untold: int
        helped: int = fedkin.option(1, "what it is for")

        def speaks(self) -> None:
            """Does nothing, and says so."""

        def says_nothing(self) -> None:
            pass

        @property
        def size(self) -> int:
            return 1

        @classmethod
        def make(cls) -> None:
            pass

    Silent.__module__ = "fedkin.made_up"
    assert text_of(Silent) == ""
    Silent.__doc__ = "`told` is a number."
    assert list(silent_parts(Silent)) == ["says_nothing", "size", "make", "untold"]
