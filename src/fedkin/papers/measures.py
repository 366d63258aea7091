"""What a run gave, in the few numbers that tables ask for, and how each table's number is read off them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from fedkin.core import notes as kinds
from fedkin.errors import DataError, unknown

LATE = 21  # collaborator sets count from this round on: before, all heads are still much alike


@dataclass(frozen=True)
class Point:
    """A run after an evaluated round."""

    round: int
    final: bool
    micro: float
    macro: float
    train_loss: float
    bytes_down: int
    seconds: float
    worst: float = float("nan")  # accuracy of the worst-served tenth of the clients


@dataclass(frozen=True)
class Measures:
    """What a finished run gave, as a line of the ledger has it. `facts`: what else was measured (detection, acceptance,
    collaborators), by metric."""

    identity: str
    config: Mapping[str, Any]
    points: tuple[Point, ...]
    facts: Mapping[str, float]
    seconds: float
    device: str
    precision: str
    eval_point: str
    split: str
    commit: str
    run: str | None = None
    wall: float = float("nan")  # from asking for the run to its result
    alone: bool = True  # on its device, so that its times are its own

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Any) -> Measures:
        """What `to_dict` gave, read back; anything else is refused."""
        try:
            points = tuple(
                Point(
                    int(p["round"]),
                    bool(p["final"]),
                    _number(p["micro"]),
                    _number(p["macro"]),
                    _number(p["train_loss"]),
                    int(p["bytes_down"]),
                    _number(p["seconds"]),
                    _number(p.get("worst")),
                )
                for p in raw["points"]
            )
            facts = {str(k): _number(v) for k, v in raw["facts"].items()}
            texts = {k: str(raw[k]) for k in ("identity", "device", "precision", "eval_point", "split", "commit")}
            if not points or not isinstance(raw["config"], dict):
                raise ValueError("no points")
            run = None if raw.get("run") is None else str(raw["run"])
            return cls(
                config=raw["config"],
                points=points,
                facts=facts,
                seconds=_number(raw["seconds"]),
                run=run,
                wall=_number(raw.get("wall")),
                alone=raw.get("alone", True) is True,
                **texts,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"not the record of a run: {error}") from None


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


# ------------------------------------------------------------ metrics


@dataclass(frozen=True)
class Metric:
    """`unit` "%": points of a percentage, compared to two points; else a quantity, compared to a fifth of it."""

    read: Callable[[Measures, str], float]
    unit: str
    about: str
    lower: bool = False  # less is better
    judged: bool = True  # of models: it depends on when, and by which of its models, a client is judged
    timed: bool = False  # means something only if the run had its device to itself


METRICS: dict[str, Metric] = {}


def metric(
    name: str, unit: str, about: str, lower: bool = False, judged: bool = True, timed: bool = False
) -> Callable[[Callable[[Measures, str], float]], Callable[[Measures, str], float]]:
    def add(read: Callable[[Measures, str], float]) -> Callable[[Measures, str], float]:
        METRICS[name] = Metric(read, unit, about, lower, judged, timed)
        return read

    return add


def metric_of(text: Any) -> Metric:
    """By name; one with an argument is written name:argument, as in rounds_to:80."""
    name, _, argument = str(text).partition(":")
    if name not in METRICS:
        raise DataError(str(unknown("metric", name, METRICS)))
    if (name == "rounds_to") != bool(argument):
        raise DataError(f"metric {text!r}: rounds_to takes the accuracy to be reached (rounds_to:80), others nothing")
    if argument:
        try:
            float(argument)
        except ValueError:
            raise DataError(f"metric {text!r}: {argument!r} is no number") from None
    return METRICS[name]


def value_of(outcome: Measures, text: str) -> float:
    found = metric_of(text)
    return found.read(outcome, text.partition(":")[2]) if outcome.alone or not found.timed else float("nan")


@metric("micro", "%", "accuracy over all test samples, last round")
def _micro(o: Measures, _: str) -> float:
    return o.points[-1].micro


@metric("macro", "%", "mean of the clients' accuracies, last round")
def _macro(o: Measures, _: str) -> float:
    return o.points[-1].macro


@metric("worst_decile", "%", "mean of the worst-served tenth of the clients, last round")
def _worst_decile(o: Measures, _: str) -> float:
    return o.points[-1].worst


@metric("best_micro", "%", "accuracy over all test samples, best round")
def _best_micro(o: Measures, _: str) -> float:
    return max((p.micro for p in o.points if not math.isnan(p.micro)), default=float("nan"))


@metric("best_untuned", "%", "accuracy over all test samples, best round before the tuning at the end")
def _best_untuned(o: Measures, _: str) -> float:
    return max((p.micro for p in o.points if not p.final and not math.isnan(p.micro)), default=float("nan"))


@metric("best_macro", "%", "mean of the clients' accuracies, best round")
def _best_macro(o: Measures, _: str) -> float:
    return max((p.macro for p in o.points if not math.isnan(p.macro)), default=float("nan"))


@metric("rounds_to", "rounds", "first evaluated round at this accuracy (micro)", lower=True)
def _rounds_to(o: Measures, target: str) -> float:
    return next((float(p.round) for p in o.points if p.micro >= float(target)), float("nan"))


@metric("seconds", "s", "seconds per round, without the first evaluated ones", lower=True, judged=False, timed=True)
def _seconds(o: Measures, _: str) -> float:
    points = [p for p in o.points if not p.final]
    if len(points) < 2:
        return points[-1].seconds / points[-1].round if points else float("nan")
    return (points[-1].seconds - points[0].seconds) / (points[-1].round - points[0].round)


@metric("down_mib", "MiB", "MiB sent to the clients per round", lower=True, judged=False)
def _down(o: Measures, _: str) -> float:
    points = [p for p in o.points if not p.final]
    return points[-1].bytes_down / points[-1].round / 2**20 if points else float("nan")


@metric("train_loss", "loss", "training loss, last round", lower=True, judged=False)
def _train_loss(o: Measures, _: str) -> float:
    return o.points[-1].train_loss


def _fact(name: str, unit: str, about: str, lower: bool = False) -> None:
    metric(name, unit, about, lower, judged=False)(lambda o, _: o.facts.get(name, float("nan")))


_fact("dacc", "%", "clients rightly taken for benign or malicious")
_fact("fpr", "%", "benign clients taken for malicious", lower=True)
_fact("fnr", "%", "malicious clients taken for benign", lower=True)
_fact("accepted_honest", "%", "honest clients' models that the committee accepted")
_fact("accepted_hostile", "%", "hostile clients' models that the committee accepted", lower=True)
_fact("accepted_ratio", "times", "how much more often honest models were accepted than hostile ones")
_fact("blocks_inside", "%", "clients all of whose collaborators have the same classes, from round 21 on")
_fact("blocks_whole", "%", "clients whose collaborators are all who have the same classes, from round 21 on")


# ------------------------------------------------------------ facts


@dataclass(frozen=True)
class Traces:
    """What facts are computed from, whether a run is still in memory or read from its folder; rounds from 0."""

    notes: Sequence[tuple[int, str, Any]]
    detection: Mapping[str, float | None] | None
    hostile: Callable[[int], Sequence[bool]] | None = None  # who was malicious in a round
    classes: Sequence[frozenset[int]] = field(default=())  # the classes each client has


def facts(traces: Traces) -> dict[str, float]:
    found: dict[str, float] = {}
    if traces.detection:
        for name, key in (("dacc", "accuracy"), ("fpr", "false_positive"), ("fnr", "false_negative")):
            found[name] = 100.0 * _number(traces.detection.get(key))
    if traces.hostile is not None:
        found |= _acceptance(traces.notes, traces.hostile)
    if traces.classes:
        found |= _blocks(traces.notes, traces.classes)
    return found


ASKED = [k.name for k in (kinds.ACCEPTED, kinds.REJECTED, kinds.PARTICIPANTS, kinds.COLLABORATORS)]
"""The notes that these read."""


def _acceptance(notes: Iterable[tuple[int, str, Any]], hostile: Callable[[int], Sequence[bool]]) -> dict[str, float]:
    """The shares of honest and of hostile submissions that were accepted, over all rounds."""
    yes, asked = [0, 0], [0, 0]
    for round, name, clients in notes:
        if name in (kinds.ACCEPTED.name, kinds.REJECTED.name):
            bad = hostile(round)
            for client, used in kinds.kind_of(name).verdicts(clients):
                side = int(bool(bad[client]))
                asked[side] += 1
                yes[side] += used
    if not asked[0] or not asked[1]:
        return {}
    honest, other = (100.0 * y / n for y, n in zip(yes, asked, strict=True))
    ratio = honest / other if other else float("inf")
    return {"accepted_honest": honest, "accepted_hostile": other, "accepted_ratio": ratio}


def _blocks(notes: Iterable[tuple[int, str, Any]], classes: Sequence[frozenset[int]]) -> dict[str, float]:
    """How often the collaborators a client was given lie in its own block of clients, and are all of it."""
    members: list[int] = []
    inside, whole, count = 0, 0, 0
    for round, name, value in notes:
        if name == kinds.PARTICIPANTS.name:
            members = [int(c) for c in value]
        elif name == kinds.COLLABORATORS.name and round + 1 >= LATE:
            weights = np.asarray(value, float)
            for k, own in enumerate(members):
                team = {members[j] for j in np.flatnonzero(weights[k] > 0)} - {own}
                block = {c for c in members if classes[c] == classes[own]} - {own}
                inside, whole, count = inside + (team <= block), whole + (team == block), count + 1
    return {"blocks_inside": 100.0 * inside / count, "blocks_whole": 100.0 * whole / count} if count else {}
