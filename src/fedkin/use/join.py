"""Clients that come when a run is over, from their data to their models: `fedkin join` and `fk.join`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedkin.data import OwnClients, Reading, own_clients, own_folder
from fedkin.data.own import LABEL, listed, read_site
from fedkin.errors import UsageError, unknown
from fedkin.models import Ready
from fedkin.options import said
from fedkin.preparation import Preparation
from fedkin.rounds import Result, inference
from fedkin.rounds.newcomers import Trial, arrive
from fedkin.rounds.trained import Trained
from fedkin.runs.catalogue import Catalogue
from fedkin.runs.restore import as_it_was
from fedkin.tasks import Metric
from fedkin.use.export import card_of, file_name, write
from fedkin.use.model_file import Personal


@dataclass(eq=False)
class Newcomers:
    """Clients that came when a run was over, and their models; `fk.join` returns them.

    `trials` say how each one's model does on its own test samples after training on so many samples: with 0 it is the
    model that it would have without data of its own. `names` are the clients', `metric` says what the numbers are,
    `epochs` for how many each trained, and `remarks` are sentences to read first. `method` and `run` say where they
    came to: the run's method and, if it has one, its folder."""

    method: str
    run: str | None
    names: tuple[str, ...]
    trials: list[Trial]
    metric: Metric
    epochs: int
    remarks: list[str]
    _rows: Tensor = field(repr=False)  # [M, D]
    _trained: Trained = field(repr=False)
    _preparations: tuple[Preparation, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        return f"Newcomers({self.method}: {', '.join(self.names[:5])}{', ...' if len(self.names) > 5 else ''})"

    def personal(self, client: int | str = 0) -> Ready:
        """The model of a newcomer, by number or name, made with all its training samples; see `Result.personal`."""
        number = self._number(client)
        module = self._trained.network_with(self._rows[number])
        samples = replace(self._trained.samples, preparations=self._preparations).of_client(number)
        return Ready(module, samples).eval()

    def predict(self, x: Any, client: int | str = 0) -> np.ndarray[Any, Any]:
        """What a newcomer's model takes each of these samples for; see `Result.predict`."""
        return inference.answers(self.personal(client), x, self._trained.task)

    def save(self, folder: str | Path) -> list[Path]:
        """Each newcomer's model as NAME.safetensors in a folder, for `fedkin predict` and `fedkin export`."""
        config, run = self._trained.config, Path(self.run).name if self.run else ""
        card = replace(card_of(self._trained.samples, config, run), round=self._trained.round)
        written, used = list[Path](), set[str]()
        for place, name in enumerate(self.names):
            stem = file_name(name)
            stem = f"{stem}-{place}" if stem in used else stem
            used.add(stem)
            ready = self.personal(place)
            prepared = next(iter(ready.samples.preparations), None)
            model = Personal(replace(card, site=name, preparation=prepared), ready.network)
            written += write(model, Path(folder).expanduser() / stem, ["safetensors"])
        return written

    def means(self) -> dict[int, float]:
        """The mean over newcomers by the samples that they train on, for numbers of samples that all of them bring."""
        by_count: dict[int, list[float]] = {}
        for trial in self.trials:
            by_count.setdefault(trial.samples, []).append(trial.accuracy)
        every = {count: np.array(of) for count, of in sorted(by_count.items()) if len(of) == len(self.names)}
        return {count: float(of[~np.isnan(of)].mean()) for count, of in every.items() if not np.isnan(of).all()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `fedkin join --json` prints them."""
        facts = {"metric": self.metric.name, "unit": self.metric.unit, "higher": self.metric.higher}
        own = {"run": self.run, "method": self.method, "epochs": self.epochs, **facts}
        return {**own, "newcomers": [asdict(t) for t in self.trials], "means": self.means(), "remarks": self.remarks}

    def to_markdown(self) -> str:
        """The trials as a table: a row for each newcomer and, of several, their mean; a column for each number of
        samples."""
        counts = sorted({t.samples for t in self.trials})
        known = {(t.client, t.samples): said(t.accuracy, self.metric.unit) for t in self.trials}
        rows = [[name, *(known.get((name, count), "") for count in counts)] for name in self.names]
        if len(self.names) > 1:
            means = {count: said(mean, self.metric.unit) for count, mean in self.means().items()}
            rows.append(["mean", *(means.get(count, "") for count in counts)])
        head = ["samples", *map(str, counts)]
        return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---", *["---:"] * len(counts)], *rows])

    def _number(self, client: int | str) -> int:
        if isinstance(client, str):
            if client not in self.names:
                raise unknown("newcomer", client, self.names)
            return self.names.index(client)
        if isinstance(client, bool) or not 0 <= client < len(self.names):
            raise UsageError(f"newcomer {client!r}: there are 0 to {len(self.names) - 1}")
        return client


def join(
    run: str | Result,
    clients: Sequence[Any] | Mapping[str, Any] | None = None,
    *,
    data: str | Path | None = None,
    samples: Sequence[int] = (),
    epochs: int | None = None,
    label: str = LABEL,
    runs_dir: str | None = None,
    device: str | None = None,
) -> Newcomers:
    """Models for clients that were not in a run, each by the recipe of the run's method; nobody else's changes.

    `run` is a result, or a run's name or folder. The newcomers' data are `clients`, as `fk.run` takes them, or `data`:
    a file (a client) or a folder with a file for each, whose targets stand in the column `label`. They are prepared as
    the run's were. `samples`: also say how the models do that are made with so many training samples. `epochs`: for how
    many a newcomer trains (default: what the method needs)."""
    if (clients is None) == (data is None):
        raise UsageError("give the newcomers' data, as clients=[...] or as data='file or folder', one of the two")
    if isinstance(run, Result):
        if run._trained is None:
            raise UsageError("this result has no models of its run: give the run's name or folder")
        if device is not None:
            raise UsageError(f"device={device!r}: a result stays where it was made; give the run's folder instead")
        trained, where = run._trained, run.run
    else:
        folder = Catalogue(runs_dir).locate(run)
        trained, where = Trained.of(as_it_was(folder, device).as_kept()), str(folder.path)
    like = trained.samples
    kind: Any = like.targets
    categories = tuple(c.name for c in like.table if c.categories)
    how = Reading(label, None, categories, like.vocabulary, kind, texts=like.texts)
    if data is not None:
        brought = _from_files(Path(data).expanduser(), how)
    else:
        assert clients is not None
        clients = listed(clients)
        named = isinstance(clients, Mapping) or not isinstance(clients, list | tuple)
        names = None if named else [f"client-{len(trained.names) + i}" for i in range(len(clients))]
        brought = own_clients(clients, how, names=names)
    found = arrive(trained, brought, samples, epochs)
    rest = (found.names, found.trials, found.metric, found.epochs, found.remarks, found.rows)
    return Newcomers(trained.config.method, where, *rest, trained, found.preparations)


def _from_files(path: Path, how: Reading) -> OwnClients:
    return own_folder(path, how) if path.is_dir() else read_site(path, path.stem, how)
