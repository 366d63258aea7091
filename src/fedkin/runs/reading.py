"""Reading a file that anybody may have written."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedkin.errors import DataError
from fedkin.runs.database import ACCURACIES


def read_bytes(path: Path, limit: int) -> bytes:
    """A plain file of a bounded size; a link, a device or a folder is refused."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with open(os.open(path, flags), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise DataError(f"{path.name} is not a plain file")
            if about.st_size > limit:
                raise DataError(f"{path.name} has {about.st_size} bytes, more than the limit of {limit}")
            return file.read(limit + 1)
    except FileNotFoundError:
        raise DataError(f"{path.name} is missing") from None
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror or error}") from None


def number(value: Any) -> float:
    """NaN for what is none, or none of a size that numbers of a run have."""
    fits = isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 62)
    return float(value) if fits else math.nan


def parsed(text: Any) -> Any:
    """JSON in a table; None for what is none."""
    try:
        return json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return None


def metrics_of(text: Any) -> dict[str, float]:
    """Metrics as a table has them; NaN where one could not be computed."""
    found = parsed(text)
    return {str(k): number(v) for k, v in found.items()} if isinstance(found, dict) else {}


def evaluated(row: Mapping[str, Any], what: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the table of rounds in the shape of `run --json`; `what` the numbers are."""
    aside = {f"validation_{name}" for name in ACCURACIES}
    kept = {k: v for k, v in row.items() if k not in aside and k not in ACCURACIES}
    known = isinstance(row.get("validated"), int)  # NULL: nobody asked, or FedKin did not know of it
    validation = {k: row[f"validation_{k}"] for k in ACCURACIES} | dict(what) if known else None
    kept["validated"] = row["validated"] if known else 0
    others = {name: metrics_of(row[name]) for name in ("metrics", "validation_metrics")}
    accuracy = {k: row[k] for k in ACCURACIES} | dict(what)
    return {**kept, "final": bool(row["final"]), "accuracy": accuracy, "validation": validation, **others}
