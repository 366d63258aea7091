"""`fedkin new`: a working file of one's own, and its test."""

from __future__ import annotations

import keyword
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Annotated

import typer
from rich.markup import escape

from fedkin.cli.application import MAKE, Json, command
from fedkin.cli.console import print_json, screen
from fedkin.errors import DataError, UsageError, unknown

KINDS = {"method": "run $name", "attack": "run fedavg --attack $name", "rule": "run fedavg --rule $name"}
NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")


@command(
    "new",
    """
    fedkin new method my-method
    fedkin new attack my-attack --to plugins
    fedkin new rule my-rule
    """,
    MAKE,
)
def new(
    kind: Annotated[str, typer.Argument(metavar="method|attack|rule", help="What to write.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name: letters, digits, dashes, underscores.")],
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="The folder for the two files.")] = ".",
    json: Json = False,
) -> None:
    """Write a file with a working method, attack or rule of some forty lines, and a test for it.

    The test runs the same checks that the methods, attacks and rules of FedKin pass. Nothing is overwritten.
    """
    source, test = write(kind, name, Path(to))
    use = Template(KINDS[kind]).substitute(name=name)
    if json:
        return print_json({"kind": kind, "name": name, "file": str(source), "test": str(test)})
    file, tested = (escape(shlex.quote(str(p))) for p in (source, test))
    screen().print(
        f"written: {file}, {tested}\ncheck:   python -m pytest {tested}\nuse:     fedkin {use} --plugin {file}",
        soft_wrap=True,
    )


def write(kind: str, name: str, folder: Path) -> tuple[Path, Path]:
    """The two files, neither of which may exist."""
    if kind not in KINDS:
        raise unknown("kind of thing to begin", kind, KINDS)
    module = checked_name(kind, name)
    source, test = folder / f"{module}.py", folder / f"test_{module}.py"
    for path in (source, test):
        if path.exists() or path.is_symlink():
            raise UsageError(f"{path} exists already and is not overwritten; take another name, or --to another folder")
    words = {
        "name": name,
        "module": module,
        "file": source.name,
        "title": module.replace("_", " ").capitalize(),
        "cls": "".join(part.capitalize() for part in module.split("_")),
    }
    templates = Path(__file__).parent.parent / "scaffold"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in ((source, f"{kind}.py.txt"), (test, f"test_{kind}.py.txt")):
            text = Template((templates / template).read_text(encoding="utf-8")).substitute(words)
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from None
    return source, test


def checked_name(kind: str, name: str) -> str:
    """The module's name for it; a name that cannot be one, or is taken, is refused."""
    if not NAME.fullmatch(name) or len(name) > 40:
        raise UsageError(
            f"name {name[:60]!r}: lower-case letters and digits, single dashes or underscores between, "
            "a letter first, at most 40; for example my-method"
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or module in sys.stdlib_module_names or module in ("fedkin", "torch", "numpy", "test"):
        raise UsageError(f"name {name!r} means something else in Python; take another, for example my-{name}")

    from fedkin.methods import METHODS
    from fedkin.robust import ATTACKS, RULES

    registries: dict[str, Mapping[str, object]] = {"method": METHODS, "attack": ATTACKS, "rule": RULES}
    taken = registries[kind]
    if name in taken or (kind == "attack" and name == "none"):
        raise UsageError(f"{kind} {name!r} exists already; take another name")
    return module
