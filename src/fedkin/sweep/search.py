"""Where good settings are looked for: the range or the values of each, as they are said or as they are declared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from fedkin.config import Config
from fedkin.errors import UsageError, unknown
from fedkin.methods import Method, options_of
from fedkin.options import validated
from fedkin.sweep.groups import OPTION
from fedkin.sweep.selection import PICKED

SEARCHED = PICKED - {"seed", "init", "start_from"}
"""Settings of a run that can be searched: how a method trains, not what the problem is."""
MOST_LISTED = 10_000  # values of an axis, and combinations of a space, of which each is tried once
HOW = "write NAME=LOW..HIGH, NAME=LOW..HIGH:log, or NAME=A,B,C"


@dataclass(frozen=True)
class Axis:
    """A setting and where it is looked for: between `low` and `high`, or among `values`. Options are `options.NAME`."""

    name: str
    low: float = math.nan
    high: float = math.nan
    log: bool = False
    whole: bool = False
    values: tuple[Any, ...] = ()

    @property
    def short(self) -> str:
        return self.name.removeprefix(OPTION)

    def rounded(self, value: Any) -> Any:
        """A number to four digits, which is as well as one can know it and easy to write."""
        if self.values or self.whole:
            return value
        return min(max(float(f"{value:.4g}"), self.low), self.high)

    def listed(self) -> tuple[Any, ...] | None:
        """All its values; None where they are not so few."""
        if self.whole and self.high - self.low < MOST_LISTED:
            return tuple(range(int(self.low), int(self.high) + 1))
        return self.values or None

    def words(self) -> str:
        if self.values:
            return f"{self.short} among {', '.join(map(str, self.values))}"
        return f"{self.short} from {self.low:g} to {self.high:g}{' (log)' if self.log else ''}"


def space_of(
    base: Config, kind: type[Method], said: Mapping[str, Any], idle: Mapping[str, str] | None = None
) -> list[Axis]:
    """The axes that somebody says by name (`lr`, `lam`, `ditto.lam`), each as text (`1e-4..1e-1:log`, `10,20,50`), a
    pair of numbers or a list; where nothing is said, the usual ones: the learning rate and what the method declares.
    `idle`: settings that would change nothing, and why."""
    idle = idle or {}
    if not said:
        found = [axis for axis in usual(base, kind) if axis.name not in idle]
        if not found:
            raise UsageError(f"method {base.method!r} declares nothing to search: say what, {HOW}")
        return found
    made: dict[str, Axis] = {}
    for name, where in said.items():
        key, field = _field(base, kind, name)
        if key in idle:
            raise UsageError(f"search {name}: would change nothing: {idle[key]}")
        if key in made:
            raise UsageError(f"search {name}: it is named twice")
        fixed = {n.replace("-", "_"): v for n, v in base.options.items()}
        if key in base.asked or key.removeprefix(OPTION) in (fixed if key.startswith(OPTION) else ()):
            value = fixed[key.removeprefix(OPTION)] if key.startswith(OPTION) else getattr(base, key)
            raise UsageError(f"search {name}: it is given, too ({value}); leave one of them out")
        made[key] = _axis(base, kind, key, field, name, where)
    return list(made.values())


def combinations(space: Sequence[Axis]) -> list[dict[str, Any]] | None:
    """All choices there are in a space; None where they are not so few."""
    each = [axis.listed() for axis in space]
    listed = [values for values in each if values is not None]
    if len(listed) < len(space) or math.prod(map(len, listed)) > MOST_LISTED:
        return None
    names = [axis.name for axis in space]
    return [dict(zip(names, values, strict=True)) for values in product(*listed)]


def usual(base: Config, kind: type[Method]) -> list[Axis]:
    """The learning rate and what a method declares `search` for or, if it declares none, its numbers that are bounded
    on both sides; without what was given."""
    options: list[Field[Any]] = list(fields(kind.Options))
    declared = [(f, f.metadata.get("search") or "") for f in options]
    if not any(where for _, where in declared):
        declared = [(f, _bounds(f)) for f in options]
    known = {name.replace("-", "_") for name in base.options}
    lr = next(f for f in fields(Config) if f.name == "lr")
    axes = [] if "lr" in base.asked else [_axis(base, kind, "lr", lr, "lr", lr.metadata["search"])]
    wanted = [(f, where) for f, where in declared if where and f.name not in known]
    return axes + [_axis(base, kind, f"{OPTION}{f.name}", f, f.name, where) for f, where in wanted]


def _bounds(field: Field[Any]) -> str:
    low, high, above = (field.metadata.get(k) for k in ("low", "high", "above"))
    if high is None or (low is None and above is None) or isinstance(field.default, bool):
        return ""
    if low is None:
        assert above is not None
        low = above + 0.01 * (high - above)
    return f"{low}..{high}"


def chosen(base: Config, values: Mapping[str, Any], seed: int) -> Config:
    """The configuration with these values of its axes."""
    options = {k.removeprefix(OPTION): v for k, v in values.items() if k.startswith(OPTION)}
    settings = {k: v for k, v in values.items() if not k.startswith(OPTION)}
    known = {k: v for k, v in base.options.items() if k.replace("-", "_") not in options}
    given = {*base.asked, *settings, "seed"}
    return replace(base, **settings, options={**known, **options}, seed=seed, given=given)


# ---------------------------------------------------------------- one axis


def _field(base: Config, kind: type[Method], name: str) -> tuple[str, Field[Any]]:
    settings, options = ({f.name: f for f in fields(of)} for of in (Config, kind.Options))
    method, _, short = name.removeprefix(OPTION).rpartition(".")
    short = short.replace("-", "_")
    if method and method != base.method:
        raise UsageError(f"search {name}: {method!r} is not the method that is tuned, {base.method!r}")
    if not method and not name.startswith(OPTION) and short in settings:
        if short not in SEARCHED:
            raise UsageError(
                f"search {name}: it is part of what the problem is or of how it is measured, not of how "
                f"{base.method} trains: set it once, or give several with fedkin compare --grid"
            )
        return short, settings[short]
    if short not in options:
        raise unknown(f"setting to search for {base.method},", name, [*sorted(SEARCHED), *options])
    return f"{OPTION}{short}", options[short]


def _axis(base: Config, kind: type[Method], key: str, field: Field[Any], name: str, where: Any) -> Axis:
    def checked(value: Any) -> Any:
        try:
            if key.startswith(OPTION):
                return asdict(options_of(kind, {**base.options, field.name: value}, base.method))[field.name]
            return getattr(validated(Config, {field.name: value}, "a run"), field.name)
        except UsageError as error:
            raise UsageError(f"search {name}: {error}") from None

    if isinstance(where, str):
        text, _, scale = where.partition(":") if ".." in where else (where, "", "")
        if scale not in ("", "log"):
            raise UsageError(f"search {name}={where!r}: after the range stands log or nothing; {HOW}")
        ends = text.split("..") if ".." in text else None
        listed = [part.strip() for part in text.split(",")] if ends is None else []
    elif isinstance(where, tuple) and len(where) in (2, 3) and all(_is_number(v) for v in where[:2]):
        scale = where[2] if len(where) == 3 else ""
        if scale not in ("", "log"):
            raise UsageError(f"search {name}={where!r}: (low, high) or (low, high, 'log')")
        ends, listed = list(where[:2]), []
    elif isinstance(where, Sequence):
        ends, listed, scale = None, list(where), ""
    else:
        raise UsageError(f"search {name}={where!r}: a text, as in '0.01..10:log', a pair (low, high) or a list")
    if ends is None:
        return _among(key, name, where, [v for v in listed if v != ""], checked)
    if len(ends) != 2 or not all(_is_number(end) for end in ends):
        raise UsageError(f"search {name}={where!r}: a range has two numbers; {HOW}")
    low, high = map(checked, ends)
    if isinstance(low, bool) or not isinstance(low, int | float) or not isinstance(high, int | float):
        raise UsageError(f"search {name}={where!r}: it is not a number; list its values, {name}=A,B,C")
    if not low < high:
        raise UsageError(f"search {name}={where!r}: the range is empty; the lower end comes first")
    if scale and low <= 0:
        raise UsageError(f"search {name}={where!r}: a logarithmic range begins above 0")
    return Axis(key, low, high, bool(scale), isinstance(low, int) and isinstance(high, int))


def _among(key: str, name: str, where: Any, listed: Sequence[Any], checked: Any) -> Axis:
    values = tuple(checked(value) for value in listed)
    if len(values) < 2 or len({repr(v) for v in values}) < len(values):
        raise UsageError(f"search {name}={where!r}: two values or more, each once; {HOW}")
    if not all(v is None or isinstance(v, bool | int | float | str) for v in values):
        raise UsageError(f"search {name}={where!r}: plain values")
    return Axis(key, values=values)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and math.isfinite(float(value))
    except (TypeError, ValueError):
        return False
