"""Other places that hear of a run while it goes on: TensorBoard, MLflow, Weights & Biases. Off unless asked for.

A sink is anything with these three methods; `close` is called last, also after an interruption:

    class Mine(Sink):
        def start(self, info): ...              # a dictionary: run, folder, method, seed, config, options, done
        def round(self, record, clients): ...   # a RoundRecord, and every client's score at that time
        def finish(self, result): ...           # the Result

A sink never changes a run: one that raises is reported once and left alone from then on."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedkin.errors import UsageError, unknown
from fedkin.rounds import Job, Result, RoundRecord


@dataclass(frozen=True)
class ClientScore:
    client: int
    name: str
    accuracy: float  # percent (of other tasks: the main metric); NaN without test samples
    loss: float


class Sink:
    """Hears of a run that leaves a folder, and passes on what it likes to; the base of those of your own."""

    def start(self, info: Mapping[str, Any]) -> None:
        """Before the first round: `run`, `folder`, `method`, `seed`, `config`, `options`, and `done` rounds."""

    def round(self, record: RoundRecord, clients: Sequence[ClientScore]) -> None:
        """After every evaluated round: its record, and each client's `client`, `name`, `accuracy` and `loss`."""

    def finish(self, result: Result) -> None:
        """When all is done: what came of it."""

    def close(self) -> None:
        """At the very end, also after an interruption."""


def numbers(record: RoundRecord) -> dict[str, float]:
    """A round as flat numbers under the names that all sinks use; what is not finite is left out."""
    a = record.accuracy
    found = {
        f"{a.metric}/macro": a.macro,
        f"{a.metric}/micro": a.micro,
        f"{a.metric}/worst_decile": a.worst_decile,
        f"{a.metric}/std": a.std,
        **{f"{name}/macro": value for name, value in record.metrics.items()},
        "loss/train": record.train_loss,
        "loss/test": record.test_loss,
        "lr": record.lr,
        "bytes/down": record.bytes_down,
        "bytes/up": record.bytes_up,
        "clients/participants": record.participants,
        "clients/failed": record.failed,
        "clients/removed": record.removed,
        "seconds": record.seconds,
        "wall": record.wall,
    }
    return {k: float(v) for k, v in found.items() if np.isfinite(v)}


def step_of(record: RoundRecord) -> int:
    """The round; the record after the last fine-tuning counts as one more."""
    return record.round + int(record.final)


class TensorBoard(Sink):
    """Event files in a folder (default: `tensorboard` in the run's own): tensorboard --logdir runs."""

    def __init__(self, where: str = "") -> None:
        self._where, self._writer = where, None  # type: tuple[str, Any]

    def start(self, info: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = Path(self._where) / str(info["run"]) if self._where else Path(str(info["folder"])) / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=int(info["done"]) + 1 if info["done"] else None)
        text = "\n".join(f"    {k} = {v}" for k, v in {**info["config"], **info["options"]}.items())
        self._writer.add_text("config", text, 0)

    def round(self, record: RoundRecord, clients: Sequence[ClientScore]) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, step_of(record))
        known = np.array([c.accuracy for c in clients if np.isfinite(c.accuracy)])
        if len(known):
            self._writer.add_histogram(f"clients/{record.accuracy.metric}", known, step_of(record))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow(Sink):
    """A run in the experiment `fedkin` of a tracking server (default: MLFLOW_TRACKING_URI, else MLflow's own)."""

    def __init__(self, where: str = "") -> None:
        self._where = where
        self._client: Any = None
        self._run, self._ended = "", False

    def start(self, info: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._where or None)
        known = self._client.get_experiment_by_name("fedkin")
        experiment = known.experiment_id if known is not None else self._client.create_experiment("fedkin")
        made = self._client.create_run(experiment, run_name=str(info["run"]), tags={"fedkin.run": str(info["run"])})
        self._run = made.info.run_id
        options = {f"options.{k}": v for k, v in info["options"].items()}
        for key, value in {**info["config"], **options}.items():
            if key != "options":
                self._client.log_param(self._run, key, str(value)[:250])

    def round(self, record: RoundRecord, clients: Sequence[ClientScore]) -> None:
        import time

        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        found = numbers(record)
        self._client.log_batch(self._run, [Metric(k, v, now, step_of(record)) for k, v in found.items()])

    def finish(self, result: Result) -> None:
        self._client.set_terminated(self._run, "FINISHED")
        self._ended = True

    def close(self) -> None:
        if self._run and not self._ended:
            self._client.set_terminated(self._run, "KILLED")


class WeightsAndBiases(Sink):
    """A run in a project (default `fedkin`); WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, where: str = "") -> None:
        self._project, self._run, self._ended = where or "fedkin", None, False  # type: tuple[str, Any, bool]

    def start(self, info: Mapping[str, Any]) -> None:
        import wandb

        config = {**info["config"], "options": dict(info["options"])}
        self._run = wandb.init(
            project=self._project, name=str(info["run"]), config=config, reinit="create_new", dir=str(info["folder"])
        )

    def round(self, record: RoundRecord, clients: Sequence[ClientScore]) -> None:
        self._run.log(numbers(record), step=step_of(record))

    def finish(self, result: Result) -> None:
        self._run.finish()
        self._ended = True

    def close(self) -> None:
        if self._run is not None and not self._ended:
            self._run.finish(exit_code=1)


SINKS: dict[str, Callable[[str], Sink]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
"""By the name of the package, which is also what FedKin calls the extra that installs it."""


def check_sinks(specs: Sequence[str]) -> list[str]:
    """Refuses unknown names and missing packages before anything is run. A spec is NAME or NAME:WHERE."""
    for name in (spec.partition(":")[0] for spec in specs):
        if name not in SINKS:
            raise unknown("sink", name, SINKS)
        if find_spec(name) is None:
            raise UsageError(f"sink {name!r} needs the package {name}: pip install 'fedkin[{name}]'")
    return list(specs)


def make_sinks(specs: Sequence[str | Sink]) -> Sinks:
    """For one run: each run has sinks of its own. Beside names, sinks themselves."""
    for spec in specs:
        if not isinstance(spec, str | Sink):
            raise UsageError(f"sinks={spec!r}: a list of names ({', '.join(SINKS)}) and of sinks made from fedkin.Sink")
    check_sinks([spec for spec in specs if isinstance(spec, str)])
    return Sinks([_named(spec) for spec in specs])


def _named(spec: str | Sink) -> tuple[str, Sink]:
    if isinstance(spec, Sink):
        return type(spec).__name__, spec
    name, _, where = spec.partition(":")
    return name, SINKS[name](os.path.expanduser(where))


class Sinks:
    """Several sinks, each behind a guard."""

    def __init__(self, sinks: Sequence[tuple[str, Sink]]) -> None:
        self._sinks = list(sinks)
        self._say: Callable[[str], None] = lambda text: None

    def start(self, job: Job, folder: Path, say: Callable[[str], None]) -> None:
        self._say = say
        if self._sinks:
            info = {
                "run": folder.name,
                "folder": str(folder),
                "method": job.config.method,
                "seed": job.config.seed,
                "config": job.config.to_dict(),
                "options": job.options,
                "done": job.fed.round,
            }
            self._each(lambda sink: sink.start(info))

    def round(self, job: Job, record: RoundRecord | None) -> None:
        if not self._sinks or record is None or job.measured is None:
            return
        columns = zip(
            job.site.names,
            job.measured.shown(job.prepared.metric.scale).tolist(),
            job.measured.loss.tolist(),
            strict=True,
        )
        clients = [ClientScore(c, name, accuracy, loss) for c, (name, accuracy, loss) in enumerate(columns)]
        self._each(lambda sink: sink.round(record, clients))

    def finish(self, result: Result) -> None:
        self._each(lambda sink: sink.finish(result))

    def close(self) -> None:
        self._each(lambda sink: sink.close())

    def _each(self, call: Callable[[Sink], None]) -> None:
        for entry in list(self._sinks):
            try:
                call(entry[1])
            except Exception as error:  # whatever a foreign package raises: the run is worth more
                self._sinks.remove(entry)
                self._say(f"sink {entry[0]} is switched off for the rest of this run: {type(error).__name__}: {error}")


__all__ = ["SINKS", "ClientScore", "Sink", "Sinks", "check_sinks", "make_sinks"]
