"""How well words stand out from what they stand on, by the custom properties of a style sheet."""

from __future__ import annotations

import re


def luminance(colour: str) -> float:
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def looks(css: str) -> list[dict[str, str]]:
    """The custom properties that are colours, on a light page and on a dark one."""
    plain, dark = re.split(r"@media [^{]*prefers-color-scheme: dark\)", css, maxsplit=1)
    pattern = r"--([\w-]+): (#[0-9a-f]{6})\b"
    light = dict(re.findall(pattern, plain))
    return [light, light | dict(re.findall(pattern, dark))]
