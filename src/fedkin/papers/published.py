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
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from fedkin.config import Config, make_config
from fedkin.errors import DataError, UsageError, unknown
from fedkin.papers.measures import METRICS, metric_of

NATURAL = "natural"
NAMES = ("c-pfl", "pfedcs", "fedcap", "co-pfl", "fedpkda", "claims", NATURAL)
NO_DATA = "data not available"
Axis = Literal["rows", "columns", "none"]

PAPER_KEYS = {"name", "title", "cite", "about", "found", "settled", "settings", "named", "changed", "table"}
TABLE_KEYS = {
    "name",
    "title",
    "kind",
    "about",
    "metric",
    "methods",
    "settings",
    "missing",
    "reading",
    "ratio_to",
    "drop_from",
    "row",
    "column",
    "cell",
    "check",
}
LINE_KEYS = {"group", "name", "use", "set", "metric", "missing", "note", "reading", "best_of", "ratio_to", "drop_from"}
CELL_KEYS = {"row", "column", "set", "metric", "missing", "note", "reading", "best_of"}
CHANGED_KEYS = {"what", "where", "made_by", "was"}
CHECK_KEYS = {"says", "left", "right", "by", "at_least", "target", "within", "where", "found"}


@dataclass(frozen=True, eq=False)
class Line:
    """A row or a column: what it is called and what it sets."""

    group: str
    name: str
    raw: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"{self.group} {self.name}".strip()

    def matches(self, word: str) -> bool:
        """Whether somebody who says `word` means this line: its name, its group, or both."""
        wanted = word.strip().lower()
        return wanted in (self.name.lower(), self.group.lower(), self.title.lower())


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


@dataclass(frozen=True, eq=False)
class Table:
    paper: str
    name: str
    title: str
    kind: Literal["table", "claim", "comparison", "choice"]
    about: str
    methods: Axis
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]
    cells: tuple[Cell, ...]
    checks: tuple[Check, ...]

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
    where: Mapping[str, Any]
    made_by: frozenset[str] = frozenset()
    was: Mapping[str, Any] = field(default_factory=dict)

    def touches(self, cell: Cell) -> bool:
        runs = [config.to_dict() for config in cell.variants]
        return any(all(run[key] == value for key, value in self.where.items()) for run in runs)

    def before(self, cell: Cell) -> Cell | None:
        """The cell as it was defined then, if that was otherwise."""
        if not (self.was and self.touches(cell)):
            return None
        return replace(cell, variants=tuple(replace(config, **self.was) for config in cell.variants))


@dataclass(frozen=True, eq=False)
class Paper:
    """`found`: what came out of it here, in a few sentences. `settled`: readings that were changed after a number was
    measured, but that the paper's words or the authors' code decide."""

    name: str
    title: str
    cite: str
    about: str
    found: str
    tables: tuple[Table, ...]
    changed: tuple[Changed, ...] = ()
    settled: tuple[str, ...] = ()

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
    for remembered in (load_paper, _config, _checked_options):
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
    _keys(raw, PAPER_KEYS, where)
    paper = _text(raw, "name", where)
    named = _mapping(raw.get("named", {}), f"{where}: named")
    base = _mapping(raw.get("settings", {}), f"{where}: settings")
    tables = raw.get("table")
    if not isinstance(tables, list) or not tables:
        raise DataError(f"{where}: no [[table]]")
    read = tuple(_table(t, paper, base, named, where) for t in tables)
    _unique([t.name for t in read], f"{where}: table")
    about, found = (" ".join(str(raw.get(key, "")).split()) for key in ("about", "found"))
    changed = tuple(_changed(entry, f"{where}: changed") for entry in raw.get("changed", []))
    settled = tuple(" ".join(str(text).split()) for text in raw.get("settled", []))
    return Paper(paper, _text(raw, "title", where), _text(raw, "cite", where), about, found, read, changed, settled)


def _changed(raw: Any, where: str) -> Changed:
    _keys(_mapping(raw, where), CHANGED_KEYS, where)
    settings = {key: _mapping(raw.get(key, {}), f"{where}: {key}") for key in ("where", "was")}
    for key, values in settings.items():
        _keys(values, set(Config().to_dict()), f"{where}: {key}")
    made_by = frozenset(map(str, raw.get("made_by", [])))
    if not settings["where"] or bool(made_by) == bool(settings["was"]):
        raise DataError(f"{where}: say in which cells (where), and either made_by or was")
    return Changed(_text(raw, "what", where), settings["where"], made_by, settings["was"])


def _table(raw: Any, paper: str, base: Mapping[str, Any], named: Mapping[str, Any], where: str) -> Table:
    name = _text(_mapping(raw, f"{where}: table"), "name", f"{where}: table")
    where = f"{where}: {name}"
    _keys(raw, TABLE_KEYS, where)
    methods = raw.get("methods", "rows")
    if methods not in ("rows", "columns", "none"):
        raise DataError(f"{where}: methods = {methods!r}: accepts rows, columns, none")
    kind = raw.get("kind", "table")
    if kind not in ("table", "claim", "comparison", "choice"):
        raise DataError(f"{where}: kind = {kind!r}: accepts table, claim, comparison, choice")
    columns = [_line(c, f"{where}: column", LINE_KEYS) for c in raw.get("column", [])]
    rows = [_line(r, f"{where}: row", LINE_KEYS | {"numbers"}) for r in raw.get("row", [])]
    if not rows or not columns:
        raise DataError(f"{where}: needs at least one [[table.row]] and one [[table.column]]")
    for lines, what in ((rows, "row"), (columns, "column")):
        _unique([line.title for line in lines], f"{where}: {what}")
    extra = _extras(raw.get("cell", []), rows, columns, where)
    cells: list[Cell] = []
    for row in rows:
        numbers = row.raw.get("numbers")
        if not isinstance(numbers, list) or len(numbers) != len(columns):
            found = len(numbers) if isinstance(numbers, list) else "no"
            raise DataError(f"{where}: row {row.title!r} has {found} numbers for {len(columns)} columns")
        for column, number in zip(columns, numbers, strict=True):
            if number != "-":
                more = extra.get((row.title, column.title), {})
                cells.append(_cell(raw, row, column, number, more, base, named, where))
    about = " ".join(str(raw.get("about", "")).split())
    checks = tuple(_checks(raw, rows, columns, methods, where))
    table = Table(
        paper, name, _text(raw, "title", where), kind, about, methods, tuple(rows), tuple(columns), tuple(cells), checks
    )
    for cell in cells:
        if (cell.ratio_to or cell.drop_from) and table.base_of(cell) is None and not _is_base(table, cell):
            raise DataError(
                f"{where}: {cell.row!r}, {cell.column!r} refers to {cell.ratio_to or cell.drop_from!r}, "
                "which is no cell of the table"
            )
    return table


def _is_base(table: Table, cell: Cell) -> bool:
    other = cell.ratio_to or cell.drop_from
    names = {cell.row, cell.column, *(r.name for r in table.rows if r.title == cell.row)}
    return other in names


def _line(raw: Any, where: str, keys: set[str]) -> Line:
    entry = _mapping(raw, where)
    name = _text(entry, "name", where)
    _keys(entry, keys, f"{where} {name!r}")
    if "metric" in entry:
        metric_of(entry["metric"])
    return Line(str(entry.get("group", "")), name, entry)


def _extras(
    raw: Any, rows: Sequence[Line], columns: Sequence[Line], where: str
) -> dict[tuple[str, str], Mapping[str, Any]]:
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for entry in raw:
        _keys(_mapping(entry, f"{where}: cell"), CELL_KEYS, f"{where}: cell")
        at = (_text(entry, "row", f"{where}: cell"), _text(entry, "column", f"{where}: cell"))
        for name, lines, what in ((at[0], rows, "row"), (at[1], columns, "column")):
            if name not in [line.title for line in lines]:
                raise DataError(f"{where}: a cell names the {what} {name!r}, which the table has not")
        if at in found:
            raise DataError(f"{where}: cell {at[0]!r}, {at[1]!r} stands there twice")
        found[at] = entry
    return found


def _cell(
    table: Mapping[str, Any],
    row: Line,
    column: Line,
    number: Any,
    extra: Mapping[str, Any],
    base: Mapping[str, Any],
    named: Mapping[str, Any],
    where: str,
) -> Cell:
    at = f"{where}: {row.title!r}, {column.title!r}"
    if number != "?" and (isinstance(number, bool) or not isinstance(number, int | float) or number != number):
        raise DataError(f'{at}: {number!r} is no number; write "?" where the paper prints none, "-" for no cell')
    layers = (extra, column.raw, row.raw, table)
    metric = next((str(part["metric"]) for part in layers if "metric" in part), "")
    if not metric:
        raise DataError(f"{at}: no metric; known: {', '.join(METRICS)}")
    metric_of(metric)
    settings: dict[str, Any] = {}
    for part in (base, table.get("settings", {}), *_used(row, column, named, at)):
        settings = merged(settings, part)
    for part in (row.raw, column.raw, extra):
        settings = merged(settings, part.get("set", {}))
    tries: list[dict[str, Any]] = next((part["best_of"] for part in layers if "best_of" in part), [{}])
    missing = next((str(part["missing"]) for part in layers if "missing" in part), "")
    note = "; ".join(str(part["note"]) for part in (row.raw, column.raw, extra) if "note" in part)
    reading = "; ".join(str(part["reading"]) for part in (table, row.raw, column.raw, extra) if "reading" in part)
    variants: list[Config] = []
    for attempt in tries:
        try:
            config, lacking = _config(json.dumps(merged(settings, attempt), sort_keys=True))
        except UsageError as error:
            raise DataError(f"{at}: {error}") from None
        variants.append(config)
        missing = missing or lacking
    refer = {key: next((str(p[key]) for p in layers if key in p), "") for key in ("ratio_to", "drop_from")}
    if all(refer.values()):
        raise DataError(f"{at}: ratio_to and drop_from exclude each other")
    return Cell(
        row.title,
        column.title,
        None if number == "?" else float(number),
        metric,
        tuple(variants),
        missing,
        note,
        reading=reading,
        **refer,
    )


def _used(row: Line, column: Line, named: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    for line in (row, column):
        for word in line.raw.get("use", []):
            name = str(word).replace("{group}", row.group)
            if name not in named:
                raise DataError(f"{where}: {unknown('named settings', name, named)}")
            yield _mapping(named[name], f"{where}: named {name!r}")


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others on top; the options of each method are merged one by one."""
    options = {m: dict(o) for m, o in first.get("options", {}).items()}
    for method, given in second.get("options", {}).items():
        options[method] = {**options.get(method, {}), **given}
    return {**first, **second, "options": options}


@cache
def _config(settings: str) -> tuple[Config, str]:
    """The checked configuration of a run (settings as JSON: many cells share theirs), and what is missing to run it.
    Raises where something is wrong, not missing: an unknown key, a value out of range, an option the method has not."""
    from fedkin.data import SOURCES, parse_partition
    from fedkin.methods import METHODS
    from fedkin.models import MODELS
    from fedkin.robust import ATTACKS, RULES, make_attack, make_rule
    from fedkin.rounds import named_spec

    values = json.loads(settings)
    options = values.pop("options", {})
    method = str(values.get("method", ""))
    if not method:
        raise UsageError("no method")
    if "rule" in values:
        values["rule"] = str(values["rule"]).replace("{malicious}", f"{values.get('malicious', 0.3):g}")
    config = make_config({**values, "options": options.get(method, {})}, given=())  # settings are for whole tables
    parse_partition(config.partition)
    for other, given in options.items():
        if other in METHODS:
            _checked_options(other, json.dumps(given, sort_keys=True))
    lacking = [
        f"{what}: {name}"
        for what, name, registry in (
            (NO_DATA, config.data, SOURCES),
            ("method not there yet", method, METHODS),
            ("model not there yet", config.model, MODELS),
            ("attack not there yet", named_spec(config.attack)[0], {**ATTACKS, "none": None}),
            ("rule not there yet", named_spec(config.rule)[0], RULES),
        )
        if name is not None and name not in registry
    ]
    if lacking:
        return config, "; ".join(lacking)
    if config.attack != "none":
        make_attack(*named_spec(config.attack))
    make_rule(*named_spec(config.rule))
    return canonical(config), ""


@cache
def _checked_options(method: str, given: str) -> dict[str, Any]:
    from fedkin.methods import METHODS, options_of

    return asdict(options_of(METHODS[method], json.loads(given), method))


def spelled_out(config: Config) -> dict[str, Any]:
    """All settings and options of a run by name, with what the method itself decides."""
    from fedkin.methods import METHODS

    options = _checked_options(config.method, json.dumps(config.options, sort_keys=True))
    point = METHODS[config.method].eval_point if config.eval_point == "auto" else config.eval_point
    return {**config.to_dict(), **options, "options": None, "eval_point": point}


def canonical(config: Config) -> Config:
    """The same run in the fewest words, so that cells which share a run also share its identity: options only where
    they differ from the method's own, nothing about attackers where there are none."""
    given = {k.replace("-", "_"): v for k, v in config.options.items()}
    profile = {"profile": given["profile"]} if given.get("profile", "paper") != "paper" else {}
    usual, resolved = (_checked_options(config.method, json.dumps(o, sort_keys=True)) for o in (profile, given))
    options = {**profile, **{k: v for k, v in resolved.items() if v != usual[k]}}
    idle: dict[str, Any] = {"malicious": 0.3, "knowledge": "full", "attackers": "fixed"}
    return replace(config, options=options, **(idle if config.attack == "none" else {}))


def _checks(
    raw: Mapping[str, Any], rows: Sequence[Line], columns: Sequence[Line], methods: Axis, where: str
) -> Iterator[Check]:
    compared, others = (columns, rows) if methods == "columns" else (rows, columns)
    names = {n for line in compared for n in (line.name, line.title)}
    groups = {line.group for line in compared}
    elsewhere = {f"{group} {line.title}".strip() for line in others for group in (*groups, "")}
    for entry in raw.get("check", []):
        _keys(_mapping(entry, f"{where}: check"), CHECK_KEYS, f"{where}: check")
        says, left = _text(entry, "says", f"{where}: check"), _text(entry, "left", f"{where}: check")
        right, places = tuple(entry.get("right", [])), tuple(entry.get("where", []))
        for name in (left, *(r for r in right if r != "*")):
            if name not in names:
                raise DataError(f"{where}: check {says!r}: {unknown('line', name, names)}")
        for name in places:
            if name not in elsewhere:
                raise DataError(f"{where}: check {says!r}: {unknown('line', name, elsewhere)}")
        if bool(right) + ("at_least" in entry) + ("target" in entry) != 1:
            raise DataError(f"{where}: check {says!r}: give right, or at_least, or target")
        least, target, within = (
            None if entry.get(k) is None else float(entry[k]) for k in ("at_least", "target", "within")
        )
        if target is not None and within is None:
            raise DataError(f"{where}: check {says!r}: target needs within: how near counts")
        yield Check(
            says, left, right, float(entry.get("by", 0.0)), least, within, places, str(entry.get("found", "")), target
        )


def _keys(raw: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in raw:
        if key not in known:
            raise DataError(f"{where}: {unknown('key', key, known)}")


def _text(raw: Mapping[str, Any], key: str, where: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str) or not value:
        raise DataError(f"{where}: {key!r} is missing")
    return value


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise DataError(f"{where}: a table is needed, not {value!r}")
    return value


def _unique(names: Sequence[str], what: str) -> None:
    for i, name in enumerate(names):
        if name in names[:i]:
            raise DataError(f"{what} {name!r} stands there twice")
