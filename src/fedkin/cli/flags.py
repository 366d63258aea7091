"""Flags, files and `--set` become one `Config`. The flags are read off `Config` itself; nothing is listed twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
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
    check_attack(config.attack)
    check_rule(config.rule)
    resolved = asdict(options_of(kind, config.options, config.method))
    options = {name: resolved.get(name.replace("-", "_"), value) for name, value in config.options.items()}
    return make_config({**config.to_dict(), "options": options})


def check_attack(spec: str) -> None:
    from fedkin.robust import ATTACKS, make_attack
    from fedkin.rounds import named_spec

    if spec == "none":
        return
    name, options = named_spec(spec)
    if name not in ATTACKS:
        raise unknown("attack", name, [*ATTACKS, "none"])
    with _naming(f"--attack {spec}"):
        make_attack(name, options)


def check_rule(spec: str) -> None:
    import torch

    from fedkin.robust import RULES, make_rule
    from fedkin.rounds import named_spec

    name, options = named_spec(spec)
    RULES[name]
    with _naming(f"--rule {spec}"):
        rule = make_rule(name, options)
        rule(torch.eye(4), torch.ones(4), torch.zeros(4))  # one that lacks something says so now, not in round 1


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Puts in front of a refusal what was refused."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None


def listed(text: str, flag: str) -> list[str]:
    """Several attacks or rules in one value. A comma begins the next one, unless what follows it is an option
    (`share=0.5`: an equals sign and no colon before it) of the one before."""
    found: list[str] = []
    for part in (p.strip() for p in text.split(",")):
        if "=" in part and ":" not in part.partition("=")[0]:
            if not found:
                raise UsageError(f"--{flag} {text!r}: {part!r} is an option; a name comes first, as in name:{part}")
            found[-1] += f",{part}"
        elif part in found:
            raise UsageError(f"--{flag} {text!r}: {part!r} is named twice")
        elif part:
            found.append(part)
    if not found:
        raise UsageError(f"--{flag} {text!r}: no name given")
    return found


def grid_configs(
    words: Sequence[str], settings: Mapping[str, Any], sets: Sequence[str], seeds: str | None
) -> list[list[Config]]:
    """The configurations of `fedkin compare`, one list per seed: every method under every attack and rule."""
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
    shared = make_config({**base, "options": {}})
    attacks, rules = listed(shared.attack, "attack"), listed(shared.rule, "rule")
    return [
        [
            checked(make_config({**base, "method": m, "attack": a, "rule": r, "seed": s, "options": per_method[m]}))
            for a, r, m in product(attacks, rules, methods)
        ]
        for s in seeds_of(seeds, shared.seed)
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
