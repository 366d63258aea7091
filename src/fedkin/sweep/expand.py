"""Which runs a grid has: all combinations of the values that are listed, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, replace
from itertools import product
from numbers import Number
from types import MappingProxyType
from typing import Any

import numpy as np

from fedkin.config import NOT_IDENTITY, Config, axis_of, make_config
from fedkin.data import Partition, unwritten
from fedkin.errors import UsageError, unknown
from fedkin.methods import METHODS, Method, given_options, options_of
from fedkin.options import describe
from fedkin.robust import make_attack
from fedkin.rounds import named_spec
from fedkin.rounds.settings import idle, refuse, settled
from fedkin.runs.origin import check_repeatable

MOST_CELLS = 20_000
Axes = dict[str, list[Any]]


def expand(
    base: Mapping[str, Any],
    blocks: Sequence[Mapping[str, Sequence[Any]]],
    check: Callable[[Config], Config] = lambda config: config,
    say: Callable[[str], object] = lambda sentence: None,
    own: Mapping[str, type[Method]] = MappingProxyType({}),
) -> list[Config]:
    """All combinations of every block's lists over the common settings, seed by seed, each once.

    A block maps a setting to its values; `options.lam` is an option of every method that has it, `options.ditto.lam`
    of one. A setting counts for the runs that it changes, and is left out of the others; `say` hears of that. One that
    changes no run is refused. `own`: methods by names that are not registered."""
    asked: list[Config] = []
    common = flat_options(base.get("options", {}))
    every = [_axes(block) for block in blocks]
    listed = ([str(m) for m in axes.get("method", [base.get("method", "fedavg")])] for axes in every)
    owners = [{m: _options_of(own.get(m) or METHODS[m]) for m in methods} for methods in listed]
    _check_options(list(common), {m: names for known in owners for m, names in known.items()})
    for axes, known in zip(every, owners, strict=True):
        for said in (base.get("start_from"), *axes.get("start_from", ())):
            check_repeatable(said)
        _check_options([k.removeprefix("options.") for k in axes if k.startswith("options.")], known)
        size = 1
        for values in axes.values():
            size *= len(values)
        if size > MOST_CELLS:
            raise UsageError(f"the grid has {size} runs; at most {MOST_CELLS}")
        chosen = (dict(zip(axes, picked, strict=True)) for picked in product(*axes.values()))
        asked += [check(_typed(_cell(base, common, one, known), own)) for one in chosen]
    reasons = [idle_of(config, own.get(config.method)) for config in asked]
    made, sentences = settled(asked, reasons)
    for config, found in zip(made, reasons, strict=True):
        refuse(config, found)
    for sentence in sentences:
        say(sentence)
    cells: dict[str, Config] = {}
    for config in made:
        cells.setdefault(config.identity(), config)
    seeds = list(dict.fromkeys(c.seed for c in cells.values()))
    return [c for s in seeds for c in cells.values() if c.seed == s]


def named_twice(axes: Iterable[str], given: Iterable[str]) -> list[str]:
    """The axes that are given by themselves, too: settings, or options as `options.lam` (of all methods) or
    `options.ditto.lam` (of one), where both reach one method."""

    def parts(name: str) -> tuple[str, str]:
        method, _, option = name.removeprefix("options.").rpartition(".")
        return method, option.replace("-", "_")

    options = [parts(name) for name in given if name.startswith("options.")]
    found = []
    for axis in axes:
        method, option = parts(axis)
        alike = (o == option and (m == method or not m or not method) for m, o in options)
        if any(alike) if axis.startswith("options.") else axis in given:
            found.append(axis)
    return found


def axes_of(grid: Mapping[str, Iterable[Any]], listed: Set[str] = frozenset(), given: Set[str] = frozenset()) -> Axes:
    """A block for `expand` of a grid as it is given from Python: {"lr": [0.01, 0.1], "ditto.lam": [0.1, 1]}. Settings
    that are `listed` elsewhere, or `given`, are refused."""
    if not isinstance(grid, Mapping):
        raise UsageError(
            f"grid={grid!r}: a dictionary of lists, for example {{'lr': [0.01, 0.1], 'ditto.lam': [0.1, 1]}}"
        )
    axes: Axes = {}
    for name, values in grid.items():
        key = axis_of(str(name))
        if key in listed:
            raise UsageError(f"grid has {name!r}: give {key if key in ('attack', 'rule') else f'{key}s'}=[...] instead")
        if named_twice([key], given):
            raise UsageError(f"{name!r} is given twice: by itself, and in the grid")
        if key in axes:
            raise UsageError(f"{name!r} is in the grid twice, by two spellings")
        several = [values] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)
        axes[key] = [_value_of(str(name), value) for value in several]
    return axes


def _value_of(name: str, value: Any) -> Any:
    """A setting's value in a grid, where a text or a number says all of it."""
    if isinstance(value, Partition) and unwritten(value) is None:
        return str(value)
    if isinstance(value, np.generic):
        return value.item()
    if value is not None and not isinstance(value, str | Number):
        raise UsageError(f"grid {name!r}: a {type(value).__name__} cannot be in a grid; compare such runs one by one")
    return value


def _cell(
    base: Mapping[str, Any], common: Mapping[str, Any], chosen: Mapping[str, Any], known: Mapping[str, set[str]]
) -> Config:
    options = {**common, **{k.removeprefix("options."): v for k, v in chosen.items() if k.startswith("options.")}}
    values = {**base, **{k: v for k, v in chosen.items() if not k.startswith("options.")}}
    method = str(values.get("method", "fedavg"))
    own: dict[str, Any] = {}
    for name, value in sorted(options.items(), key=lambda item: "." in item[0]):  # what names a method comes last
        taker, _, key = name.rpartition(".")
        if taker == method or (not taker and key.replace("-", "_") in known[method]):
            own[key] = value
    return make_config({**values, "options": own})


def _typed(config: Config, own: Mapping[str, type[Method]]) -> Config:
    kind = own.get(config.method) or METHODS[config.method]
    return replace(config, options=given_options(kind, config.options, config.method))


def idle_of(config: Config, kind: type[Method] | None = None) -> dict[str, str]:
    """Which settings would change nothing in a run, and why. `kind`: its method, where that is no registered one."""
    kind = kind or METHODS[config.method]
    attack = None if config.attack == "none" else make_attack(*named_spec(config.attack))
    return idle(config, kind, options_of(kind, config.options, config.method), attack)


def _axes(block: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The lists of a block in the order in which they are nested: attacks outside, methods and their options inside."""
    names = [f.name for f in fields(Config) if f.name != "options"]
    axes: dict[str, list[Any]] = {}
    for raw, values in block.items():
        key = raw if raw.startswith("options.") else raw.replace("-", "_")
        if not key.startswith("options.") and key not in names:
            raise unknown("setting in a grid", raw, [*names, "options.NAME"])
        if key in NOT_IDENTITY:
            raise UsageError(f"{raw} does not change what comes out of a run, so there is no grid over it")
        items = list(values) if isinstance(values, list | tuple | range) else [values]
        if not items:
            raise UsageError(f"{raw} = []: a grid needs at least one value")
        if any(isinstance(item, Mapping | list | tuple) for item in items):
            raise UsageError(f"{raw} = {values!r}: a list of plain values")
        if len(set(items)) < len(items):
            twice = next(item for i, item in enumerate(items) if item in items[:i])
            raise UsageError(f"{raw}: {twice!r} is named twice")
        axes[key] = items
    rank = {"attack": 0, "rule": 2, "method": 3}
    return dict(sorted(axes.items(), key=lambda a: rank.get(a[0], 4 if a[0].startswith("options.") else 1)))


def flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Tables inside [options] are those of single methods: {"ditto": {"lam": 1}} becomes {"ditto.lam": 1}."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat


def _options_of(kind: type[Method]) -> set[str]:
    return {"profile", *(d.name for d in describe(kind.Options))}


def _check_options(given: Sequence[str], known: Mapping[str, set[str]]) -> None:
    """`ditto.lam` reaches ditto only; `lam` every method that has it. What reaches nobody is refused."""
    for name in given:
        method, dot, key = name.rpartition(".")
        if dot and method not in known:
            raise unknown(f"method in option {name!r},", method, known)
        if dot and key.replace("-", "_") not in known[method]:
            raise unknown(f"option of method {method!r}", key, known[method])
        if not any(key.replace("-", "_") in names for names in known.values()):
            raise unknown("option of " + ", ".join(known), key, set().union(*known.values()))
