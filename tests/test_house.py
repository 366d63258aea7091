"""The house: a module's name says one thing, no module is too long to read in one sitting, methods say only what is
their own, and little is said twice."""

from __future__ import annotations

import ast
import io
import statistics
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "fedkin"

SHARED_NAMES = {
    "deploy": "the package and, in cli, its commands",
    "web": "the package and, in cli, its command",
    "runs": "the package and, in cli, its commands",
    "doctor": "checks what could stand in the way: of a site and, in cli, the command",
    "own": "what users bring: data of their own, networks of their own",
    "runner": "runs what a table or a grid lists, and skips what is finished",
    "options": "what may be set: how it is declared and checked, and what each large method declares",
    "method": "the algorithm of a large paper, in the folder of its method",
    "ablations": "what only tables of results need of a large paper, in the folder of its method",
}
"""Names that more than one module or package has, and the meaning that these share."""
LONGEST_MODULE = 450
LONGEST_MEDIAN_METHOD = 33
MOST_DUPLICATED = 0.015
WINDOW = 6


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def test_modules_of_one_name_share_a_meaning() -> None:
    places = defaultdict(list)
    for path in modules():
        name = path.parent.name if path.name == "__init__.py" else path.stem
        if path.parent != ROOT or name != "fedkin":
            places[name].append(str(path.relative_to(ROOT)))
    several = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in several.items() if name not in SHARED_NAMES} == {}


def test_no_module_is_too_long() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules()}
    too_long = {n: length for n, length in lengths.items() if length > LONGEST_MODULE}
    assert too_long == {}


# ---------------------------------------------------------------- how much a method says


def lines_of_code(text: str) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    said = set()
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            said |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            said -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(said)


def rooms() -> dict[str, list[Path]]:
    """What lies in `methods`: a file, or a folder with all that is in it."""
    places = [p for p in (ROOT / "methods").iterdir() if p.stem not in ("__init__", "base", "__pycache__")]
    return {p.stem: [p] if p.is_file() else sorted(p.rglob("*.py")) for p in sorted(places)}


def registers(files: list[Path]) -> bool:
    return any("@METHODS.register(" in path.read_text() for path in files)


def test_the_median_method_is_short() -> None:
    lengths = {
        name: sum(lines_of_code(path.read_text()) for path in files)
        for name, files in rooms().items()
        if registers(files)
    }
    assert len(lengths) >= 13
    assert statistics.median(lengths.values()) <= LONGEST_MEDIAN_METHOD, lengths


def test_what_belongs_to_one_method_alone_lies_with_it() -> None:
    """So that its lines count as that method's."""
    shared = [name for name, files in rooms().items() if not registers(files)]
    users = {
        name: [
            other for other, files in rooms().items() if any(f"fedkin.methods.{name} " in f.read_text() for f in files)
        ]
        for name in shared
    }
    assert {name: found for name, found in users.items() if len(found) < 2} == {}


def test_the_count_of_lines() -> None:
    text = '"""Two\nlines."""\n\nimport a  # why\n\n# what\ndef f(\n    x,\n):\n    """Doc."""\n    return """x\ny"""\n'
    assert lines_of_code(text) == 6


def code_lines(path: Path) -> list[str]:
    """Lines with whitespace folded; blank, comment and import lines and lone punctuation are passed over."""
    lines = (" ".join(line.split()) for line in path.read_text().splitlines())
    return [x for x in lines if not x.startswith(("#", "import ", "from ")) and any(c.isalnum() for c in x)]


def duplicated(files: list[list[str]]) -> float:
    """The share of lines that lie in a window of six lines that occurs at least twice."""
    windows = [[tuple(lines[i : i + WINDOW]) for i in range(len(lines) - WINDOW + 1)] for lines in files]
    seen = Counter(window for of_file in windows for window in of_file)
    twice = sum(
        len({i + k for i, window in enumerate(of_file) if seen[window] > 1 for k in range(WINDOW)})
        for of_file in windows
    )
    return twice / sum(map(len, files))


def test_little_text_is_duplicated() -> None:
    assert duplicated([code_lines(path) for path in modules()]) < MOST_DUPLICATED


def test_the_measure_of_duplicated_text() -> None:
    block = [f"line {i}" for i in range(6)]
    assert duplicated([[*block, "a", "b"], ["c", "d", *block]]) == 12 / 16
    assert duplicated([[*block[:5], "a"], [*block[:5], "b"]]) == 0
    assert duplicated([["x"] * 7]) == 1
