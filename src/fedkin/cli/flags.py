"""Flags, files and `--set` become one `Config`. The flags are read off `Config` itself; nothing is listed twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedkin.config import Config, make_config, read_toml
from fedkin.errors import UsageError, unknown
from fedkin.options import Described, describe

NOT_FLAGS = ("method", "options")  # the argument of `run`, and `--set`
PANEL = "Settings (each can also stand in the TOML file)"
METAVARS = {"a whole number": "N", "a number": "X", "text": "TEXT"}
YES_OR_NO = "true or false"


def with_settings(only: Collection[str] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one flag for each field of `Config` (or for those in `only`).

    The command receives what was given, and nothing else, as its argument `settings`."""
    described = [d for d in describe(Config) if d.name not in NOT_FLAGS and (only is None or d.name in only)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "settings"]

        def wrapper(**given: Any) -> None:
            settings = {d.name: given.pop(d.name) for d in described}
            command(**given, settings={k: v for k, v in settings.items() if v is not None})

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + [_flag(d) for d in described]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        wrapper.__name__, wrapper.__doc__ = command.__name__, command.__doc__
        return wrapper

    return decorate


def _flag(field: Described) -> inspect.Parameter:
    name = "--" + field.name.replace("_", "-")
    yes_or_no = field.type == YES_OR_NO
    info = typer.Option(
        f"{name}/--no-{name[2:]}" if yes_or_no else name, help=_help(field), show_default=False, rich_help_panel=PANEL,
        metavar=None if yes_or_no else _metavar(field),
    )  # fmt: skip
    kind = bool if yes_or_no else str
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _metavar(field: Described) -> str:
    first = field.type.split(" or ")[0]
    return METAVARS.get(first, first.replace(", ", "|"))


def _help(field: Described) -> str:
    """The help of an option, with its default and, for numbers, its range."""
    notes = [] if field.default is None else [f"default {str(field.default).lower()}"]
    if "number" in field.type:
        notes.append(field.accepts)
    return f"{field.help} [{'; '.join(notes)}]".replace("[", "\\[") if notes else field.help


def split_settings() -> set[str]:
    """The settings that decide who holds which samples."""
    from fedkin.data import load, make_split

    return {"data", *inspect.signature(load).parameters, *inspect.signature(make_split).parameters}


def is_file(word: str) -> bool:
    return word.endswith(".toml")


def from_file(path: str) -> dict[str, Any]:
    """The settings in a TOML file, checked on their own so that an error names the file."""
    values = read_toml(path)
    try:
        make_config(values)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    return values


def assignments(words: Sequence[str]) -> dict[str, str]:
    """`--set alpha=10 --set beta=2` as a table."""
    table: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise UsageError(f"--set {word!r}: write NAME=VALUE, for example --set lam=0.1")
        table[name.strip()] = value.strip()
    return table


def run_config_of(target: str, settings: Mapping[str, Any], sets: Sequence[str]) -> Config:
    """The configuration of `fedkin run TARGET`: a method's name or a TOML file, with flags on top."""
    values: dict[str, Any] = from_file(target) if is_file(target) else {"method": target}
    given = {**values.get("options", {}), **assignments(sets)}
    return checked(make_config({**values, **settings, "options": given}))


def checked(config: Config) -> Config:
    """Refuses now what would otherwise fail only after the data are loaded; options get their right types."""
    from fedkin.data import SOURCES, parse_partition
    from fedkin.methods import METHODS
    from fedkin.methods.base import options_of
    from fedkin.models import MODELS

    kind = METHODS[config.method]
    if config.model is not None:
        MODELS[config.model]
    if not Path(config.data).exists() and not config.data.endswith(".npz") and not config.data.startswith("npz:"):
        SOURCES[config.data]
    parse_partition(config.partition)
    resolved = asdict(options_of(kind, config.options, config.method))
    options = {name: resolved.get(name.replace("-", "_"), value) for name, value in config.options.items()}
    return make_config({**config.to_dict(), "options": options})


def grid_configs(
    words: Sequence[str], settings: Mapping[str, Any], sets: Sequence[str], seeds: str | None
) -> list[list[Config]]:
    """The configurations of `fedkin compare`, one list per seed: every method under the same settings."""
    methods = [word for word in words if not is_file(word)]
    values: dict[str, Any] = {}
    for path in (word for word in words if is_file(word)):
        values |= from_file(path)
    if not methods and "method" in values:
        methods = [str(values["method"])]
    if not methods:
        raise UsageError("no method to compare: give some names, for example fedkin compare fedavg ditto")
    repeated = [m for i, m in enumerate(methods) if m in methods[:i]]
    if repeated:
        raise UsageError(f"method {repeated[0]!r} is named twice")
    per_method = _options_per_method(methods, {**_flat(values.get("options", {})), **assignments(sets)})
    base = {**values, **settings}
    first = int(make_config({**base, "options": {}}).seed)
    return [
        [checked(make_config({**base, "method": m, "seed": seed, "options": per_method[m]})) for m in methods]
        for seed in seeds_of(seeds, first)
    ]


def seeds_of(text: str | None, first: int) -> list[int]:
    """`3`: three seeds from the first on; `0,5,7`: these."""
    try:
        numbers = [int(part) for part in (text or "1").split(",")]
    except ValueError:
        numbers = []
    listed = bool(text and "," in text)
    if not numbers or min(numbers) < (0 if listed else 1) or len(set(numbers)) < len(numbers):
        raise UsageError(f"seeds={text!r}: accepts how many (3) or different seeds with commas between (0,5,7)")
    return numbers if listed else list(range(first, first + numbers[0]))


def _flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Tables inside [options] are those of single methods: {"ditto": {"lam": 1}} becomes {"ditto.lam": 1}."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}
    return flat


def _options_per_method(methods: Sequence[str], given: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`ditto.lam` reaches ditto only; `lam` every method that has it. What reaches nobody is refused."""
    from fedkin.methods import METHODS

    known = {m: {"profile", *(d.name for d in describe(METHODS[m].Options))} for m in methods}
    options: dict[str, dict[str, Any]] = {m: {} for m in methods}
    for name, value in given.items():
        method, dot, key = name.rpartition(".")
        if dot and method not in known:
            raise unknown("method in --set " + name + ",", method, methods)
        takers = [method] if dot else [m for m in methods if key.replace("-", "_") in known[m]]
        if not takers:
            raise unknown("option of " + ", ".join(methods), key, set().union(*known.values()))
        for taker in takers:
            options[taker][key] = value
    return options
