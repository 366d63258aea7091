"""Text in tables that people open in a spreadsheet, which would compute what looks like a formula."""

from __future__ import annotations

import re
from typing import Any

BEGINS = re.compile(r"(^|[;,|\t\r\n])(\s*)(?=[=+\-@＝＋－＠])")
"""Where a formula would begin: at the start, or, where a spreadsheet splits lines at other signs, in the middle."""


def inert(value: Any) -> Any:
    """Numbers and texts of numbers as they are; a text that no spreadsheet takes for a formula, marked by a '."""
    if not isinstance(value, str) or _number(value):
        return value
    marked = BEGINS.sub(r"\1\2'", value)
    return f"'{marked}" if marked.startswith(("\t", "\r", "\n")) else marked


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
