"""What a comparison gives: its results, and the table of them, to look at and to write out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedkin.errors import unknown
from fedkin.report import looks, written
from fedkin.report.figures import Figure, LeftOut
from fedkin.report.gather import RunData
from fedkin.report.of_result import ResultData
from fedkin.report.several_runs import COMPARED, MEASURES, figure_of, grouped
from fedkin.report.tables import Sheet, paired_sheet, sheet
from fedkin.rounds import Result
from fedkin.sweep.statistics import Group, summary


class Table(list[dict[str, Any]]):
    """The table of a comparison: a list with a dictionary for each row (a method, an attack, a rule, a cell of the
    grid), with means and standard deviations over seeds, which can be written out and drawn.

    A notebook shows it with its curves."""

    def __init__(self, groups: Sequence[Group], baseline: str | None = None, metric: str = "macro") -> None:
        super().__init__(summary(groups, baseline, metric))
        self._groups, self._baseline, self._metric = list(groups), baseline, metric

    def __repr__(self) -> str:
        return written.straight(self._sheets()[0])

    def _repr_html_(self) -> str:
        return looks.box(self._sheets(), [self._figure("accuracy-per-round")])

    def _sheets(self) -> list[Sheet]:
        """The table and, with a baseline, that of the tests."""
        made = [sheet(self._groups, self._metric, self._baseline)]
        if self._baseline is not None:
            made.append(paired_sheet(self._groups, self._baseline, self._metric))
        return made

    def to_markdown(self, path: str | Path | None = None) -> str:
        """As Markdown, with the tests against the baseline if there is one; also written to a file if one is given."""
        return _given(path, "\n".join(map(written.markdown, self._sheets())))

    def to_latex(self, path: str | Path | None = None) -> str:
        """As LaTeX (booktabs), with the tests against the baseline; also written to a file if one is given."""
        return _given(path, "\n".join(map(written.latex, self._sheets())))

    def to_csv(self, path: str | Path | None = None) -> str:
        """Every number in full, a line for each row; also written to a file if one is given."""
        return _given(path, written.comma_separated(self._groups, self._baseline, self._metric))

    def frame(self) -> Any:
        """A data frame of pandas, with the columns of `to_csv`."""
        return looks.data_frame(written.flat(self._groups, self._baseline, self._metric))

    def plot(self, figure: str = "accuracy-per-round", measure: str = "macro") -> Any:
        """A figure of the report, drawn by matplotlib: the one that this returns, for `savefig` or a notebook.

        "accuracy-per-round" and "accuracy-per-megabyte" (of `measure`: "macro", "worst_decile", "micro",
        "validation_macro", "test_loss" or "train_loss"), "loss-per-round", "spread-over-clients", "gain-over-local",
        "cost-per-phase", "attacker-shares", "epsilon". One that these runs have nothing for is refused, with the
        reason."""
        if figure not in COMPARED:
            raise unknown("figure", figure, COMPARED)
        if measure not in MEASURES:
            raise unknown("measure", measure, MEASURES)
        return looks.drawing(self._figure(figure, measure))

    def _figure(self, name: str, measure: str = "macro") -> Figure | LeftOut:
        sources = [outcome.source for group in self._groups for outcome in group.outcomes]
        runs = [ResultData(s) if isinstance(s, Result) else RunData(s) for s in sources]
        return figure_of(name, grouped(runs), measure)


def _given(path: str | Path | None, text: str) -> str:
    if path is not None:
        written.write(path, text)
    return text


class Comparison(NamedTuple):
    """What `fk.compare` returns, a pair: `results` are those of all runs, `table` says what they say together.

    What the table can, the comparison can, too."""

    results: list[Result]
    table: Table

    def __repr__(self) -> str:
        return f"{len(self.results)} results, and their table:\n{self.table!r}"

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    def to_markdown(self, path: str | Path | None = None) -> str:
        """The table as Markdown; see `Table.to_markdown`."""
        return self.table.to_markdown(path)

    def to_latex(self, path: str | Path | None = None) -> str:
        """The table as LaTeX; see `Table.to_latex`."""
        return self.table.to_latex(path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The table as CSV; see `Table.to_csv`."""
        return self.table.to_csv(path)

    def frame(self) -> Any:
        """The table as a data frame; see `Table.frame`."""
        return self.table.frame()

    def plot(self, figure: str = "accuracy-per-round", measure: str = "macro") -> Any:
        """A figure of all runs; see `Table.plot`."""
        return self.table.plot(figure, measure)
