"""What comes of a run: its records, and every client's personal model ready for use."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedkin.compute.forward import Out
from fedkin.compute.layout import Layout
from fedkin.config import Config
from fedkin.core.federation import Exchange, Failure, Measured, Note
from fedkin.data import Split
from fedkin.engines.simulator import Simulator
from fedkin.errors import UsageError, unknown
from fedkin.methods import Method
from fedkin.models import Ready, Samples
from fedkin.robust import Adversary, Backdoor, Detection, detection, verdicts_of
from fedkin.rounds import footprint, inference, shown, words
from fedkin.rounds.divergence import ADVICE, GUESSING, OF_TABLES, at_chance, divergence, loss_out_of_hand
from fedkin.rounds.records import Accuracy, ClientRecord, Prepared, RoundRecord, best_of, best_on_validation
from fedkin.rounds.trained import Trained
from fedkin.tasks import Task

if TYPE_CHECKING:
    from fedkin.rounds.job import Job


@dataclass(frozen=True)
class Rows:
    """Every client's personal model as a row on the CPU, made when it is asked for."""

    clients: int
    make: Callable[[int], torch.Tensor]

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, client: int) -> torch.Tensor:
        if not 0 <= client < self.clients:
            raise IndexError(client)
        return self.make(client)


OF_THE_RUN = ("method", "options", "seed", "malicious", "remarks", "run")
AS_IT_IS = (*OF_THE_RUN, "bytes", "seconds", "wall", "times", "diverged", "backdoor")  # in `to_dict`


@dataclass(eq=False, repr=False)
class Result:
    """What came of a run; `fk.run` returns one.

    The numbers: `accuracy` (percent, of the personal models after the last round), `kept` (the record that it is from:
    with keep=best that of the best round on validation samples), `best` (the round that was best, on validation samples
    where there are any; `best_by` says which), `validation` (as `accuracy`, on those), `history` (a record for each
    round that was evaluated), `per_client`, `stopped` (the round after which training stopped early, or None),
    `backdoor` (success of the attack, percent), and `diverged`: why the numbers are not to be believed, or None.
    `remarks` are sentences to read first.

    To look at: `plot` draws a figure, `frame` gives a table of pandas, and a notebook shows the result as a table with
    its curves. To use: `personal`, `model`, `predict`.

    What was run: `method`, its `options`, `seed`, `config` (all settings) and `prepared` (hash of the split, device,
    precision); `run` is the run's folder, if it has one. `ways` says how rows were trained. `split` says who has which
    rows of the data (`split.names`, and `split.train`, `split.validation`, `split.test` for each client; None with real
    sites), and `class_counts` how many training samples of each class every client has, [clients, classes].

    What happened: `exchanges` (every `ask` with its bytes and seconds), `failures`, `removed` (client to round) and
    `why_removed`, `notes` of the method, and `malicious`: who was, in truth. `seconds` is the time of the rounds,
    `wall` that by a stopwatch, with its parts in `times`; `memory` is in bytes, as estimated and at the most."""

    method: str
    options: dict[str, Any]
    seed: int
    config: Config
    accuracy: Accuracy  # personal models after the last round
    best: RoundRecord  # see `best_by`
    kept: RoundRecord  # what the personal models are of: the last round, or with keep=best the best on validation
    history: list[RoundRecord]
    per_client: list[ClientRecord]
    exchanges: list[Exchange]
    failures: list[Failure]
    removed: dict[int, int]
    seconds: float  # of the rounds: training, and the server's work
    ways: dict[str, str]
    prepared: Prepared
    notes: list[Note]
    malicious: list[int]  # the truth, for those who are malicious throughout
    _layout: Layout = field(repr=False)
    _rows: torch.Tensor | Rows = field(repr=False)  # [N, D] on the CPU
    _model: nn.Module = field(repr=False)
    _samples: Samples = field(repr=False)
    run: str | None = None  # the run's folder, if it has one
    backdoor: dict[str, float | None] | None = None  # success of the attack, in percent: personal, global
    remarks: list[str] = field(default_factory=list)  # sentences a user should read before believing the numbers
    wall: float = math.nan  # seconds from the beginning of preparing to the result
    times: dict[str, float] = field(default_factory=dict)  # its parts: see `clock.PARTS`
    diverged: str | None = None  # why the numbers are not to be believed
    memory: Mapping[str, int | None] = field(default_factory=dict)  # bytes: reckoned before, and at the most
    stopped: int | None = None  # after which round training stopped early
    why_removed: Mapping[int, str] = field(default_factory=dict)  # those whom not the method itself removed
    split: Split | None = None
    class_counts: np.ndarray[Any, Any] | None = None
    _adversary: Adversary | None = field(default=None, repr=False)
    _task: Task | None = field(default=None, repr=False)
    _trained: Trained | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        return words.brief(self)

    def _repr_html_(self) -> str | None:
        known = shown.looks
        return None if known is None else known.html(self)

    def plot(self, figure: str = "accuracy-per-round") -> Any:
        """A figure of the report, drawn by matplotlib: the one that this returns, for `savefig` or a notebook.

        "accuracy-per-round", "loss-per-round", "bytes-per-round", "spread-over-clients", "split", "cost-per-phase",
        "removals", and those of single methods, "matrix" (who learns from whom), "committee", "lengths",
        "contributions", "prototypes". A figure that this run has nothing for is refused, with the reason."""
        return shown.required().plot(self, figure)

    def frame(self, table: str = "rounds") -> Any:
        """A table of the run as a data frame of pandas: "rounds" (a row for each evaluated round), "clients" (how the
        personal models do), "exchanges", "events" or "notes". The columns are those of a run's metrics, with one for
        each further metric."""
        return shown.required().frame(self, table)

    @property
    def class_names(self) -> tuple[str, ...]:
        """What the classes are called, in the order of a model's outputs; empty where there are no classes."""
        return self._samples.names() if self.prepared.classes else ()

    @property
    def score(self) -> Accuracy:
        """The task's main metric over clients: `accuracy`, by a name that fits any task."""
        return self.accuracy

    @property
    def validation(self) -> Accuracy | None:
        """The same on the clients' validation samples; None where none were asked for."""
        return self.kept.validation

    @property
    def best_by(self) -> str:
        """On which samples `best` was chosen: "validation" where there are any, else "test"."""
        return "test" if best_on_validation(self.history) is None else "validation"

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes that all clients received (`down`) and sent (`up`) in the whole run."""
        return {"down": sum(e.bytes_down for e in self.exchanges), "up": sum(e.bytes_up for e in self.exchanges)}

    def personal(self, client: int | str) -> Ready:
        """The model of a client, by number or name: an ordinary module in evaluation mode on the CPU, ready for use.

        It takes samples as the data had them (pixels as uint8 [n, C, H, W], which it normalises itself; numbers and
        token ids as they are) and gives class scores; `.network` is the network alone, `.names` the classes."""
        number = self._number(client)
        module = self._layout.load(copy.deepcopy(self._model), self._rows[number])
        return Ready(module, self._samples.of_client(number)).eval()

    @property
    def model(self) -> Ready:
        """The shared model of the last round, for methods that have one, as `personal` gives a client's."""
        found = None if self._trained is None else self._trained.model()
        if found is None:
            raise UsageError(
                f"method {self.method!r} has no model that all clients share: take result.personal(client), or "
                "fk.join(result, clients=...) for clients that were not in the run"
            )
        return Ready(found, self._samples).eval()

    def predict(self, x: Any, client: int | str) -> np.ndarray[Any, Any]:
        """What a client's model takes each of these samples for: labels as the data had them (whole numbers, or names);
        for other tasks numbers, labels as 0 or 1, tokens, or a risk. Samples are an array, tensor or list, not
        normalised; of a model that learnt from tables a data frame, a dictionary of columns or a list of dictionaries,
        prepared here as in training."""
        return inference.answers(self.personal(client), x, self._task)

    def _number(self, client: int | str) -> int:
        names = [c.name for c in self.per_client]
        if isinstance(client, str):
            if client not in names:
                raise unknown("client", client, names)
            return names.index(client)
        if isinstance(client, bool) or not isinstance(client, int | np.integer) or not 0 <= client < len(names):
            raise UsageError(f"client {client!r}: this run has clients 0 to {len(names) - 1}")
        return client

    @property
    def detection(self) -> Detection | None:
        """Who was found out, against the truth; None without attackers, or where they change and nobody judges."""
        adversary = self._adversary
        if adversary is None or not adversary.malicious().any():
            return None
        truth = adversary.malicious if adversary.redraw else adversary.malicious()
        return detection(truth, verdicts_of(self.notes), self.removed)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        found, best = self.detection, self.best
        return {
            **{name: getattr(self, name) for name in AS_IT_IS},
            "accuracy": asdict(self.accuracy),
            "kept": {"round": self.kept.round, "final": self.kept.final, "by": self.config.keep},
            "stopped": self.stopped,
            "validation": None if self.validation is None else asdict(self.validation),
            "best": {
                **{"round": best.round, "final": best.final, "by": self.best_by, **asdict(best.accuracy)},
                "validation": None if best.validation is None else asdict(best.validation),
            },
            "per_client": [asdict(c) for c in self.per_client],
            "history": [asdict(r) for r in self.history],
            "removed": {str(c): r for c, r in self.removed.items()},
            "failed": [asdict(f) for f in self.failures],
            "detection": None if found is None else asdict(found.overall),
            "detection_rounds": None if found is None else {str(r + 1): asdict(v) for r, v in found.rounds.items()},
            "gone": {} if found is None else {str(c): None if r is None else r + 1 for c, r in found.gone.items()},
            "config": self.config.to_dict(),
            "split": self.prepared.split_hash,
            **{name: getattr(self.prepared, name) for name in ("eval_point", "device", "precision")},
            "ways": sorted(set(self.ways.values())),
            "memory": dict(self.memory),
        }


# ---------------------------------------------------------------- how one is made


def result_of(job: Job) -> Result:
    """What has come of a run so far."""
    with job.clock.counting("evaluating"):
        shown = job.as_kept()
        record = job.history[-1] if job.kept is None else job.kept.record(job.history)
        measured = shown.evaluate()
        rows, backdoor = _models(shown), backdoor_success(shown)
    metric, names = job.prepared.metric, [m.name for m in job.prepared.extra]
    columns = (measured.shown(metric.scale), measured.correct, measured.total, measured.loss)
    scores = zip(*(c.tolist() for c in columns), strict=True)
    others = [dict(zip(names, row, strict=False)) for row in measured.extra.tolist()]
    aside = measured.on_validation(metric.scale).tolist()
    by_class = job.prepared.counts_right
    diverged, remarks = _remarks(job, measured)
    remarks += _of_choices(job)
    return Result(
        method=job.config.method,
        options=job.options,
        seed=job.config.seed,
        config=job.config,
        accuracy=record.accuracy,
        best=best_of(job.history),
        kept=record,
        history=job.history,
        per_client=[
            ClientRecord(
                c,
                name,
                accuracy,
                loss,
                size[0],
                int(of) if by_class else size[1],
                int(right) if by_class else 0,
                others[c],
                aside[c],
            )
            for c, (name, size, (accuracy, right, of, loss)) in enumerate(
                zip(job.site.names, job.sizes, scores, strict=True)
            )
        ],
        exchanges=job.fed.exchanges,
        failures=job.fed.failures,
        removed=job.fed.removed,
        seconds=job.seconds,
        ways=job.site.chooser.chosen,
        prepared=job.prepared,
        notes=job.fed.notes,
        malicious=job.malicious,
        backdoor=backdoor,
        remarks=remarks,
        diverged=diverged,
        wall=job.clock.wall,
        times=dict(job.clock.parts),
        stopped=job.stopped,
        why_removed=dict(job.fed.why_removed),
        split=job.split,
        class_counts=job.class_counts(),
        memory=footprint.memory_facts(job.prepared.needed, job.site.source.device),
        _layout=job.site.layout,
        _rows=rows,
        _model=job.model,
        _samples=job.samples,
        _adversary=job.adversary,
        _task=job.site.task,
        _trained=Trained.of(shown),
    )


def _models(job: Job) -> torch.Tensor | Rows:
    """The personal models: all of them if they are small, else whichever is asked for."""
    clients, then = len(job.fed.all), (job.fed.round, len(job.fed.exchanges))
    if clients * job.site.layout.width * 4 <= footprint.MODELS_AT_ONCE:
        return job.rows()

    def make(client: int) -> torch.Tensor:
        if then != (job.fed.round, len(job.fed.exchanges)):
            raise UsageError(
                f"this result is of round {then[0]}, and its run has gone on since: take its models before, or call "
                "result() again"
            )
        return job.rows([client])[0]

    return Rows(clients, make)


def _of_choices(job: Job) -> list[str]:
    """What choices on validation samples came to."""
    config, without = job.config, all(math.isnan(r.choice) for r in job.history)
    if without and (config.patience is not None or config.keep == "best"):
        what = f"the validation {job.prepared.metric.name} could never be computed: nothing was chosen by it"
        return [f"{what}, and the models are those of the last round"]
    if job.stopped is None:
        return []
    return [f"stopped early after round {job.stopped} of {config.rounds}: {job.why_stopped}"]


def _remarks(job: Job, measured: Measured) -> tuple[str | None, list[str]]:
    """Why the numbers are not to be believed, if so; sentences to read before believing them."""
    tests = np.concatenate([np.zeros(0, np.int64), *(job.site.parts["test"][c] for c in job.counted)])
    tests %= max(job.site.source.count, 1)  # an attacker's version of a sample is that sample
    classes, attacked = job.prepared.classes if job.prepared.counts_right else 0, job.adversary is not None
    labels = job.site.source.y.cpu().numpy()[tests] if classes else np.zeros(0, np.int64)
    chance = 100.0 * np.bincount(labels).max() / len(labels) if len(labels) else 100.0 / max(classes, 1)

    def first_loss(most: int = 2000) -> float:
        """Mean test loss of the network the run began with, over as many samples as tell it well enough."""
        if not len(tests):
            return 0.0
        source, network = job.site.source, copy.deepcopy(job.model).eval()
        few = torch.from_numpy(tests[:: math.ceil(len(tests) / most)]).to(source.y.device)
        with torch.no_grad():
            outputs = torch.cat([network(source.batch(part).cpu().contiguous()) for part in torch.split(few, 100)])
            whole, y = Out(outputs.unsqueeze(0), outputs.unsqueeze(0)), source.y[few].cpu().unsqueeze(0)
            return float(job.site.task.plain.value(whole, y, {}).mean())

    advice = OF_TABLES if job.samples.table and job.config.scale == "none" else ADVICE
    last, remarks = job.history[-1], [*job.prepared.remarks, *job.remarks]
    diverged = divergence(job.history, job.refusals, classes, chance, attacked, job.broken, first_loss, advice)
    if diverged is not None:
        remarks.append(f"diverged: {diverged}")
    elif not attacked and at_chance(last, classes, chance):
        remarks.append(f"accuracy is no more than {GUESSING} ({chance:.2f} %): no sign of learning yet")
    elif not attacked and (absurd := loss_out_of_hand(last, classes, first_loss, advice)) is not None:
        remarks.append(absurd)
    remarks += _not_computed(job, measured)
    return diverged, remarks


def _not_computed(job: Job, measured: Measured) -> list[str]:
    """Of which clients a metric cannot be computed, and why: they are left out of its mean."""
    tested = [c for c in job.counted if job.sizes[c][1] > 0 and c not in job.fed.why_removed]
    found = _lacking(job, measured, tested, "test")
    if measured.validation is None:
        return found
    aside = [c for c in job.counted if len(job.site.parts["validation"][c]) and c not in job.fed.why_removed]
    return found + _lacking(job, measured.validation, aside, "validation")


def _lacking(job: Job, found: Measured, clients: Sequence[int], part: str) -> list[str]:
    prepared = job.prepared
    missing = {prepared.metric: [c for c in clients if not found.total[c] > 0]}
    missing |= {m: [c for c in clients if math.isnan(found.extra[c, i])] for i, m in enumerate(prepared.extra)}
    where = "" if part == "test" else " on validation"
    return [
        f"{m.name} cannot be computed{where} for {len(without)} of {len(clients)} clients "
        f"({job.site.names[without[0]]}{', ...' if len(without) > 1 else ''}), who are left out of it: it needs "
        f"{m.needs} ({part} samples)"
        for m, without in missing.items()
        if without and not (m is prepared.metric and prepared.counts_right)
    ]


def backdoor_success(job: Job) -> dict[str, float | None] | None:
    """How often test samples of other classes are taken for the target once they carry the trigger, in percent: by the
    personal models that count, and by the common model if there is one; None without a backdoor."""
    if job.adversary is None or not isinstance(job.adversary.attack, Backdoor):
        return None
    shown, common = job.adversary.backdoor_site(job.site), job.method.common()
    personal = job.evaluate(Simulator(shown, type(job.method)(job.method.options), job.config.chunk))
    as_received = Simulator(shown, Method(), job.config.chunk)

    def percent(found: Measured) -> float:
        right, of = found.correct[job.counted.ids].sum(), found.total[job.counted.ids].sum()
        return float(100 * right / of) if of else math.nan

    everybody = as_received.measured(job.fed.all.ids, "report", lambda ids: common, 0)[0] if common else None
    return {"personal": percent(personal), "global": percent(everybody) if everybody is not None else None}
