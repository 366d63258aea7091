"""Reports: one self-contained HTML page for a run or for many, and the figures as files.

The page needs no network and nothing beside it. Whatever comes from a run folder is text to it, never markup."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedkin.errors import DataError, UsageError, unknown
from fedkin.report import overview, svg
from fedkin.report.figures import Figure, Heat, LeftOut
from fedkin.report.gather import RunData
from fedkin.report.one_run import MATRIX_BUDGET, details
from fedkin.report.palette import HEAT, css
from fedkin.report.several_runs import Group, compared, grouped, name_of
from fedkin.runs.folder import REPORT, RunFolder

FORMATS = ("html", "png", "svg")
MOST_DETAILED = 6  # groups whose own figures are in the report of many runs
WIDEST_SLIDER = 300  # clients; above that a picture of the last round has to do
TEMPLATES = Path(__file__).parent / "templates"
Sections = list[tuple[Group | None, list[Figure | LeftOut]]]


def write_report(
    runs: Sequence[RunFolder], to: str | Path | None = None, formats: Sequence[str] = ("html",)
) -> tuple[list[Path], list[LeftOut]]:
    """The report of one run or of several; returns the files and what was left out.

    `to`: a folder; without it a single run's report goes into its own. `formats`: "html" (one page), "png" and "svg" (a
    file for each figure)."""
    if not runs:
        raise UsageError("a report needs at least one run: name it, or say last")
    for name in formats:
        if name not in FORMATS:
            raise unknown("format", name, FORMATS)
    data = [RunData(folder) for folder in {folder.path: folder for folder in runs}.values()]
    if to is None and len(data) > 1:
        raise UsageError("a report of several runs needs a folder to go to: give --to DIR")
    target = data[0].folder.path if to is None else Path(to)
    groups = grouped(data)
    sections = _sections(groups)
    gaps = [part for _, parts in sections for part in parts if isinstance(part, LeftOut)]
    files: list[Path] = []
    if "html" in formats:
        files.append(_write(target / REPORT, _page(groups, sections).encode()))
    pictures = target / "figures" if to is None else target
    for kind in ("png", "svg"):
        if kind in formats:
            files += [_write(pictures / f"{name}.{kind}", content) for name, content in _files(sections, kind)]
    return files, gaps


def _sections(groups: Sequence[Group]) -> Sections:
    """First what compares all, then each group's own (of its first seed), as far as there is room."""
    room = MATRIX_BUDGET // min(len(groups), MOST_DETAILED)
    own = ((group, details(group.members[0], room)) for group in _one_of_each_first(groups))
    if len(groups) > 1:
        own = ((group, parts) for group, parts in own if any(isinstance(part, Figure) for part in parts))
    return [(None, compared(groups)), *islice(own, MOST_DETAILED)]


def _one_of_each_first(groups: Sequence[Group]) -> list[Group]:
    """A group of every method, under attack if there is one, before the second of any."""
    turn: dict[str, int] = {}
    ranked = []
    for group in sorted(groups, key=lambda g: g.members[0].info.attack == "none"):
        turn[group.row] = turn.get(group.row, -1) + 1
        ranked.append((turn[group.row], groups.index(group), group))
    return [group for _, _, group in sorted(ranked, key=lambda item: item[:2])]


def _files(sections: Sections, kind: Literal["png", "svg"]) -> Iterator[tuple[str, bytes]]:
    for group, parts in sections:
        prefix = "" if group is None or len(sections) == 2 else re.sub(r"[^A-Za-z0-9]+", "-", name_of(group))[:60] + "-"
        for part in parts:
            if isinstance(part, Figure):
                yield f"{prefix}{part.name}", svg.save(svg.draw(part), kind)


def _write(path: Path, content: bytes) -> Path:
    """All of it or nothing; a link in the way is replaced, not followed."""
    try:
        if path.parent.is_symlink():
            raise DataError(f"{path.parent} is a link; give --to a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".report-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from None
    return path


def _page(groups: Sequence[Group], sections: Sections) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    pages = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: svg.printable(value) if type(value) is str else value,
    )
    script, style = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("report.js", "report.css"))
    blocks = [_block(index, group, parts) for index, (group, parts) in enumerate(sections)]
    return pages.get_template("report.html").render(
        **overview.tables(groups),
        blocks=blocks,
        cut=len(sections) > MOST_DETAILED,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=version("fedkin"),
        style=Markup(css() + style),
        script=Markup(script),
        heat=HEAT if any(part.get("frames") for block in blocks for part in block["shown"]) else (),
        allowed=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _block(index: int, group: Group | None, parts: Sequence[Figure | LeftOut]) -> dict[str, Any]:
    from markupsafe import Markup

    shown: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, LeftOut):
            shown.append({"title": part.title, "why": part.why})
            continue
        key = f"s{index}-{part.name}"
        drawing = svg.inline_svg(svg.draw(part), part.alt, key)
        words = {"title": part.title, "caption": part.caption, "key": key, "why": ""}
        shown.append({**words, "svg": Markup(drawing), "frames": _frames(part)})
    if group is None:
        return {"name": "", "run": "", "shown": shown}
    return {"name": name_of(group), "run": group.members[0].info.id, "shown": shown}


def _frames(figure: Figure) -> dict[str, Any] | None:
    """A collaboration matrix for the slider: one byte a weight, 255 where there is none."""
    panel = figure.panels[0]
    if (
        figure.frames is None
        or not isinstance(panel, Heat)
        or len(figure.frames) < 2
        or len(panel.rows) > WIDEST_SLIDER
    ):
        return None
    ordered = figure.frames[:, panel.order][:, :, panel.order]
    scaled = np.clip(np.nan_to_num(ordered / panel.most, posinf=1.0), 0, 1)
    bytes_ = np.where(np.isfinite(ordered), np.round(254 * scaled), 255).astype(np.uint8)
    return {
        "rounds": figure.rounds,
        "names": [svg.printable(panel.rows[i][:40]) + "*" * (i in panel.marked) for i in panel.order],
        "most": panel.most,
        "x": panel.x,
        "frames": [base64.b64encode(frame.tobytes()).decode() for frame in bytes_],
    }
