"""What somebody should know about data before believing an accuracy measured on them."""

from __future__ import annotations

import numpy as np

from fedkin.data.dataset import Dataset
from fedkin.data.split import Split

NOTABLE = 0.25
"""The share of test samples of classes unknown to their client that is worth a word."""


LARGE = 10.0
"""What a column's mean and deviation may come to together without a word: networks begin for numbers around 1."""
MOST_NAMED = 3
OWNERS = (
    "client",
    "site",
    "hospital",
    "clinic",
    "center",
    "centre",
    "institution",
    "user",
    "owner",
    "device",
    "patient",
)
"""What columns are called that say whose a row is."""


def remarks_on(dataset: Dataset, split: Split) -> list[str]:
    train, test = split.class_table(dataset), split.class_table(dataset, "test")
    by_class = dataset.targets == "classes"
    found = [dataset.note] if dataset.note else []
    if by_class and (train.sum(0) > 0).sum() == 1 and test[:, train.sum(0) == 0].sum() == 0:
        found.append("all samples are of one class: an accuracy of 100 % says nothing")
    tested = test.sum(1)
    if (tested == 0).any():
        found.append(
            f"{_clients(split, tested == 0)} without test samples: {_they(tested == 0)} not count in the accuracy"
        )
    foreign = np.where(train == 0, test, 0).sum(1)
    blind = (tested > 0) & (foreign == tested)
    if by_class and blind.any():
        found.append(
            f"{_clients(split, blind)} tested only on classes without a training sample of their own: "
            "a personal model can hardly be right there"
        )
    elif by_class and foreign.sum() > NOTABLE * tested.sum():
        found.append(
            f"{100 * foreign.sum() / tested.sum():.0f} % of the test samples are of classes that their client "
            "has no training sample of"
        )
    users = None if dataset.user is None or split.partition != "natural" else len(np.unique(dataset.user))
    if users is not None and split.clients < users:
        found.append(
            f"{split.clients} of the {users} users take part, those with the most samples (clients={split.clients})"
        )
    return found + _on_columns(dataset, split)


def _on_columns(dataset: Dataset, split: Split) -> list[str]:
    """What may have been forgotten of a table: its scale, and whose its rows are."""
    rows = np.concatenate([*split.train, np.zeros(0, np.int64)]).astype(np.int64)
    if not dataset.columns or dataset.x.ndim != 2 or not len(rows):
        return []
    x = dataset.x[rows].astype(np.float64)
    mean, std = x.mean(0), x.std(0)
    large = np.argsort(-(np.abs(mean) + std), kind="stable")
    large = large[(np.abs(mean) + std)[large] > LARGE]
    found = []
    if len(large):
        said = [f"{dataset.columns[i]} has mean {mean[i]:.3g} and deviation {std[i]:.3g}" for i in large[:MOST_NAMED]]
        more = f", and {len(large) - MOST_NAMED} more" if len(large) > MOST_NAMED else ""
        found.append(
            f"{'columns' if len(large) > 1 else 'column'} {', '.join(said)}{more}: not scaled, and networks learn "
            "badly from numbers that large; --scale local standardises them"
        )
    words = [c for c in dataset.preparations[0].columns if c.categories] if dataset.preparations else []
    owners = [c for c in words if any(word in c.name.lower() for word in OWNERS) and len(c.categories) < len(rows) / 2]
    said = [
        f"column {c.name} has {len(c.categories)} words and may say whose a row is; it is a feature like the others: "
        f"with --client-column {c.name} each of its words is a client"
        for c in owners
    ]
    return found + (said if split.partition else [])


def _clients(split: Split, which: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    count, first = int(which.sum()), split.names[int(np.argmax(which))]
    if count == 1:
        return f"1 of {split.clients} clients ({first}) is"
    return f"{count} of {split.clients} clients ({first}, ...) are"


def _they(which: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    return "it does" if which.sum() == 1 else "they do"
