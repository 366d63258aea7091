"""Which methods, data sets, attacks and so on there are, without importing them: torch takes seconds, a wrong name and
the completion of a right one do not.

FedKin's own names are read off its text, where each stands in a decorator at the beginning of a line. Once the registry
itself is loaded, as a file given with --plugin makes it be, that is asked instead.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from glob import escape, glob
from pathlib import Path

from typer import Context

from fedkin.errors import UsageError, unknown

HOME = Path(__file__).parent.parent


@dataclass(frozen=True)
class _Place:
    """Where names of a kind are registered: the module and the registry, and how a name stands in which files."""

    module: str
    registry: str
    stands: str
    files: str = ""

    def read(self) -> list[str]:
        found: set[str] = set()
        for path in HOME.glob(self.files or f"{self.module}/**/*.py"):
            found.update(re.findall(self.stands, path.read_text(encoding="utf-8"), re.MULTILINE))
        return sorted(found)


PLACES = {
    "method": _Place("methods", "METHODS", r'^@METHODS\.register\("([^"]+)"'),
    "attack": _Place("robust", "ATTACKS", r'^@ATTACKS\.register\("([^"]+)"'),
    "rule": _Place("robust", "RULES", r'^@RULES\.register\("([^"]+)"'),
    "model": _Place("models", "MODELS", r'^@_add\("([^"]+)"'),
    "data set": _Place("data", "SOURCES", r"^\[([\w-]+)\]$", "data/sources.toml"),
    "partition": _Place("data", "PARTITIONS", r'^@PARTITIONS\.register\("([^"]+)"'),
    "task": _Place("tasks", "TASKS", r'^@TASKS\.register\("([^"]+)"'),
    "learning-rate schedule": _Place(
        "core.schedules", "SCHEDULES", r'^@SCHEDULES\.register\("([^"]+)"', "core/schedules.py"
    ),
}
IN_PLUGINS = ("method", "attack", "rule", "task", "learning-rate schedule")
"""What commands that take such a name also take from a file of the user's own."""


@cache
def _own(kind: str) -> list[str]:
    return PLACES[kind].read()


def known(kind: str) -> list[str]:
    """The names of a kind that there are."""
    place = PLACES[kind]
    loaded = sys.modules.get(f"fedkin.{place.module}")
    return list(getattr(loaded, place.registry, ())) or _own(kind)


def check_name(kind: str, spec: str | None, *others: str) -> None:
    """Refuses an unknown name; its options may follow a colon. `others`: what is right beside the names."""
    if spec is None:
        return
    name = spec.strip().partition(":")[0]
    if name not in others and name not in (names := known(kind)):
        error = unknown(kind, name, [*names, *others])
        article = "an" if kind[0] in "aeiou" else "a"
        raise UsageError(f"{error}; {article} {kind} of your own? --plugin FILE.py") if kind in IN_PLUGINS else error


# ---------------------------------------------------------------- completion


def completing(kind: str, *others: str) -> Callable[[str], list[str]]:
    """What a shell asks for the names of a kind that begin like this."""
    return lambda incomplete: [name for name in [*sorted(known(kind)), *others] if name.startswith(incomplete)]


def methods_and_files(incomplete: str) -> list[str]:
    """Methods, and TOML files with settings."""
    files = [name for name in sorted(glob(f"{escape(incomplete)}*")) if name.endswith(".toml") or Path(name).is_dir()]
    return [*completing("method")(incomplete), *(f"{f}/" if Path(f).is_dir() else f for f in files)]


def run_names(ctx: Context, incomplete: str) -> list[str]:
    """Folders among the runs, by name alone: reading what they are takes longer than a shell should wait."""
    from fedkin.runs.catalogue import runs_folder

    try:
        with os.scandir(runs_folder(ctx.params.get("runs_dir"))) as found:
            runs = sorted(e.name for e in found if e.is_dir() and not e.name.startswith("."))
    except OSError:
        runs = []
    return [name for name in [*runs, "last"] if name.startswith(incomplete)]
