"""All colours, in one place: of lines, marks and maps, by day and by night, for the report and for the web page.

Lines are told apart with any colour vision (Okabe and Ito 2008), and by dashes where there are more of them than
colours. Words are darker: 4.5 to 1 at least against whatever they stand on."""

from __future__ import annotations

from collections.abc import Sequence

WORDS = ("ink", "muted", "grid", "paper", "soft", "link", "bad")
BY_DAY = ("#1b1f24", "#5b6470", "#dde2e8", "#ffffff", "#f1f3f6", "#005a8d", "#a84300")
BY_NIGHT = ("#e6e9ed", "#a3adb8", "#343b43", "#15181c", "#20252b", "#7cc4f0", "#f0803c")
LIGHT, DARK = (dict(zip(WORDS, colours, strict=True)) for colours in (BY_DAY, BY_NIGHT))
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#4d4d4e")
DARK_SERIES = ("#4aa8e0", "#f0803c", "#2fc79b", "#e39cc4", "#f2b533", "#9ad4f7", "#b9bec5")
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.2, 1.6), (6, 2, 1.2, 2))  # in widths of the line
GOOD, BAD, THIRD, FOURTH, ODD = range(5)  # places in SERIES
HEAT = (
    *("#00224e", "#002e6a", "#1a386f", "#32436d", "#434e6c", "#535a6d", "#61656f", "#6f7073", "#7d7c78"),
    *("#8c8878", "#9b9476", "#aba072", "#bcae6c", "#cdbb63", "#dec958", "#f0d846", "#fee838"),
)
"""From nothing to most (cividis); between two of them colours are mixed."""


def css() -> str:
    """As custom properties: --ink and the others, --c0 and on for lines, --h0 and on for maps."""
    heat = " ".join(f"--h{i}: {colour};" for i, colour in enumerate(HEAT))
    return (
        f":root {{ color-scheme: light dark; {_properties(LIGHT, SERIES)} {heat} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_properties(DARK, DARK_SERIES)} }} }}\n"
    )


def within(name: str, dark: Sequence[str]) -> str:
    """The same for what has this class on somebody else's page: by night where the page says so by a selector."""
    places = ", ".join(f"{selector} .{name}" for selector in dark)
    return f".{name} {{ {_properties(LIGHT, SERIES)} }}\n{places} {{ {_properties(DARK, DARK_SERIES)} }}\n"


def _properties(words: dict[str, str], lines: tuple[str, ...]) -> str:
    named = {**words, **{f"c{i}": colour for i, colour in enumerate(lines)}}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())


def classes() -> str:
    """For drawings whose elements name a place: .s0 for a line, .d0 for its dashes, .h0 for a level of a map."""
    lines = [f".s{i} {{ --c: var(--c{i}); }}" for i in range(len(SERIES))]
    dashes = [
        f"svg .d{i} {{ stroke-dasharray: {' '.join(f'{2 * n:g}' for n in d)}; }}" for i, d in enumerate(DASHES) if d
    ]
    return "\n".join([*lines, *dashes, *(f"svg .h{i} {{ fill: var(--h{i}); }}" for i in range(len(HEAT)))])
