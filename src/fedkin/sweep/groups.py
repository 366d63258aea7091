"""The same but for the seed: the one place that says which runs form a group, and how a group is told from others.

A run is a configuration that is still to be carried out, or a folder's RunInfo. Two runs belong together where all
settings that change a result agree (`config.effective` says which do); where, how and in how large portions a run was
computed does not tell it from others, its precision does."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from fedkin.config import LATER, Config, effective
from fedkin.runs.folder import RunInfo

Run = Config | RunInfo
T = TypeVar("T")
OPTION = "options."
USUAL = Config().to_dict()
_PLACE = {f.name: i for i, f in enumerate(fields(Config))}


def settings_of(run: Run) -> dict[str, Any]:
    """Every setting that changes what comes out of a run, an option as `options.NAME`; what an older run could not say
    is what it was done with. Of a run that has its folder, options are all there, and precision and evaluation point
    are what "auto" stood for."""
    found = {**LATER, **(run.settings() if isinstance(run, RunInfo) else effective(run.to_dict()))}
    options = run.options if isinstance(run, RunInfo) else found["options"]
    return {**{k: v for k, v in found.items() if k != "options"}, **{f"{OPTION}{k}": v for k, v in options.items()}}


def same_but_seed(run: Run) -> str:
    """A key that two runs share exactly if they differ in nothing but the seed."""
    return repr(sorted((k, repr(v)) for k, v in settings_of(run).items() if k != "seed"))


@dataclass(frozen=True, eq=False)
class Group(Generic[T]):
    """Runs that differ in nothing but the seed, and in words how they are told from the others."""

    row: str  # the method, with those options and settings that tell it from other rows
    column: str  # the conditions that vary
    settings: Mapping[str, Any]  # those, by name
    members: Sequence[T]  # by seed; of several at one seed the last that was given
    older: Sequence[T] = ()  # the others

    def over_seeds(self, value: Callable[[T], float]) -> dict[str, float]:
        """Mean and standard deviation (NaN for a single seed) of what is a number."""
        import numpy as np  # which a list of runs does without

        each = np.array([value(member) for member in self.members], float)
        each = each[np.isfinite(each)]
        return {
            "mean": float(each.mean()) if len(each) else math.nan,
            "std": float(each.std(ddof=1)) if len(each) > 1 else math.nan,
        }


def grouped(items: Iterable[T], run: Callable[[T], Run]) -> list[Group[T]]:
    """Groups in the order in which their first members came. `run`: the configuration or the RunInfo of an item."""
    given = [(item, run(item)) for item in items]
    known = [settings_of(r) for _, r in given]
    rows, columns = _varied(known)
    found: dict[str, list[tuple[T, Run, Mapping[str, Any]]]] = {}
    for (item, r), own in zip(given, known, strict=True):
        found.setdefault(same_but_seed(r), []).append((item, r, own))
    made = []
    for members in found.values():
        told = members[0][2]
        newest = {r.seed: item for item, r, _ in members}
        kept = [newest[seed] for seed in sorted(newest)]
        older = [item for item, r, _ in members if newest[r.seed] is not item]
        conditions = {k: told[k] for k in columns if k in told}
        made.append(Group(_row(told, known, rows), said_of(conditions), conditions, kept, older))
    return made


def varied(runs: Sequence[Run]) -> tuple[list[str], list[str]]:
    """Settings, options aside, that differ between runs: those that go with the row (a method's own, and the rule), and
    those that differ between runs of one method."""
    return _varied([settings_of(run) for run in runs])


def _varied(known: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    rows: list[str] = []
    columns: list[str] = []
    keys = {k for own in known for k in own if k not in ("method", "seed") and not k.startswith(OPTION)}
    for key in sorted(keys, key=lambda k: (_PLACE.get(k, len(_PLACE)), k)):
        by_method: dict[Any, set[str]] = {}
        for own in known:
            if key in own:
                by_method.setdefault(own.get("method"), set()).add(repr(own[key]))
        if len(set().union(*by_method.values())) > 1:
            inside = any(len(values) > 1 for values in by_method.values())
            (columns if inside and key != "rule" else rows).append(key)
    return rows, columns


def told_apart(runs: Sequence[Run], beside: Collection[str] = ()) -> list[str]:
    """For each run the settings in which it differs from others of its method on the same data, as one types them:
    those without their default, and none that stands `beside` it."""
    known = [settings_of(run) for run in runs]
    values: dict[tuple[str, str], dict[str, set[str]]] = {}
    for own in known:
        of_these = values.setdefault(_peers(own), {})
        for key in own.keys() - {"method", "data", "seed", *beside}:
            of_these.setdefault(key, set()).add(repr(own[key]))
    found = []
    for own in known:
        several = (k for k, different in values[_peers(own)].items() if len(different) > 1 and k in own)
        keys = [k for k in several if k not in USUAL or repr(own[k]) != repr(USUAL[k])]
        keys.sort(key=lambda k: (_PLACE.get(k, -1), k))
        words = (f"{k.removeprefix(OPTION)}={'none' if own[k] is None else own[k]}" for k in keys)
        found.append(" ".join(words))
    return found


def _peers(own: Mapping[str, Any]) -> tuple[str, str]:
    return str(own.get("method")), str(own.get("data"))


def _row(own: Mapping[str, Any], known: Sequence[Mapping[str, Any]], rows: Sequence[str]) -> str:
    peers = [other for other in known if other.get("method") == own.get("method")]
    options = dict.fromkeys(k for peer in peers for k in peer if k.startswith(OPTION))
    differing = [k for k in options if k in own and len({repr(peer.get(k)) for peer in peers}) > 1]
    told = [f"{k.removeprefix(OPTION)}={own[k]}" for k in differing]
    return " ".join([str(own.get("method")), *told, *(said(k, own[k]) for k in rows if k != "rule" and k in own)])


def said_of(settings: Mapping[str, Any]) -> str:
    """Conditions in words; what every run was done with before one could choose goes without saying beside others."""
    told = {k: v for k, v in settings.items() if (k, v) not in LATER.items()}
    return ", ".join(said(k, v) for k, v in (told or settings).items())


def said(key: str, value: Any) -> str:
    """A setting in a word or two."""
    if key == "attack":
        return "no attack" if value == "none" else str(value)
    if value is None:
        return f"{key.replace('_', ' ')} not set"
    if key == "malicious" and isinstance(value, int | float):
        return f"{100 * value:g} % malicious"
    return f"{key.replace('_', ' ')} {value}"
