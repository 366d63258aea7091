"""How data are to be read that do not say so themselves."""

from __future__ import annotations

from dataclasses import dataclass

from fedkin.data.image_folder import AS_THEY_ARE, Shown
from fedkin.data.targets import Targets
from fedkin.preparation import Texts


@dataclass(frozen=True)
class Reading:
    """What holds for all files and objects of a run."""

    label: str = "label"  # the column of a table that holds the classes
    client_column: str | None = None  # that says whose a row is, where one table holds several clients
    categories: tuple[str, ...] = ()  # columns whose numbers are names
    vocabulary: int = 0
    targets: Targets = "classes"
    shown: Shown = AS_THEY_ARE  # what images are brought to
    texts: Texts | None = None  # samples are texts, and become token ids


USUAL = Reading()
