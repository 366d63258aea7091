"""A setting that is given is applied or refused: one table for flags, files, keyword arguments and grids alike.

A configuration knows what somebody asked for (`Config.asked`). Here stands when each setting would change nothing,
and what to do instead; where a run is prepared, what was asked for and is idle is refused. In a grid a setting is for
those runs that it changes: in the others it is left out, which is said, and only what changes no run is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fedkin.compute.layout import Layout
from fedkin.config import LATER, Config, is_folder
from fedkin.core.schedules import Factors, make_schedule
from fedkin.data import SOURCES, TABLES, Split, is_image_folder, parse_partition
from fedkin.errors import FedKinError, UsageError
from fedkin.methods import Method
from fedkin.models import MODELS
from fedkin.options import named_spec
from fedkin.robust import Attack

Reasons = Mapping[str, str]

OFF: Mapping[str, Any] = {"rule": "mean", "init": "seed", "malicious": 0, "momentum": 0, "checkpoint_every": 0, **LATER}
"""Values that ask for nothing; so does None."""
OF_TABLES = ("label", "categories", "impute", "scale")
OF_A_SPLIT = ("samples_per_client", "quantity_skew", "test_share", "validation_share")


def refuse(config: Config, reasons: Reasons) -> None:
    """Raises for the first setting that was asked for and has a reason against it."""
    for name, value in asked(config).items():
        if name in reasons:
            raise UsageError(f"{name}={value!r} would change nothing: {reasons[name]}")


def asked(config: Config) -> dict[str, Any]:
    """What was given and asks for something."""
    found = {name: getattr(config, name) for name in sorted(config.asked) if name != "options"}
    return {name: value for name, value in found.items() if value is not None and value != OFF.get(name)}


def idle(config: Config, method_class: type[Method], options: Any, attack: Attack | None) -> dict[str, str]:
    """What changes nothing whatever the data and the network are."""
    found = dict(method_class.unused(options))
    found.pop("head", None)  # of_network: without a linear layer a head has to be named for any method
    if attack is None:
        nobody = "everybody is honest; say what the malicious clients do, for example attack=sf"
        found |= dict.fromkeys(("malicious", "knowledge", "attackers"), nobody)
    else:
        if config.attackers not in ("fixed", "redrawn"):
            found["malicious"] = f"attackers={config.attackers} says who is malicious; give one of the two"
        if not attack.uses_knowledge:
            found["knowledge"] = f"attack {config.attack} does not look at anybody's update"
    if Factors.of(make_schedule(*named_spec(config.lr_schedule)), config.lr, config.rounds) is None:
        found["lr_schedule"] = f"in {config.rounds} rounds the rate stays the same"
    if config.patience is None:
        found["min_gain"] = "nothing stops early; say with patience when to, for example patience=5"
    if config.shift is None:
        found["severity"] = "no corruption is asked for; name one, for example shift=fog"
    if not _needs_files(config.data):
        found["data_dir"] = f"data={config.data} does not lie there; leave it out"
    return found


def _needs_files(data: str) -> bool:
    if is_folder(data) or is_image_folder(data) or data.startswith("npz:") or data.endswith((".npz", *TABLES)):
        return False
    return data in SOURCES and bool(SOURCES[data].files)


def of_split(config: Config, split: Split) -> dict[str, str]:
    """What the data themselves decide."""
    found = dict(split.unused)
    if not split.partition:
        found |= dict.fromkeys(OF_A_SPLIT, "who has which samples is given as a split")
    if _written(config.partition) != split.partition:
        found["partition"] = "every client brings its own samples, so nothing is dealt; leave it out"
    if config.clients != split.clients:
        found["clients"] = f"the data are of {split.clients} clients; leave it out"
    return found


def _written(partition: str) -> str:
    try:
        return str(parse_partition(partition))
    except FedKinError:  # an object of the user's own, known by what it prints
        return partition


def of_network(
    config: Config, layout: Layout, network: nn.Module, brought: bool, unused: Reasons, example: Tensor
) -> dict[str, str]:
    """What the network decides. `brought`: it is an object, not a name. `example`: some inputs of it."""
    named = not brought and (config.model is None or MODELS[config.model].given is None)
    found = {"init": "a named network is always drawn from the seed; leave it out"} if named else {}
    if brought:
        found["model"] = "the network is given as an object; give one of the two"
    if not layout.size("buffers"):
        found["buffers"] = f"{type(network).__name__} keeps no statistics (no BatchNorm); leave it out"
    if "head" in unused:
        try:
            Layout.of(network, None, config.buffers, example=example)
            found["head"] = unused["head"]
        except UsageError:  # no head can be found: naming one is what lets the run begin
            pass
    return found


def settled(configs: Sequence[Config], reasons: Sequence[Reasons]) -> tuple[list[Config], list[str]]:
    """The runs of a grid, each without what would change nothing in it, and a sentence about that. A setting that
    changes no run stays where it is, to be refused."""
    used = {name for config, found in zip(configs, reasons, strict=True) for name in asked(config) if name not in found}
    made, said = [], dict[tuple[str, str], list[str]]()
    for config, found in zip(configs, reasons, strict=True):
        drop = [name for name in asked(config) if name in found and name in used]
        made.append(config.without(drop) if drop else config)
        for name in drop:
            if not (config.attack == "none" and name in ("malicious", "knowledge", "attackers")):
                said.setdefault((name, found[name]), []).append(config.method)
    sentences = [
        f"{', '.join(dict.fromkeys(methods))}: {name} would change nothing ({reason}); run without it"
        for (name, reason), methods in said.items()
    ]
    return made, sentences


def as_applied(config: Config, split: Split) -> Config:
    """What was really applied: how many clients there are, and how they came by their samples."""
    share = config.validation_share if split.partition else None
    return replace(config, clients=split.clients, partition=split.partition or "own", validation_share=share)
