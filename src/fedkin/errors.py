"""What goes wrong, in words a user can act on: each error names the value, the reason and the fix."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FedKinError(Exception):
    """Anything FedKin reports on purpose. The command line prints it without a traceback."""


class UsageError(FedKinError):
    """The request itself is wrong: an unknown name, a value out of range, a key that does not exist (exit status 2)."""


class DataError(FedKinError):
    """The data do not allow what was asked: files missing or damaged, a split that cannot be met (exit status 2)."""


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist, with the nearest ones that do."""
    return UsageError(f"unknown {kind} {name!r}: {meant(name, known)}")


def meant(name: str, known: Iterable[str]) -> str:
    """The nearest of the names that exist, as a question; all of them where none is near."""
    names = sorted(known)
    near = get_close_matches(name.lower(), names, n=3, cutoff=0.5) or [k for k in names if name.lower() in k][:3]
    return f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known: {', '.join(names)}"
