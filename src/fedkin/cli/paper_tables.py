"""A paper's tables on the screen and in files, ours beside the paper's, and how a reproduction ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.markup import escape

from fedkin.cli.console import complain, messages, print_json, screen
from fedkin.cli.console import table as drawn
from fedkin.errors import DataError, FedKinError

if TYPE_CHECKING:
    from rich.table import Table as Drawn

    from fedkin.papers.runner import Session


def show(
    session: Session, facts: dict[str, Any], json: bool, save: str | None, markdown: str | None, html: str | None
) -> None:
    from fedkin.papers.html_page import html_page
    from fedkin.papers.markdown import markdown as table_text
    from fedkin.papers.result_files import save as save_files
    from fedkin.papers.table_records import records
    from fedkin.papers.verdicts import rankings, summary, verdicts

    found = records(session.plan, session.outcome, session.failed)
    if json:
        print_json(
            {
                "plan": {k: v for k, v in facts.items() if k != "todo"},
                "tables": [
                    {**r, "summary": summary(r), "rankings": rankings(r), "verdicts": verdicts(r)} for r in found
                ],
                "ran": session.ran,
                "run_before": session.skipped,
                "left": session.left,
                "failed": session.failed,
            }
        )
    else:
        for record in found:
            _print_record(record)
    title = f"{session.plan.paper.title}: the paper's numbers and ours"
    _write(markdown, lambda: "\n".join(table_text(r) for r in found))
    _write(html, lambda: html_page(found, title))
    for path in save_files(found, save) if save else ():
        messages().print(f"saved {escape(str(path))}")
    _close(session)


def _write(path: str | None, text: Callable[[], str]) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(text(), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
    messages().print(f"wrote {escape(path)}")


def _close(session: Session) -> None:
    """How it ended, for people and for the shell."""
    if session.interrupted:
        complain(f"stopped by Ctrl-C with {session.left} runs to go; the same command takes it up again")
        raise typer.Exit(130)
    if session.left:
        messages().print(f"[yellow]the budget is used up; {session.left} runs are left: the same command goes on[/]")
    if session.failed:
        complain(f"{len(session.failed)} of {len(session.failed) + session.ran} runs failed")
        raise typer.Exit(1)
    if not session.plan.runnable and not any(session.outcome(c) for p in session.plan.cells for v in p.runs for c in v):
        raise FedKinError("none of these cells can be run here")


def _print_record(record: dict[str, Any]) -> None:
    from fedkin.papers.markdown import evaluation, number, ours_of, remarks, signed
    from fedkin.papers.verdicts import close, difference, summary

    cells = {(c["row"], c["column"]): c for c in record["cells"]}
    columns = [c["title"] for c in record["columns"] if any(k[1] == c["title"] for k in cells)]
    title = record["title"] + (" (quick: the numbers mean nothing)" if record["quick"] else "")
    heads = {c: escape(_with_point(record, "column", c)) for c in columns}
    beside = "; below it the paper's number and the difference" * any(c["paper"] is not None for c in cells.values())
    made: Drawn = drawn(
        escape(title), "", *heads.values(), right=list(heads.values()), caption=f"ours ± std over seeds{beside}"
    )
    for row in (r["title"] for r in record["rows"] if any(k[0] == r["title"] for k in cells)):
        shown = []
        for column in columns:
            cell = cells.get((row, column))
            if cell is None:
                shown.append("")
                continue
            paper = number(cell["paper"], cell["unit"]) if cell["paper"] is not None else ""
            gap = signed(difference(cell), cell["unit"])
            colour = {True: "green", False: "red", None: "default"}[close(cell)]
            shown.append(f"[{colour}]{ours_of(cell)}[/]\n[dim]{paper} {gap}[/]")
        made.add_row(escape(_with_point(record, "row", row)), *shown)
    out = screen()
    if evaluation(record):
        out.print(escape(evaluation(record)), soft_wrap=True)
    out.print(made)
    facts = summary(record)
    if facts["compared"]:
        out.print(f"{facts['close']} of {facts['compared']} cells within two points (or a fifth) of the paper")
    for text in remarks(record):
        out.print(escape(text.replace("**", "").replace("`", "")), soft_wrap=True)
    out.print()


def _with_point(record: dict[str, Any], axis: str, title: str) -> str:
    from fedkin.papers.markdown import point_at

    point = point_at(record, axis, title)
    return f"{title} ({point})" if point else title
