"""The figures of one client of a run, as the web page shows and saves them."""

from __future__ import annotations

import numpy as np

from fedkin.core.notes import numbers
from fedkin.errors import FedKinError
from fedkin.report import figures
from fedkin.report.figures import Figure, Floats, LeftOut, Lines, Missing, Series, ends
from fedkin.report.gather import RunData
from fedkin.report.one_run import LOSS, Plan

MEAN = 6  # the colour of the mean that a client is held against


def _column(run: RunData, client: int, what: str) -> tuple[Floats, Floats]:
    """By round; a row of after the last fine-tuning takes the place of the one before."""
    rows = run.select(f"round, {what}", "clients", "WHERE client = ? ORDER BY round, final", (client,))
    newest = dict(rows)
    return numbers(newest), numbers(newest.values())


def accuracy(run: RunData, client: int) -> Figure:
    who = "benign clients" if run.malicious else "all clients"
    x, y = _column(run, client, "accuracy")
    if not len(x):
        raise Missing("no round has been evaluated yet")
    regular = run.regular
    mean = Series(
        f"mean of {who} (macro)", run.rounds["round"][regular], run.rounds["macro"][regular], colour=MEAN, dash=1
    )
    series = [Series("this client", x, y), mean]
    panel = figures.of_scores("round", run.metric, series, whole=True)
    return Figure("Of this client's personal model, on its own test samples.", ends(series, panel.unit), [panel])


def loss(run: RunData, client: int) -> Figure:
    x, y = _column(run, client, "loss")
    if not len(x):
        raise Missing("no round has been evaluated yet")
    series = [Series("test", x, y, colour=1)]
    panel = Lines("round", LOSS, "", series, same_scale=False, low=0.0)
    return Figure("On this client's own test samples.", ends(series, ""), [panel])


def traffic(run: RunData, client: int) -> Figure:
    sums = "round, sum(bytes_down), sum(bytes_up)"
    rows = run.select(sums, "traffic", "WHERE client = ? GROUP BY round ORDER BY round", (client,))
    if not rows:
        raise Missing("no exchange with this client has been recorded")
    x, *both = (numbers(row[i] for row in rows) for i in range(3))
    series = [
        Series(label, x, np.cumsum(np.nan_to_num(sent)), colour=i, dash=i)
        for i, (label, sent) in enumerate(zip(("received", "sent"), both, strict=True))
    ]
    return Figure("Bytes since the start.", ends(series, "B"), [Lines("round", "sent", "B", series, low=0.0)])


def classes(run: RunData, client: int) -> Figure:
    try:
        counts = np.asarray(run.class_counts[client], float)
    except FedKinError as error:
        raise Missing(str(error)) from None
    names = [str(c) for c in range(len(counts))]
    has = ", ".join(f"{name}: {count:g}" for name, count in zip(names, counts, strict=True) if count)
    panel = figures.Bars("training samples", "", names, [figures.Part("samples", 0, counts)])
    return Figure("Training samples of this client, as stored with the split.", f"By class: {has}.", [panel])


FIGURES: dict[str, Plan] = {
    "accuracy": Plan("Accuracy by round", accuracy),
    "loss": Plan("Test loss by round", loss),
    "bytes": Plan("Traffic", traffic),
    "classes": Plan("Samples by class", classes),
}
"""By the names of their places on the page."""


def figure(name: str, run: RunData, client: int) -> Figure | LeftOut:
    plan = FIGURES[name]
    return figures.attempt(name, run.metric.put(plan.title), lambda: plan.build(run, client))
