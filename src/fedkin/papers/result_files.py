"""The files in `results/`: one for each table, with the paper's numbers, ours, and where ours come from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedkin.errors import DataError, UsageError
from fedkin.papers.cell_settings import NO_DATA
from fedkin.papers.published import NAMES, Paper, Table, load_paper, table_names
from fedkin.papers.table_records import (
    CHOICE,
    FAILED,
    NOT_RUN,
    Record,
    changed_since,
    empty,
    former_settings,
    joined,
    outline,
    united,
)

PROVENANCE = ("seeds", "command", "commit", "device")
CELL_KEYS = (
    *("row", "column", "metric", "unit", "lower", "paper", "ours", "std"),
    *("seeds", "values", "rounds", "command", "commit", "device", "settings", "note"),
)
DEFINED = ("judged", "reading")  # what a cell's definition says; files that are older than these words lack them
HEAD_KEYS = ("paper", "paper_title", "cite", "title", "rows", "columns", "checks", "methods", "kind")


def save(records: Iterable[Record], folder: str | Path) -> list[Path]:
    """Puts newly measured cells into results/<paper>/<table>.json; what was measured before stays, and seeds add up."""
    paths = []
    for record in records:
        if record["quick"]:
            raise UsageError("--quick numbers mean nothing and are not saved: leave out --quick or --save")
        paper = load_paper(record["paper"])
        paths.append(_update(Path(folder), paper, paper.table(record["table"]), record["cells"]))
    return paths


def refresh(folder: str | Path) -> list[Path]:
    """Makes every table's file anew from the table's definition and from what the file holds."""
    return [
        _update(Path(folder), paper, table) for name in NAMES for paper in [load_paper(name)] for table in paper.tables
    ]


def _update(folder: Path, paper: Paper, table: Table, new: Sequence[Record] = ()) -> Path:
    path = folder / paper.name / f"{table.name}.json"
    _write(path, merged(paper, table, read(path) if path.exists() else None, new))
    return path


def merged(paper: Paper, table: Table, before: Record | None, new: Sequence[Record] = ()) -> Record:
    """All cells of the table as it is defined now, with the seeds that were measured before and now.

    What was measured under another definition of the cell does not count any more, unless the paper's file says what
    changed: then it stays, marked, until the cell is measured as it is defined today."""
    old = {(c["row"], c["column"]): c for c in (before or {}).get("cells", [])}
    fresh = {(c["row"], c["column"]): c for c in new}
    cells = []
    for cell in table.cells:
        at, blank = (cell.row, cell.column), empty(table, cell)
        usable = {blank["settings"], *former_settings(paper, cell)}
        known = [c for c in (old.get(at), fresh.get(at)) if c is not None and c["settings"] in usable]
        measured_ = [c for c in known if c["ours"] is not None]
        found = [c for c in measured_ if c["settings"] == blank["settings"]] or measured_
        if not found:
            told = next((c["note"] for c in reversed(known)), "")
            news = told.startswith(("failed", NO_DATA)) and blank["note"] == NOT_RUN  # the table cannot know of it
            cells.append({**blank, "note": told} if news else blank)
        else:
            kept = united(table, cell, *found) if len(found) > 1 else found[0]
            note = joined(cell.note, *CHOICE.findall(kept["note"]), *FAILED.findall(kept["note"]))
            now = {**{k: blank[k] for k in ("unit", "lower", "paper", *DEFINED)}, "note": note}
            since = changed_since(paper, cell, kept)
            cells.append({**{k: kept[k] for k in CELL_KEYS}, **now, **({"since": since} if since else {})})
    return {**outline(paper, table), "cells": cells}


def read(path: Path) -> Record:
    """A results file, checked: every measured cell says where it comes from, and every other why it is empty."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        cells, table = record["cells"], record["table"]
        for key in HEAD_KEYS:
            record[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is not a results file: {error!r}") from None
    for cell in cells:
        missing = [k for k in CELL_KEYS if k not in cell]
        if missing:
            raise DataError(f"{path}: a cell lacks {', '.join(missing)}")
        for key in DEFINED:
            cell.setdefault(key, "")
        lacking = [k for k in PROVENANCE if not cell[k]] if cell["ours"] is not None else []
        if lacking or (cell["ours"] is None and not cell["note"]):
            what = ", ".join(lacking) or "a note that says why it is empty"
            raise DataError(f"{path}: {table} {cell['row']!r}, {cell['column']!r} lacks {what}")
    return dict(record)


def read_all(folder: str | Path) -> list[Record]:
    """All results files, in the order of the papers and their tables."""
    paths = [Path(folder) / name / f"{table}.json" for name in NAMES for table in table_names(name)]
    return [read(path) for path in paths if path.exists()]


def _write(path: Path, record: Record) -> None:
    """One cell per line, so that differences between versions stay readable."""
    head = {k: v for k, v in record.items() if k != "cells"}
    lines = ",\n  ".join(json.dumps(_rounded(c), ensure_ascii=False) for c in record["cells"])
    text = json.dumps(head, ensure_ascii=False, indent=1)[:-2] + f',\n "cells": [\n  {lines}\n ]\n}}\n'
    part = path.with_suffix(".part")
    write_text(part, text).replace(path)


def write_text(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def _rounded(value: Any) -> Any:
    """The same with four decimals in every number."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value
