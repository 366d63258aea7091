"""The settings of a cell's runs: put together, checked, said in the fewest words and spelled out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from fedkin.config import Config, make_config
from fedkin.errors import UsageError

NO_DATA = "data not available"


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others on top; the options of each method are merged one by one."""
    options = {m: dict(o) for m, o in first.get("options", {}).items()}
    for method, given in second.get("options", {}).items():
        options[method] = {**options.get(method, {}), **given}
    return {**first, **second, "options": options}


@cache
def checked_config(settings: str) -> tuple[Config, str]:
    """The checked configuration of a run (settings as JSON: many cells share theirs), and what is missing to run it.
    Raises where something is wrong, not missing: an unknown key, a value out of range, an option the method has not."""
    from fedkin.data import SOURCES, parse_partition
    from fedkin.methods import METHODS
    from fedkin.models import MODELS
    from fedkin.robust import ATTACKS, RULES, make_attack, make_rule
    from fedkin.rounds import named_spec

    values = json.loads(settings)
    options = values.pop("options", {})
    method = str(values.get("method", ""))
    if not method:
        raise UsageError("no method")
    if "rule" in values:
        values["rule"] = str(values["rule"]).replace("{malicious}", f"{values.get('malicious', 0.3):g}")
    config = make_config({**values, "options": options.get(method, {})}, given=())  # settings are for whole tables
    parse_partition(config.partition)
    for other, given in options.items():
        if other in METHODS:
            checked_options(other, json.dumps(given, sort_keys=True))
    lacking = [
        f"{what}: {name}"
        for what, name, registry in (
            (NO_DATA, config.data, SOURCES),
            ("method not there yet", method, METHODS),
            ("model not there yet", config.model, MODELS),
            ("attack not there yet", named_spec(config.attack)[0], {**ATTACKS, "none": None}),
            ("rule not there yet", named_spec(config.rule)[0], RULES),
        )
        if name is not None and name not in registry
    ]
    if lacking:
        return config, "; ".join(lacking)
    if config.attack != "none":
        make_attack(*named_spec(config.attack))
    make_rule(*named_spec(config.rule))
    return canonical(config), ""


@cache
def checked_options(method: str, given: str) -> dict[str, Any]:
    from fedkin.methods import METHODS, options_of

    return asdict(options_of(METHODS[method], json.loads(given), method))


def spelled_out(config: Config) -> dict[str, Any]:
    """All settings and options of a run by name, with what the method itself decides."""
    from fedkin.methods import METHODS

    options = checked_options(config.method, json.dumps(config.options, sort_keys=True))
    point = METHODS[config.method].eval_point if config.eval_point == "auto" else config.eval_point
    return {**config.to_dict(), **options, "options": None, "eval_point": point}


def canonical(config: Config) -> Config:
    """The same run in the fewest words, so that cells which share a run also share its identity: options only where
    they differ from the method's own, nothing about attackers where there are none."""
    given = {k.replace("-", "_"): v for k, v in config.options.items()}
    profile = {"profile": given["profile"]} if given.get("profile", "paper") != "paper" else {}
    usual, resolved = (checked_options(config.method, json.dumps(o, sort_keys=True)) for o in (profile, given))
    options = {**profile, **{k: v for k, v in resolved.items() if v != usual[k]}}
    idle: dict[str, Any] = {"malicious": 0.3, "knowledge": "full", "attackers": "fixed"}
    return replace(config, options=options, **(idle if config.attack == "none" else {}))
