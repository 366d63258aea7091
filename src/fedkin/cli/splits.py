"""`fedkin split`: who would hold what, before anything trains."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedkin.cli.console import messages, print_json, screen, table
from fedkin.config import Config
from fedkin.data import Dataset, Split
from fedkin.rounds import load_data

MOST_ROWS = 60
MOST_NUMBERS = 20  # with more classes a cell is one shaded character
SHADES = " ░▒▓█"


def show_split(config: Config, as_json: bool) -> None:
    dataset, split = load_data(config)
    if as_json:
        return print_json(facts(config, dataset, split))
    out = screen()
    out.print(_table(config, dataset, split))
    sizes = [len(rows) for rows in split.train]
    held = split.class_table(dataset, "all")
    per_client = (held > 0).sum(1)
    by_class = dataset.targets == "classes"
    classes = f" · classes per client: {per_client.min()} to {per_client.max()}" if by_class else ""
    out.print(
        f"{split.clients} clients · {sum(sizes):,} training, {sum(map(len, split.validation)):,} validation, "
        f"{sum(map(len, split.test)):,} test samples of {len(dataset):,}\n"
        f"training samples per client: {min(sizes):,} to {max(sizes):,}, median {np.median(sizes):,.0f}"
        f"{classes}\n"
        f"split {split.hash}",
        soft_wrap=True,
    )
    for line in (*dataset.prepared, *([dataset.note] if dataset.note else [])):
        messages().print(f"[dim]{escape(line)}[/]", soft_wrap=True)


def facts(config: Config, dataset: Dataset, split: Split) -> dict[str, Any]:
    counts = split.class_table(dataset, "all").tolist()
    clients = [
        {
            "client": i,
            "name": split.names[i],
            "train": len(split.train[i]),
            "validation": len(split.validation[i]),
            "test": len(split.test[i]),
            "classes": counts[i],
        }
        for i in range(split.clients)
    ]
    return {
        "data": config.data,
        "partition": config.partition,
        "seed": config.seed,
        "hash": split.hash,
        "samples": len(dataset),
        "class_names": _names(dataset),
        "clients": clients,
        "columns": list(dataset.prepared),
    }


def _table(config: Config, dataset: Dataset, split: Split) -> Table:
    counts = split.class_table(dataset, "all")
    compact, names = dataset.groups > MOST_NUMBERS, _names(dataset)
    columns = [f"{dataset.classes} classes"] if compact else names
    counted = "samples per client and class" if dataset.targets == "classes" else "samples per client"
    title = f"{config.data}: {counted}, {config.partition}, seed {config.seed}"
    made = table(title, "client", *columns, "train", "test", right=[*([] if compact else names), "train", "test"])
    made.padding = (0, 0)
    most = int(counts.max())
    for i in range(min(split.clients, MOST_ROWS)):
        cells = [_strip(counts[i], most)] if compact else [_cell(int(n), most) for n in counts[i]]
        made.add_row(split.names[i], *cells, str(len(split.train[i])), str(len(split.test[i])))
    if split.clients > MOST_ROWS:
        made.caption = f"{split.clients - MOST_ROWS} more clients; --json has them all"
    return made


def _names(dataset: Dataset) -> list[str]:
    """Of the classes; samples that have none are counted as one."""
    if dataset.targets != "classes":
        return ["samples"]
    return [str(name) for name in dataset.class_names or range(dataset.classes)]


def _cell(count: int, most: int) -> Text:
    """A number on a background that grows stronger with it."""
    if not count:
        return Text("·", style="dim")
    share = count / most
    red, green, blue = (round(a + (b - a) * share) for a, b in zip((24, 42, 66), (30, 136, 229), strict=True))
    return Text(f" {count} ", style=f"bold white on rgb({red},{green},{blue})")


def _strip(counts: np.ndarray[Any, Any], most: int) -> Text:
    top = len(SHADES) - 1
    return Text("".join(SHADES[max(1, round(n / most * top)) if n else 0] for n in counts.tolist()), style="blue")
