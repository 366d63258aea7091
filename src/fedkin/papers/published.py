"""The tables of the papers, read from TOML and checked: every cell ends up with the settings of its runs.

A file is one paper: `[settings]` for all its tables, `[named.X]` sets that rows and columns take by `use`, and
`[[table]]` with `[[table.column]]`, `[[table.row]]` (with `numbers`, one per column) and, where rows and columns do not
say enough, `[[table.cell]]`. Settings are those of `fedkin run`; `options` holds a table for each method. Later ones
win: the file's, the table's, those used by the row and the column, then what row, column and cell set themselves. In
`use`, {group} is the row's group; in `rule`, {malicious} is the share of malicious clients. `best_of` lists settings of
which the best counts. `reading` says how the paper is read where that was chosen after measuring, because it fits:
numbers under such a reading are counted apart; readings that were changed because the paper's words or the authors'
code say so stand in the paper's `settled`. A number is what the paper prints; "?": the paper draws it only, we run it;
"-": no such cell.

`[[changed]]` says what FedKin does otherwise since some numbers of a paper were made (`Changed`).

A cell that cannot be run says why (`missing`); what is missing is looked up in the registries, so that a cell becomes
runnable by itself once its method, rule, attack, model or data set is there.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from fedkin.config import Config
from fedkin.errors import DataError, UsageError, unknown
from fedkin.papers.cell_settings import checked_config, checked_options, merged
from fedkin.papers.measures import METRICS, metric_of
from fedkin.papers.schema import called, read_table

NATURAL = "natural"
NAMES = ("c-pfl", "pfedcs", "fedcap", "co-pfl", "fedpkda", "claims", NATURAL)
Axis = Literal["rows", "columns", "none"]
Kind = Literal["table", "claim", "comparison", "choice"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Said:
    """What a table, a row, a column or a cell may say of the cells in it."""

    metric: str = ""
    missing: str = ""
    reading: str = ""
    ratio_to: str = ""
    drop_from: str = ""
    best_of: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.metric:
            metric_of(self.metric)


@dataclass(frozen=True, eq=False, kw_only=True)
class Line(Said):
    """A row or a column: what it is called and what it sets."""

    group: str = ""
    name: str
    use: tuple[str, ...] = ()
    set: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.group} {self.name}".strip()

    def matches(self, word: str) -> bool:
        """Whether somebody who says `word` means this line: its name, its group, or both."""
        wanted = word.strip().lower()
        return wanted in (self.name.lower(), self.group.lower(), self.title.lower())


@dataclass(frozen=True, eq=False, kw_only=True)
class Row(Line):
    numbers: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Check:
    """What must hold along the methods: `left` above (`by` points), or `within` so much of, every one of `right`; or
    `at_least` so much; or `within` so much of `target`. In the lines `where` (titles, after the methods' group if only
    one is meant); everywhere if empty. Of metrics where less is better, below. `found`: what came out where it is known
    not to hold."""

    says: str
    left: str
    right: tuple[str, ...] = ()
    by: float = 0.0
    at_least: float | None = None
    within: float | None = None
    where: tuple[str, ...] = ()
    found: str = ""
    target: float | None = None


@dataclass(frozen=True, eq=False)
class Cell:
    """One number of a table. `variants`: the settings of its runs, seed aside; of several the best counts."""

    row: str
    column: str
    printed: float | None
    metric: str
    variants: tuple[Config, ...]
    missing: str
    note: str
    ratio_to: str = ""  # the cell is a multiple of the one of this method
    drop_from: str = ""  # the cell is what is lost against the one in this line
    reading: str = ""  # how the paper is read, where that was chosen after measuring


@dataclass(frozen=True, eq=False, kw_only=True)
class CellText(Said):
    """What a file says of a single cell, on top of its row and its column."""

    row: str
    column: str
    set: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class TableText(Said):
    """A table as a file has it."""

    name: str
    title: str
    kind: Kind = "table"
    about: str = ""
    methods: Axis = "rows"
    settings: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = called("row")
    columns: tuple[Line, ...] = called("column")
    checks: tuple[Check, ...] = called("check", default=())
    singles: tuple[CellText, ...] = called("cell", default=())


@dataclass(frozen=True, eq=False, kw_only=True)
class Table(TableText):
    """A table with its cells."""

    paper: str
    cells: tuple[Cell, ...]

    def cell(self, row: str, column: str) -> Cell | None:
        return next((c for c in self.cells if (c.row, c.column) == (row, column)), None)

    def base_of(self, cell: Cell) -> Cell | None:
        """The cell that this one is compared with, if any."""
        other = cell.ratio_to or cell.drop_from
        if not other:
            return None
        along_rows = (self.methods == "rows") == bool(cell.ratio_to)
        group = next(r.group for r in self.rows if r.title == cell.row)
        if along_rows:
            found = self.cell(other, cell.column) or self.cell(f"{group} {other}", cell.column)
        else:
            found = self.cell(cell.row, other)
        return found if found is not cell else None

    def select(self, rows: Sequence[str], columns: Sequence[str]) -> list[Cell]:
        """The cells in these rows and columns (all, where nothing is named)."""
        kept_rows = {line.title for line in chosen(self.rows, rows, f"row of {self.name}")}
        kept_columns = {line.title for line in chosen(self.columns, columns, f"column of {self.name}")}
        return [c for c in self.cells if c.row in kept_rows and c.column in kept_columns]


@dataclass(frozen=True, eq=False)
class Changed:
    """What is done otherwise since numbers were made, in cells with the settings `where`. A number is older if one of
    the revisions `made_by` made it, or if it has the settings that the cell had then (`was`)."""

    what: str
    where: Mapping[str, Any] = field(default_factory=dict)
    made_by: tuple[str, ...] = ()
    was: Mapping[str, Any] = field(default_factory=dict)

    def touches(self, cell: Cell) -> bool:
        runs = [config.to_dict() for config in cell.variants]
        return any(all(run[key] == value for key, value in self.where.items()) for run in runs)

    def before(self, cell: Cell) -> Cell | None:
        """The cell as it was defined then, if that was otherwise."""
        if not (self.was and self.touches(cell)):
            return None
        return replace(cell, variants=tuple(replace(config, **self.was) for config in cell.variants))


@dataclass(frozen=True, eq=False, kw_only=True)
class PaperText:
    """A paper as a file has it. `found`: what came out of it here, in a few sentences. `settled`: readings that were
    changed after a number was measured, but that the paper's words or the authors' code decide."""

    name: str
    title: str
    cite: str
    tables: tuple[TableText, ...] = called("table")
    about: str = ""
    found: str = ""
    settled: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    named: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    changed: tuple[Changed, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Paper(PaperText):
    tables: tuple[Table, ...]

    def table(self, name: str) -> Table:
        wanted = name.lower().replace(" ", "")
        for table in self.tables:
            if table.name == wanted:
                return table
        raise unknown(f"table of {self.name}", name, [t.name for t in self.tables])


def chosen(lines: Sequence[Line], words: Sequence[str], kind: str) -> list[Line]:
    if not words:
        return list(lines)
    for word in words:
        if not any(line.matches(word) for line in lines):
            raise unknown(kind, word, {n for line in lines for n in (line.title, line.name, line.group) if n})
    return [line for line in lines if any(line.matches(word) for word in words)]


# ------------------------------------------------------------ reading


@cache
def load_paper(name: str) -> Paper:
    """One of the papers by name, from the package. Later methods and data sets count if they came before this."""
    return parse(_packaged(name), f"{name.replace('-', '_')}.toml")


def table_names(name: str) -> list[str]:
    """The tables of a paper in their order, without reading what is in them."""
    return [str(t["name"]) for t in tomllib.loads(_packaged(name))["table"]]


def _packaged(name: str) -> str:
    if name not in NAMES:
        raise unknown("paper", name, NAMES)
    return (files("fedkin.papers") / f"{name.replace('-', '_')}.toml").read_text(encoding="utf-8")


def forget() -> None:
    """Read everything anew the next time: after a method, rule or data set was registered."""
    for remembered in (load_paper, checked_config, checked_options):
        remembered.cache_clear()


def load_file(path: str | Path) -> Paper:
    """A paper of one's own, in the same form."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"), str(path))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not valid UTF-8: {error}") from None


def parse(text: str, where: str) -> Paper:
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"{where} is not valid TOML: {error}") from None
    paper = read_table(PaperText, raw, where)
    _unique([t.name for t in paper.tables], f"{where}: table")
    for change in paper.changed:
        _check_changed(change, f"{where}: changed")
    tables = tuple(_table(text, paper, f"{where}: {text.name}") for text in paper.tables)
    return Paper(**{**vars(paper), "tables": tables})


def _check_changed(change: Changed, where: str) -> None:
    known = Config().to_dict()
    for key in (*change.where, *change.was):
        if key not in known:
            raise DataError(f"{where}: {unknown('key', key, known)}")
    if not change.where or bool(change.made_by) == bool(change.was):
        raise DataError(f"{where}: say in which cells (where), and either made_by or was")


def _table(text: TableText, paper: PaperText, where: str) -> Table:
    for lines, what in ((text.rows, "row"), (text.columns, "column")):
        _unique([line.title for line in lines], f"{where}: {what}")
    extra = _extras(text, where)
    cells: list[Cell] = []
    for row in text.rows:
        if len(row.numbers) != len(text.columns):
            found = f"{len(row.numbers) or 'no'} numbers for {len(text.columns)} columns"
            raise DataError(f"{where}: row {row.title!r} has {found}")
        for column, number in zip(text.columns, row.numbers, strict=True):
            if number != "-":
                more = extra.get((row.title, column.title)) or CellText(row=row.title, column=column.title)
                cells.append(_cell(paper, text, row, column, more, number, where))
    for check in text.checks:
        _check_check(check, text, f"{where}: check {check.says!r}")
    table = Table(**vars(text), paper=paper.name, cells=tuple(cells))
    for cell in cells:
        other = cell.ratio_to or cell.drop_from
        if other and table.base_of(cell) is None and not _is_base(table, cell, other):
            raise DataError(
                f"{where}: {cell.row!r}, {cell.column!r} refers to {other!r}, which is no cell of the table"
            )
    return table


def _is_base(table: Table, cell: Cell, other: str) -> bool:
    return other in {cell.row, cell.column, *(r.name for r in table.rows if r.title == cell.row)}


def _extras(text: TableText, where: str) -> dict[tuple[str, str], CellText]:
    """What the file says of single cells, by row and column."""
    _unique([f"{cell.row}, {cell.column}" for cell in text.singles], f"{where}: cell")
    for cell in text.singles:
        for name, lines, what in ((cell.row, text.rows, "row"), (cell.column, text.columns, "column")):
            if name not in [line.title for line in lines]:
                raise DataError(f"{where}: a cell names the {what} {name!r}, which the table has not")
    return {(cell.row, cell.column): cell for cell in text.singles}


def _cell(
    paper: PaperText, table: TableText, row: Line, column: Line, extra: CellText, number: Any, where: str
) -> Cell:
    at = f"{where}: {row.title!r}, {column.title!r}"
    if number != "?" and (isinstance(number, bool) or not isinstance(number, int | float) or number != number):
        raise DataError(f'{at}: {number!r} is no number; write "?" where the paper prints none, "-" for no cell')

    def first(key: str) -> Any:
        """What the nearest says that says it."""
        return next((said for part in (extra, column, row, table) if (said := getattr(part, key))), "")

    if not first("metric"):
        raise DataError(f"{at}: no metric; known: {', '.join(METRICS)}")
    if first("ratio_to") and first("drop_from"):
        raise DataError(f"{at}: ratio_to and drop_from exclude each other")
    layers = [paper.settings, table.settings, *_used(row, column, paper.named, at), row.set, column.set, extra.set]
    settings: dict[str, Any] = reduce(merged, layers, {})
    missing, variants = first("missing"), list[Config]()
    attempt: Mapping[str, Any]
    for attempt in first("best_of") or ({},):
        try:
            config, lacking = checked_config(json.dumps(merged(settings, attempt), sort_keys=True))
        except UsageError as error:
            raise DataError(f"{at}: {error}") from None
        variants.append(config)
        missing = missing or lacking
    return Cell(
        row.title,
        column.title,
        None if number == "?" else float(number),
        first("metric"),
        tuple(variants),
        missing,
        note="; ".join(part.note for part in (row, column, extra) if part.note),
        ratio_to=first("ratio_to"),
        drop_from=first("drop_from"),
        reading="; ".join(part.reading for part in (table, row, column, extra) if part.reading),
    )


def _used(row: Line, column: Line, named: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    for line in (row, column):
        for word in line.use:
            name = word.replace("{group}", row.group)
            if name not in named:
                raise DataError(f"{where}: {unknown('named settings', name, named)}")
            yield named[name]


def _check_check(check: Check, table: TableText, where: str) -> None:
    along, others = (table.columns, table.rows) if table.methods == "columns" else (table.rows, table.columns)
    names = {n for line in along for n in (line.name, line.title)}
    groups = {line.group for line in along}
    elsewhere = {f"{group} {line.title}".strip() for line in others for group in (*groups, "")}
    compared = (check.left, *(name for name in check.right if name != "*"))
    for words, known in ((compared, names), (check.where, elsewhere)):
        for name in words:
            if name not in known:
                raise DataError(f"{where}: {unknown('line', name, known)}")
    if bool(check.right) + (check.at_least is not None) + (check.target is not None) != 1:
        raise DataError(f"{where}: give right, or at_least, or target")
    if check.target is not None and check.within is None:
        raise DataError(f"{where}: target needs within: how near counts")


def _unique(names: Sequence[str], what: str) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise DataError(f"{what} {name!r} stands there twice")
