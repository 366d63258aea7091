"""Flags, files and `--set` become one `Config`. The flags are read off `Config` itself; nothing is listed twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from fedkin.cli.names import check_name, completing, run_names
from fedkin.cli.waiting import load
from fedkin.config import GROUPS, SAME_POINT, Config, axis_of, make_config, read_toml
from fedkin.errors import UsageError, unknown
from fedkin.options import Described, describe

NOT_FLAGS = ("method", "options")  # the argument of `run`, and `--set`
METAVARS = {"a whole number": "N", "a number": "X", "text": "TEXT"}
TABLES = (".csv", ".parquet")
YES_OR_NO = "true or false"
SHORTER = {"start_from": ("--from",)}
"""Other names of flags, where a setting cannot be called so in Python."""
NAMED: dict[str, tuple[str, ...]] = {
    "method": ("method",),
    "data": ("data set",),
    "partition": ("partition",),
    "task": ("task",),
    "model": ("model",),
    "lr_schedule": ("learning-rate schedule",),
    "attack": ("attack", "none"),
    "rule": ("rule",),
}
"""Settings that are names: of which kind, and what is right beside those that are registered."""


def with_settings(only: Collection[str] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one flag for each field of `Config` (or for those in `only`).

    The command receives what was given, and nothing else, as its argument `settings`."""
    described = [d for d in describe(Config) if d.name not in NOT_FLAGS and (only is None or d.name in only)]
    described.sort(key=lambda d: GROUPS.index(d.group))

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
        *([f"{name}/--no-{name[2:]}"] if yes_or_no else [*SHORTER.get(field.name, ()), name]),
        help=_help(field),
        show_default=False,
        rich_help_panel=field.group,
        metavar=None if yes_or_no else _metavar(field),
        autocompletion=_completion(field),
    )
    kind = bool if yes_or_no else str
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info]
    )


def _completion(field: Described) -> Callable[..., list[str]] | None:
    """What a shell offers as values: names, or the words that a setting accepts."""
    if field.name == "start_from":
        return run_names
    if field.name in NAMED:
        return completing(*NAMED[field.name])
    words = field.type.split(", ") if ", " in field.type else []
    return (lambda incomplete: [w for w in words if w.startswith(incomplete)]) if words else None


def _metavar(field: Described) -> str:
    first = field.type.split(" or ")[0]
    return METAVARS.get(first, first.replace(", ", "|"))


def _help(field: Described) -> str:
    """The help of an option, with its default and, for numbers, its range."""
    notes = [] if field.default is None else [f"default: {str(field.default).lower()}"]
    if "number" in field.type:
        notes.append(field.accepts)
    return f"{field.help} [{'; '.join(notes)}]".replace("[", "\\[") if notes else field.help


def is_file(word: str) -> bool:
    return word.endswith(".toml")


def from_file(path: str) -> dict[str, Any]:
    """The settings in a TOML file, checked on their own so that an error names the file."""
    values = read_toml(path)
    if "grid" in values or "cell" in values:
        raise UsageError(f"{path} describes several runs ([grid], [[cell]]): fedkin compare {path}")
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


def run_config_of(
    target: str,
    settings: Mapping[str, Any],
    sets: Sequence[str],
    check: Callable[[Config], object] = lambda config: None,
) -> Config:
    """The configuration of `fedkin run TARGET`: a method's name or a TOML file, with flags on top. `check` sees it as
    it was said."""
    settings = with_own_network(settings)
    values: dict[str, Any] = from_file(target) if is_file(target) else {"method": target}
    own = assignments(sets)
    given = {**values.get("options", {}), **own}
    with _several(own, "fedkin compare METHOD --grid"):
        said = make_config({**values, **settings, "options": given})
        check(said)
        return checked(said)


def with_own_network(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The flags, where --model FILE.py:NAME has run the file. A settings file can name no code: there the network's
    name works beside --plugin FILE.py."""
    own = settings.get("model")
    if own is None or ".py" not in own:
        return dict(settings)
    from fedkin.plugins import as_model, names_network

    return {**settings, "model": as_model(own)} if names_network(own) else dict(settings)


def checked(config: Config) -> Config:
    """Refuses now what would otherwise fail only after the data are loaded; options get their right types."""
    check_names(config)
    load()
    from fedkin.data import parse_partition
    from fedkin.methods import METHODS
    from fedkin.methods.base import given_options

    kind = METHODS[config.method]
    parse_partition(config.partition)
    check_attack(config.attack)
    check_rule(config.rule)
    check_rates(config)
    if config.start_from is not None:
        from fedkin.runs import origin

        config = origin.resolved(config)
    try:
        options = given_options(kind, config.options, config.method)
    except UsageError as error:
        whose = f"{config.method}'s option " if str(error).partition("=")[0] in config.options else ""
        raise UsageError(f"{whose}{error}") from None
    return replace(config, options=options)


def check_names(config: Config) -> None:
    """Refuses wrong names at once: what follows imports torch, which takes seconds."""
    for setting, (kind, *others) in NAMED.items():
        if setting == "model" and ".py:" in (config.model or ""):
            load()
            from fedkin.models import MODELS

            MODELS[str(config.model)]
        elif setting != "data" or not _is_path(config.data):
            if setting == "data" and (config.data.endswith(TABLES) or "/" in config.data):
                raise UsageError(f"--data {config.data}: no such file or folder")
            check_name(kind, getattr(config, setting), *others)


def _is_path(data: str) -> bool:
    if data.endswith(".npz") or data.startswith("npz:"):
        return True
    try:
        return Path(data).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # a name that no file can have
        return False


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
    from fedkin.robust import RULES, make_rule
    from fedkin.rounds import named_spec

    name, options = named_spec(spec)
    RULES[name]
    with _naming(f"--rule {spec}"):
        make_rule(name, options)


def check_rates(config: Config) -> None:
    from fedkin.core.schedules import parse_factors
    from fedkin.rounds.choices import factors_of

    with _naming(f"--lr-schedule {config.lr_schedule}"):
        factors_of(config)
    parse_factors(config.lr_factors)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Puts in front of a refusal what was refused."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{what}: {error}") from None


@contextmanager
def _several(given: Mapping[str, str], grid: str) -> Iterator[None]:
    """Adds to a refusal of several values in one --set what takes them."""
    try:
        yield
    except UsageError as error:
        for name, value in given.items():
            if "," in value and value in str(error):
                raise UsageError(f"{error}; for several values: {grid} {name}={value}") from None
        raise


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
    words: Sequence[str],
    settings: Mapping[str, Any],
    sets: Sequence[str],
    seeds: str | None,
    grid: Sequence[str] = (),
    say: Callable[[str], object] = lambda sentence: None,
) -> list[Config]:
    """The configurations of `fedkin compare`, seed by seed: every method under every attack, rule and setting.

    Flags win over what the files say, lists included. Methods are evaluated at one point unless told otherwise. `say`
    hears which settings some runs go without."""
    settings = with_own_network(settings)
    methods = [word for word in words if not is_file(word)]
    repeated = [m for i, m in enumerate(methods) if m in methods[:i]]
    if repeated:
        raise UsageError(f"method {repeated[0]!r} is named twice")
    base: dict[str, Any] = {"eval_point": SAME_POINT}
    axes: dict[str, Any] = {}
    cells: list[dict[str, Any]] = []
    for path in (word for word in words if is_file(word)):
        values, own, more = grid_file(path)
        base |= values
        axes |= own
        cells += more
    by_hand = axes_of(grid)
    given = assignments(sets)
    won = {*settings, *by_hand, *(f"options.{name}" for name in given)}
    shared = make_config({**base, **settings, "options": {}})
    fixed: dict[str, Any] = {"attack": listed(shared.attack, "attack"), "rule": listed(shared.rule, "rule")}
    for method, attack, rule in zip_longest(methods, fixed["attack"], fixed["rule"]):
        check_names(replace(shared, method=method or shared.method, attack=attack or "none", rule=rule or "mean"))
    load()
    from fedkin.sweep.expand import expand, flat_options, named_twice

    for name in named_twice(by_hand, {*settings, *(f"options.{name}" for name in given)}):
        word = name.removeprefix("options.")
        raise UsageError(
            f"{word} is given twice: by itself (--{'set' if word != name else name}), and as --grid {word}"
        )
    first = {"seed": seeds_of(seeds, shared.seed)} if seeds is not None else {}
    blocks = []
    if methods or axes or not cells:
        chosen = methods or axes.get("method") or ([base["method"]] if "method" in base else [])
        if not chosen:
            raise UsageError("no method to compare: give some names, for example fedkin compare fedavg ditto")
        kept = {k: v for k, v in axes.items() if k not in won}
        blocks.append({**fixed, **kept, **by_hand, "method": chosen, **first})
    for cell in cells:
        kept = {**{k: v for k, v in axes.items() if k == "seed"}, **cell}
        blocks.append({**fixed, **{k: v for k, v in kept.items() if k not in won}, **by_hand, **first})
    options = {**flat_options(base.get("options", {})), **given}
    with _several(given, "--grid"):
        return expand({**base, **settings, "options": options}, blocks, checked, say)


def grid_file(path: str) -> tuple[dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """A TOML file's settings, the lists in its table [grid], and its [[cell]] tables; each checked on its own."""
    values = read_toml(path)
    grid, cells = values.pop("grid", {}), values.pop("cell", [])
    with _naming(path):
        if not isinstance(grid, Mapping):
            raise UsageError(f"grid={grid!r}: a table, [grid]")
        if not isinstance(cells, list) or not all(isinstance(c, Mapping) for c in cells):
            raise UsageError("cell: a list of tables, each [[cell]]")
        make_config(values)
        return values, _dotted(grid), [_dotted(c) for c in cells]


def _dotted(table: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a grid; a table `options` inside is written out as options.NAME."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            if key.partition(".")[0] != "options":
                raise UsageError(f"{key}: a value or a list of values, not a table")
            flat |= _dotted({f"{key}.{k}": v for k, v in value.items()})
        else:
            flat[key if key.startswith("options.") else key.replace("-", "_")] = value
    return flat


def axes_of(words: Sequence[str]) -> dict[str, list[str]]:
    """`--grid lr=0.01,0.1` as lists; what is no setting is an option of a method: `--grid ditto.lam=0.1,1`."""
    axes: dict[str, list[str]] = {}
    for word in words:
        name, equals, values = (part.strip() for part in word.partition("="))
        if not equals or not name or not values:
            raise UsageError(f"--grid {word!r}: write NAME=VALUE,VALUE, for example --grid lr=0.01,0.1")
        key = axis_of(name)
        axes[key] = listed(values, f"grid {name}") if key in ("attack", "rule", "lr_schedule") else values.split(",")
    return axes


def seeds_of(text: str | None, first: int) -> list[int]:
    """`3`: three seeds from the first on; `0,5,7`: these; `5,`: this one."""
    try:
        numbers = [int(part) for part in (text or "1").removesuffix(",").split(",")]
    except ValueError:
        numbers = []
    listed = bool(text and "," in text)
    if not numbers or min(numbers) < (0 if listed else 1) or len(set(numbers)) < len(numbers):
        raise UsageError(f"seeds={text!r}: accepts how many (3) or which, with commas (0,5,7; 5, is seed 5 alone)")
    return numbers if listed else list(range(first, first + numbers[0]))
