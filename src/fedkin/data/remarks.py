"""What somebody should know about data before believing an accuracy measured on them."""

from __future__ import annotations

import numpy as np

from fedkin.data.dataset import Dataset
from fedkin.data.split import Split

NOTABLE = 0.25
"""The share of test samples of classes unknown to their client that is worth a word."""


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
    return found


def _clients(split: Split, which: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    count, first = int(which.sum()), split.names[int(np.argmax(which))]
    if count == 1:
        return f"1 of {split.clients} clients ({first}) is"
    return f"{count} of {split.clients} clients ({first}, ...) are"


def _they(which: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> str:
    return "it does" if which.sum() == 1 else "they do"
