"""The papers' tables as data, and what it takes to run them again: settings, cells, published numbers.

`published` reads the TOML files in this folder; `plan` says which runs the cells need and how long they take; `runner`
runs them; `verdicts` compares our numbers with the papers'; `result_files` keeps them in `results/`; `markdown`,
`html_page` and `results_page` write them down.

What a table of one's own takes can be had from here; names are looked up when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkin.papers.markdown import markdown as written
    from fedkin.papers.plan import make_plan as make_plan
    from fedkin.papers.published import load_paper as load_paper
    from fedkin.papers.published import parse as parse
    from fedkin.papers.runner import Ledger as Ledger
    from fedkin.papers.runner import reproduce as reproduce
    from fedkin.papers.table_records import records as records
    from fedkin.sweep.loaded import Data as Data

    as_markdown = written

_HOMES = {
    "load_paper": ("papers.published", "load_paper"),
    "parse": ("papers.published", "parse"),
    "make_plan": ("papers.plan", "make_plan"),
    "records": ("papers.table_records", "records"),
    "as_markdown": ("papers.markdown", "markdown"),
    "Ledger": ("papers.runner", "Ledger"),
    "reproduce": ("papers.runner", "reproduce"),
    "Data": ("sweep.loaded", "Data"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedkin.papers' has no attribute {name!r}")
    home, there = _HOMES[name]
    return getattr(import_module(f"fedkin.{home}"), there)
