"""What a personal model of another task than classification says about new samples: numbers, labels, tokens, risks."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkin.data.dataset import Array
from fedkin.data.targets import read_targets
from fedkin.errors import DataError, UsageError
from fedkin.rounds import inference
from fedkin.tasks import task_for
from fedkin.use.model_file import Personal


@dataclass(frozen=True, eq=False)
class Answers:
    """One row a sample, and what the task's metrics say where the targets are known."""

    names: tuple[str, ...]
    values: Array  # [n] or [n, d]
    metrics: dict[str, float] | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "outputs": list(self.names),
            "samples": len(self.values),
            "metrics": self.metrics,
            "predictions": [{"row": i, "prediction": value} for i, value in enumerate(self.values.tolist())],
        }

    def write_csv(self, path: str | Path) -> Path:
        path = Path(path).expanduser()
        flat = self.values.reshape(len(self.values), -1)
        head = ["prediction"] if flat.shape[1] == 1 else [f"prediction({name})" for name in self.columns(flat.shape[1])]
        try:
            with path.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.writer(stream)
                writer.writerow(["row", *head])
                writer.writerows([i, *row] for i, row in enumerate(flat.tolist()))
        except OSError as error:
            raise UsageError(f"--out {path} cannot be written: {error.strerror}") from error
        return path

    def columns(self, width: int) -> tuple[str, ...]:
        """What so many values of a sample are called."""
        return self.names if len(self.names) == width else tuple(str(i) for i in range(width))


def answer(model: Personal, x: Any, targets: Any = None) -> Answers:
    """The model's answers for samples as they came; `targets`: what would be right, where that is known."""
    task, kind = task_for(model.card.targets), model.card.targets
    outputs = model.outputs(x)
    said = inference.plain(task.predict(outputs))
    if targets is None:
        return Answers(model.card.names(), said, None)
    y = read_targets(kind, targets, "the targets")  # type: ignore[arg-type]
    if len(y) != len(outputs):
        raise DataError(f"{len(outputs)} samples, but targets of shape {np.shape(targets)}")
    known = torch.from_numpy(y)
    kept = task.keep(outputs, known)
    return Answers(model.card.names(), said, {name: m.of(kept, known) for name, m in task.metrics.items()})
