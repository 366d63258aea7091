"""The house: a module's name says one thing, no module is too long to read in one sitting, and little is said twice."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent / "src" / "fedkin"

SHARED_NAMES = {
    "deploy": "the package and, in cli, its commands",
    "web": "the package and, in cli, its command",
    "runs": "the package and, in cli, its commands",
    "own": "what users bring: data of their own, networks of their own",
    "runner": "runs what a table or a grid lists, and skips what is finished",
}
"""Names that more than one module or package has, and the meaning that these share."""
LONGEST_MODULE = 957
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
    assert {name: length for name, length in lengths.items() if length > LONGEST_MODULE} == {}


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
