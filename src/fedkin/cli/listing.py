"""What there is: methods, attacks, rules, schedules, data sets, models and partitions, as tables or as JSON."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkin.cli.console import ACCENT, print_json, screen, size, table
from fedkin.compute.layout import Layout
from fedkin.config import Config
from fedkin.core.schedules import SCHEDULES
from fedkin.data import PARTITIONS, SOURCES, Dataset, Source, data_home, make_split
from fedkin.data.pictures import DEBIAN_FASHION
from fedkin.data.sources import how_to_get
from fedkin.data.text import LENGTH, WORDS
from fedkin.errors import FedKinError, UsageError
from fedkin.methods import METHODS, Method
from fedkin.models import MODELS
from fedkin.options import describe
from fedkin.registry import Registry
from fedkin.robust import ATTACKS, RULES, DataAttack, ReplyAttack
from fedkin.rounds import prepare

IMAGE: tuple[tuple[int, ...], int, int] = ((3, 32, 32), 10, 0)  # shape, classes, vocabulary
COMMON = ("lie_about_votes", "warmup")  # options of every attack, of every schedule
RUN_TIME = ("update", "bounds", "passes")  # what the run gives a rule or an attack, not the user
TEXT: tuple[tuple[int, ...], int, int] = ((LENGTH,), 4, WORDS)


# ------------------------------------------------------------ methods


def method_facts(name: str) -> dict[str, Any]:
    kind = METHODS[name]
    options = option_facts(kind.Options)
    return {
        "name": name,
        "about": kind.about,
        "paper": kind.paper,
        "departs": list(kind.departs),
        "shares": kind.shares,
        "private": kind.private,
        "eval_point": kind.eval_point,
        "holdout": kind.holdout,
        "options": options,
        "profiles": {profile: dict(values) for profile, values in kind.profiles.items()},
    }


def option_facts(schema: type[Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": d.name,
            "default": d.default,
            "accepts": d.accepts.replace("text or Rule", "a rule's name"),
            "help": d.help,
        }
        for d in describe(schema)
        if d.name not in RUN_TIME
    ]


def _print_options(options: list[dict[str, Any]], title: str) -> None:
    made = table(f"\n{title}", "option", "default", "accepts", "meaning")
    for o in options:
        default = f"{o['default']:g}" if isinstance(o["default"], float) else str(o["default"]).lower()
        made.add_row(f"[bold]{o['name']}[/]", default, o["accepts"], o["help"])
    screen().print(made if options else "\n[dim]no options of its own[/]\n")


def list_methods(as_json: bool) -> None:
    facts = [method_facts(name) for name in METHODS]
    if as_json:
        return print_json({"methods": facts})
    made = table(
        f"{len(facts)} methods",
        "method",
        "what it does",
        "shared",
        "private",
        "paper",
        caption="fedkin methods NAME: options, ranges, message size",
    )
    for f in facts:
        made.add_row(f"[bold]{f['name']}[/]", f["about"], f["shares"], f["private"], f["paper"])
    screen().print(made)


def show_method(name: str, model: str, as_json: bool) -> None:
    facts = method_facts(name)
    sent = message_size(METHODS[name], name, model)
    if as_json:
        return print_json({**facts, "description": _doc(METHODS[name]), "message": sent})
    out = screen()
    out.print(f"[bold {ACCENT}]{name}[/]  {facts['about']}\n", highlight=False)
    out.print(_doc(METHODS[name]), markup=False)
    _print_options(facts["options"], "Options (--set NAME=VALUE)")
    if facts["departs"]:
        out.print("Where FedKin departs from the paper:", style="bold")
        for text in facts["departs"]:
            out.print(f"- {text}", markup=False, highlight=False)
        out.print()
    for profile, values in facts["profiles"].items():
        if values:
            out.print(f"--set profile={profile}: {', '.join(f'{k}={v}' for k, v in values.items())}", markup=False)
    out.print(
        f"shared     {facts['shares']}\nprivate    {facts['private']}\nevaluated  {facts['eval_point']}\n"
        f"message    {_sent_in_words(sent)}"
    )


def _doc(kind: type[Method]) -> str:
    """The description of a method: that of its class or, one file per paper, of its module."""
    text = kind.__dict__.get("__doc__") or sys.modules[kind.__module__].__doc__ or kind.about
    return inspect.cleandoc(text)


def message_size(kind: type[Method], name: str, model: str) -> dict[str, Any]:
    """Bytes down and up per client in the second round, as counted on the wire of a tiny federation."""
    shape, classes, vocabulary = example_of(model)
    rng = np.random.default_rng(0)
    if vocabulary:
        x = rng.integers(1, vocabulary, (8 * classes, *shape))
    else:
        x = rng.integers(0, 256, (8 * classes, *shape), dtype=np.uint8)
    data = Dataset("example", x, np.arange(8 * classes) % classes, classes, vocabulary=vocabulary)
    split = make_split(data, 4, "iid", 0, validation_share=kind.holdout)
    config = Config(method=name, model=model, clients=4, rounds=3, epochs=1, device="cpu", way="each")
    about = {"model": model, "shape": list(shape), "classes": classes}
    try:
        job = prepare(config, method=kind, data=(data, split))
        job.method.round(job.fed, job.fed.all)
        job.fed.round = 1
        job.method.round(job.fed, job.fed.all)
    except FedKinError as error:
        return {**about, "down": None, "up": None, "note": str(error)}
    last = [e for e in job.fed.exchanges if e.round == 1]
    asked = len(job.fed.all)
    return {**about, "down": sum(e.bytes_down for e in last) // asked, "up": sum(e.bytes_up for e in last) // asked}


def _sent_in_words(sent: dict[str, Any]) -> str:
    if sent["down"] is None:
        return f"not measured: {sent['note']}"
    shape = "x".join(map(str, sent["shape"]))
    return (
        f"{size(sent['down'])} down, {size(sent['up'])} up per client and round "
        f"({sent['model']} on {shape}, {sent['classes']} classes)"
    )


# ------------------------------------------------------------ attacks, rules and schedules


def _part_facts(registry: Registry[Any], name: str) -> dict[str, Any]:
    kind = registry[name]
    text = kind.__dict__.get("__doc__") or ""
    given = text and not text.startswith(f"{kind.__name__}(")  # a dataclass without a docstring gets its signature
    return {
        "name": name,
        "about": kind.about,
        "paper": kind.paper,
        "options": sorted(option_facts(kind), key=lambda o: o["name"] in COMMON),
        "description": inspect.cleandoc(text) if given else kind.about,
    }


def attack_facts(name: str) -> dict[str, Any]:
    kind = ATTACKS[name]
    changes = {"what they train on": DataAttack, "what they send": ReplyAttack}
    return {**_part_facts(ATTACKS, name), "changes": [k for k, base in changes.items() if issubclass(kind, base)]}


def rule_facts(name: str) -> dict[str, Any]:
    return _part_facts(RULES, name)


def list_attacks(as_json: bool) -> None:
    facts = [attack_facts(name) for name in ATTACKS]
    if as_json:
        return print_json({"attacks": facts})
    made = table(
        f"{len(facts)} attacks",
        "attack",
        "what malicious clients do",
        "they change",
        "options",
        "paper",
        caption="--attack NAME or NAME:OPTION=VALUE,...; --attack none: everybody is honest; "
        f"every attack also takes {COMMON[0]}=true, for attackers on a committee; "
        "fedkin attacks NAME: defaults and ranges",
    )
    for f in facts:
        made.add_row(f"[bold]{f['name']}[/]", f["about"], " and ".join(f["changes"]), _option_names(f), f["paper"])
    screen().print(made)


def list_rules(as_json: bool) -> None:
    facts = [rule_facts(name) for name in RULES]
    if as_json:
        return print_json({"rules": facts})
    made = table(
        f"{len(facts)} rules",
        "rule",
        "what the server takes",
        "options",
        "paper",
        caption="--rule NAME or NAME:OPTION=VALUE,...; fedkin rules NAME: defaults and ranges",
    )
    for f in facts:
        made.add_row(f"[bold]{f['name']}[/]", f["about"], _option_names(f), f["paper"])
    screen().print(made)


def show_attack(name: str, as_json: bool) -> None:
    facts = attack_facts(name)
    _show_part("attack", facts, as_json, {"changes": " and ".join(facts["changes"])})


def show_rule(name: str, as_json: bool) -> None:
    _show_part("rule", rule_facts(name), as_json, {})


def list_schedules(as_json: bool) -> None:
    facts = [_part_facts(SCHEDULES, name) for name in SCHEDULES]
    if as_json:
        return print_json({"schedules": facts})
    made = table(
        f"{len(facts)} learning-rate schedules",
        "schedule",
        "what the rate does",
        "options",
        "paper",
        caption=f"--lr-schedule NAME or NAME:OPTION=VALUE,...; every schedule also takes {COMMON[1]}=ROUNDS; "
        "fedkin schedules NAME: defaults and ranges",
    )
    for f in facts:
        made.add_row(f"[bold]{f['name']}[/]", f["about"], _option_names(f), f["paper"])
    screen().print(made)


def show_schedule(name: str, as_json: bool) -> None:
    _show_part("lr-schedule", _part_facts(SCHEDULES, name), as_json, {})


def _show_part(kind: str, facts: dict[str, Any], as_json: bool, more: dict[str, str]) -> None:
    if as_json:
        return print_json(facts)
    name, out = facts["name"], screen()
    out.print(f"[bold {ACCENT}]{name}[/]  {facts['about']}\n")
    out.print(facts["description"], markup=False)
    _print_options(facts["options"], f"Options (--{kind} {name}:OPTION=VALUE,...)")
    for key, value in {**more, "paper": facts["paper"] or "none"}.items():
        out.print(f"{key:<8} {value}", markup=False)


def _option_names(facts: dict[str, Any]) -> str:
    return ", ".join(o["name"] for o in facts["options"] if o["name"] not in COMMON)


# ------------------------------------------------------------ models


def example_of(model: str) -> tuple[tuple[int, ...], int, int]:
    """Shape, classes and vocabulary of data that suit a model: small colour images, else text."""
    make = MODELS[model].make
    for example in (IMAGE, TEXT):
        try:
            with torch.device("meta"):
                make(*example)
            return example
        except UsageError:
            continue
    raise UsageError(f"model {model!r} takes neither images of 3x32x32 nor text")


def model_facts(name: str) -> dict[str, Any]:
    """Sizes from shapes alone: no weights are drawn."""
    entry, (shape, classes, vocabulary) = MODELS[name], example_of(name)
    with torch.device("meta"):
        samples = torch.zeros(2, *shape, dtype=torch.int64 if vocabulary else torch.float32)
        layout = Layout.of(entry.make(shape, classes, vocabulary), example=samples)
    return {
        "name": name,
        "about": entry.about,
        "paper": entry.paper,
        "shape": list(shape),
        "classes": classes,
        "parameters": layout.parameters,
        "body": layout.size("body"),
        "head": layout.size("head"),
        "head_module": layout.head_name,
        "bytes": 4 * layout.size("model"),
        "layers": {s.name: list(s.shape) for s in layout.slots},
    }


def list_models(as_json: bool) -> None:
    facts = [model_facts(name) for name in MODELS]
    if as_json:
        return print_json({"models": facts})
    right = ("parameters", "message")
    made = table(
        f"{len(facts)} models",
        "model",
        "what it is",
        *right,
        "counted on",
        "used by",
        right=right,
        caption="your own nn.Module works too: fk.run(..., model=MyNet())",
    )
    for f in facts:
        made.add_row(
            f"[bold]{f['name']}[/]",
            f["about"],
            f"{f['parameters']:,}",
            size(f["bytes"]),
            f"{'x'.join(map(str, f['shape']))}, {f['classes']} classes",
            f["paper"],
        )
    screen().print(made)


def show_model(name: str, as_json: bool) -> None:
    facts = model_facts(name)
    if as_json:
        return print_json(facts)
    out = screen()
    shape = "x".join(map(str, facts["shape"]))
    out.print(
        f"[bold {ACCENT}]{name}[/]  {facts['about']}\nused by  {facts['paper']}\n"
        f"counted  on {shape} with {facts['classes']} classes: {facts['parameters']:,} parameters, "
        f"{size(facts['bytes'])} to send whole\nhead     {facts['head_module']} "
        f"({facts['head']:,} of {facts['head'] + facts['body']:,} numbers)"
    )
    made = table(None, "tensor", "shape", right=("shape",))
    for layer, of in facts["layers"].items():
        made.add_row(layer, " x ".join(map(str, of)) or "1")
    out.print(made)


# ------------------------------------------------------------ data sets


def dataset_facts(entry: Source, data_dir: str | None) -> dict[str, Any]:
    root = data_home(data_dir)
    return {
        "name": entry.name,
        "kind": entry.kind,
        "shape": list(entry.shape),
        "classes": entry.classes,
        "about": entry.about,
        "citation": entry.citation,
        "files": entry.files,
        "folder": str(root),
        "here": files_are_here(entry, root),
        "download": bool(entry.remotes),
    }


def files_are_here(entry: Source, root: Path) -> bool:
    """Whether a data set's files seem to be there, by their names; nothing is opened."""
    if not entry.files or (entry.package and DEBIAN_FASHION.exists()):
        return True
    listed = re.sub(r" \([^)]*\)|, for .*", "", entry.files)
    patterns = re.sub(r"\{[^}]*\}|\[[^]]*\]", "*", listed)
    return any(
        all(any(root.glob(part.strip().rstrip("/"))) for part in one.split(" and ")) for one in patterns.split(" or ")
    )


def list_datasets(data_dir: str | None, as_json: bool) -> None:
    facts = [dataset_facts(entry, data_dir) for entry in SOURCES.values()]
    if as_json:
        return print_json({"datasets": facts})
    made = table(
        f"{len(facts)} data sets",
        "data set",
        "files",
        "kind",
        "sample",
        "classes",
        "what it is",
        right=("classes",),
        caption=f"looked for in {data_home(data_dir)} (--data-dir, FEDKIN_DATA); your own "
        "data: an .npz file with x and y, or a folder with one file per client",
    )
    for f in facts:
        here = "[green]here[/]" if f["here"] else ("[yellow]download[/]" if f["download"] else "[dim]not found[/]")
        made.add_row(
            f"[bold]{f['name']}[/]", here, f["kind"], "x".join(map(str, f["shape"])), str(f["classes"]), f["about"]
        )
    screen().print(made)


def show_dataset(name: str, data_dir: str | None, as_json: bool) -> None:
    entry = SOURCES[name]
    facts = dataset_facts(entry, data_dir)
    if as_json:
        return print_json(facts)
    out = screen()
    out.print(
        f"[bold {ACCENT}]{name}[/]  {entry.about}\nsample   {'x'.join(map(str, entry.shape))} ({entry.kind}), "
        f"{entry.classes} classes\nsource   {entry.citation}"
    )
    if facts["here"]:
        out.print(f"files    [green]here[/]{f', in {data_home(data_dir)}' if entry.files else ': comes with FedKin'}")
    else:
        out.print(how_to_get(entry, data_home(data_dir), "the files are not there"), markup=False)


# ------------------------------------------------------------ partitions


def list_partitions(as_json: bool) -> None:
    facts = [{"name": n, "form": kind.form, "about": kind.about} for n, kind in PARTITIONS.items()]
    if as_json:
        return print_json({"partitions": facts})
    made = table(f"{len(facts)} partitions", "write", "what it does", caption="fedkin split shows what comes out")
    for f in facts:
        made.add_row(f"[bold]{f['form']}[/]".replace("[:", "\\[:"), f["about"])
    screen().print(made)


def show_partition(name: str, as_json: bool) -> None:
    kind = PARTITIONS[name.split(":")[0]]
    doc = inspect.cleandoc(kind.__doc__ or kind.about)
    if as_json:
        return print_json({"name": name, "form": kind.form, "about": kind.about, "description": doc})
    out = screen()
    out.print(kind.form, style=f"bold {ACCENT}", markup=False)
    out.print(f"{kind.about}\n\n{doc}", markup=False)
