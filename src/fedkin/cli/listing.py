"""What there is: methods, attacks, rules, schedules, data sets, models and partitions, as tables or as JSON."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkin.cli.console import ACCENT, print_json, screen, table
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
from fedkin.rounds.words import size

IMAGE: tuple[tuple[int, ...], int, int] = ((3, 32, 32), 10, 0)  # shape, classes, vocabulary
COMMON = ("lie_about_votes", "warmup")  # options of every attack, of every schedule
RUN_TIME = ("update", "bounds", "passes")  # what the run gives a rule or an attack, not the user
TEXT: tuple[tuple[int, ...], int, int] = ((LENGTH,), 4, WORDS)


class Listing:
    """What there is of a kind: all of it as a table, or one by name."""

    plural: str  # as JSON calls the list
    title: str
    columns: tuple[str, ...]
    right: tuple[str, ...] = ()
    caption: str
    names: Mapping[str, object]

    def facts(self, name: str) -> dict[str, Any]:
        """One as JSON has it in the list."""
        raise NotImplementedError

    def row(self, facts: dict[str, Any]) -> tuple[str, ...]:
        """What stands in the table behind the name."""
        raise NotImplementedError

    def whole(self, name: str) -> dict[str, Any]:
        """One alone as JSON has it."""
        return self.facts(name)

    def show(self, facts: dict[str, Any]) -> None:
        """One alone for people; `facts` as `whole` has them."""
        raise NotImplementedError

    def present(self, name: str | None, as_json: bool) -> None:
        """All of it, or one by name, for a program or for people."""
        if name is not None:
            facts = self.whole(name)
            return print_json(facts) if as_json else self.show(facts)
        every = [self.facts(n) for n in self.names]
        if as_json:
            return print_json({self.plural: every})
        made = table(f"{len(every)} {self.title}", *self.columns, right=self.right, caption=self.caption)
        for facts in every:
            shown = facts.get("form", facts["name"]).replace("[:", "\\[:")
            made.add_row(f"[bold]{shown}[/]", *self.row(facts))
        screen().print(made)


def _heading(facts: dict[str, Any], *lines: str) -> None:
    screen().print("\n".join([f"[bold {ACCENT}]{facts['name']}[/]  {facts['about']}", *lines]))


def _shape(facts: dict[str, Any]) -> str:
    return "x".join(map(str, facts["shape"]))


# ------------------------------------------------------------ methods


class Methods(Listing):
    """`model`: the one whose message size is shown."""

    plural = title = "methods"
    columns = ("method", "what it does", "shared", "private", "paper")
    caption = "fedkin methods NAME: options, ranges, message size"
    names = METHODS

    def __init__(self, model: str) -> None:
        self.model = model

    def facts(self, name: str) -> dict[str, Any]:
        kind = METHODS[name]
        return {
            "name": name,
            "about": kind.about,
            "paper": kind.paper,
            "departs": list(kind.departs),
            "shares": kind.shares,
            "private": kind.private,
            "eval_point": kind.eval_point,
            "holdout": kind.holdout,
            "options": option_facts(kind.Options),
            "profiles": {profile: dict(values) for profile, values in kind.profiles.items()},
        }

    def row(self, facts: dict[str, Any]) -> tuple[str, ...]:
        return facts["about"], facts["shares"], facts["private"], facts["paper"]

    def whole(self, name: str) -> dict[str, Any]:
        facts = self.facts(name)
        kind = METHODS[name]
        return {**facts, "description": _doc(kind), "message": message_size(kind, name, self.model)}

    def show(self, facts: dict[str, Any]) -> None:
        out = screen()
        _heading(facts, "")
        if facts["description"] != facts["about"]:
            out.print(facts["description"], markup=False)
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
            f"message    {_sent_in_words(facts['message'])}"
        )


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


def _doc(kind: type[Method]) -> str:
    """The description of a method, from where its paper is named: of the class there or, one file per paper, of its
    module."""
    home = paper_home(kind)
    text = home.__dict__.get("__doc__") or sys.modules[home.__module__].__doc__ or kind.about
    return inspect.cleandoc(text)


def paper_home(kind: type[Method]) -> type:
    """The class that follows the paper; what is registered may add options of its tables to it."""
    return next((c for c in kind.__mro__ if "paper" in vars(c) and c.__module__ != Method.__module__), kind)


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
    return (
        f"{size(sent['down'])} down, {size(sent['up'])} up per client and round "
        f"({sent['model']} on {_shape(sent)}, {sent['classes']} classes)"
    )


# ------------------------------------------------------------ attacks, rules and schedules


class Parts(Listing):
    """What runs are put together from by a flag: NAME or NAME:OPTION=VALUE,..."""

    flag: str
    hint = ""  # in the caption, after how the flag is written
    names: Registry[Any]

    @property
    def caption(self) -> str:  # type: ignore[override]
        written = f"--{self.flag} NAME or NAME:OPTION=VALUE,..."
        return f"{written}; {self.hint}fedkin {self.plural} NAME: defaults and ranges"

    def facts(self, name: str) -> dict[str, Any]:
        kind = self.names[name]
        text = kind.__dict__.get("__doc__") or ""
        given = text and not text.startswith(f"{kind.__name__}(")  # a dataclass without a docstring gets its signature
        return {
            "name": name,
            "about": kind.about,
            "paper": kind.paper,
            "options": sorted(option_facts(kind), key=lambda o: o["name"] in COMMON),
            "description": inspect.cleandoc(text) if given else kind.about,
        }

    def row(self, facts: dict[str, Any]) -> tuple[str, ...]:
        options = ", ".join(o["name"] for o in facts["options"] if o["name"] not in COMMON)
        changes = [" and ".join(facts["changes"])] if "changes" in facts else []
        return facts["about"], *changes, options, facts["paper"]

    def show(self, facts: dict[str, Any]) -> None:
        out = screen()
        _heading(facts, "")
        out.print(facts["description"], markup=False)
        _print_options(facts["options"], f"Options (--{self.flag} {facts['name']}:OPTION=VALUE,...)")
        changes = {"changes": " and ".join(facts["changes"])} if "changes" in facts else {}
        for key, value in {**changes, **({"paper": facts["paper"]} if facts["paper"] else {})}.items():
            out.print(f"{key:<8} {value}", markup=False)


class Attacks(Parts):
    plural = title = "attacks"
    columns = ("attack", "what malicious clients do", "they change", "options", "paper")
    flag, names = "attack", ATTACKS
    hint = (
        f"--attack none: everybody is honest; every attack also takes {COMMON[0]}=true, for attackers on a committee; "
    )

    def facts(self, name: str) -> dict[str, Any]:
        found, changes = super().facts(name), {"what they train on": DataAttack, "what they send": ReplyAttack}
        return {**found, "changes": [k for k, base in changes.items() if issubclass(ATTACKS[name], base)]}


class Rules(Parts):
    plural = title = "rules"
    columns = ("rule", "what the server takes", "options", "paper")
    flag, names = "rule", RULES


class Schedules(Parts):
    plural, title = "schedules", "learning-rate schedules"
    columns = ("schedule", "what the rate does", "options", "paper")
    flag, names = "lr-schedule", SCHEDULES
    hint = f"every schedule also takes {COMMON[1]}=ROUNDS; "


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


class Models(Listing):
    """Sizes come from shapes alone: no weights are drawn."""

    plural = title = "models"
    columns = ("model", "what it is", "parameters", "message", "counted on", "used by")
    right = ("parameters", "message")
    caption = "your own nn.Module works too: fk.run(..., model=MyNet())"
    names = MODELS

    def facts(self, name: str) -> dict[str, Any]:
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

    def row(self, facts: dict[str, Any]) -> tuple[str, ...]:
        counted = f"{_shape(facts)}, {facts['classes']} classes"
        return facts["about"], f"{facts['parameters']:,}", size(facts["bytes"]), counted, facts["paper"]

    def show(self, facts: dict[str, Any]) -> None:
        _heading(
            facts,
            f"used by  {facts['paper']}",
            f"counted  on {_shape(facts)} with {facts['classes']} classes: {facts['parameters']:,} parameters, "
            f"{size(facts['bytes'])} to send whole",
            f"head     {facts['head_module']} ({facts['head']:,} of {facts['head'] + facts['body']:,} numbers)",
        )
        made = table(None, "tensor", "shape", right=("shape",))
        for layer, of in facts["layers"].items():
            made.add_row(layer, " x ".join(map(str, of)) or "1")
        screen().print(made)


# ------------------------------------------------------------ data sets


class DataSets(Listing):
    """`data_dir`: where to look for the files."""

    plural, title = "datasets", "data sets"
    columns = ("data set", "files", "kind", "sample", "classes", "what it is")
    right = ("classes",)
    names = SOURCES

    def __init__(self, data_dir: str | None) -> None:
        self.root = data_home(data_dir)
        self.caption = (
            f"looked for in {self.root} (--data-dir, FEDKIN_DATA); your own "
            "data: an .npz file with x and y, or a folder with one file per client"
        )

    def facts(self, name: str) -> dict[str, Any]:
        entry = SOURCES[name]
        return {
            "name": entry.name,
            "kind": entry.kind,
            "shape": list(entry.shape),
            "classes": entry.classes,
            "targets": entry.targets,
            "about": entry.about,
            "citation": entry.citation,
            "files": entry.files,
            "folder": str(self.root),
            "here": files_are_here(entry, self.root),
            "download": bool(entry.remotes),
        }

    def row(self, facts: dict[str, Any]) -> tuple[str, ...]:
        here = (
            "[green]here[/]" if facts["here"] else "[yellow]download[/]" if facts["download"] else "[dim]not found[/]"
        )
        return here, facts["kind"], _shape(facts), _targets(facts), facts["about"]

    def show(self, facts: dict[str, Any]) -> None:
        _heading(
            facts,
            f"sample   {_shape(facts)} ({facts['kind']}), {_targets(facts, ' classes')}",
            f"source   {facts['citation']}",
        )
        if facts["here"]:
            screen().print(f"files    [green]here[/]{f', in {self.root}' if facts['files'] else ': comes with FedKin'}")
        else:
            missing = how_to_get(SOURCES[facts["name"]], self.root, "the files are not there")
            screen().print(missing, markup=False)


def _targets(facts: dict[str, Any], classes: str = "") -> str:
    """How many classes there are, or of what kind the targets are."""
    return f"{facts['classes']}{classes}" if facts["targets"] == "classes" else str(facts["targets"])


def files_are_here(entry: Source, root: Path) -> bool:
    """Whether a data set's files seem to be there, by their names; nothing is opened."""
    if not entry.files or (entry.package and DEBIAN_FASHION.exists()):
        return True
    listed = re.sub(r" \([^)]*\)|, for .*", "", entry.files)
    patterns = re.sub(r"\{[^}]*\}|\[[^]]*\]", "*", listed)
    return any(
        all(any(root.glob(part.strip().rstrip("/"))) for part in one.split(" and ")) for one in patterns.split(" or ")
    )


# ------------------------------------------------------------ partitions


class Partitions(Listing):
    plural = title = "partitions"
    columns = ("write", "what it does")
    caption = "fedkin split shows what comes out"
    names = PARTITIONS

    def facts(self, name: str) -> dict[str, Any]:
        kind = PARTITIONS[name.split(":")[0]]
        return {"name": name, "form": kind.form, "about": kind.about}

    def row(self, facts: dict[str, Any]) -> tuple[str, ...]:
        return (facts["about"],)

    def whole(self, name: str) -> dict[str, Any]:
        facts = self.facts(name)
        kind = PARTITIONS[name.split(":")[0]]
        return {**facts, "description": inspect.cleandoc(kind.__doc__ or kind.about)}

    def show(self, facts: dict[str, Any]) -> None:
        screen().print(facts["form"], style=f"bold {ACCENT}", markup=False)
        screen().print(f"{facts['about']}\n\n{facts['description']}", markup=False)
