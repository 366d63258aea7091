"""How a result is looked at. Figures and tables are made far above, by whoever says here that it makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from fedkin.errors import FedKinError

if TYPE_CHECKING:
    from fedkin.rounds.result import Result


class Looks(Protocol):
    """What makes figures and tables of results."""

    def html(self, result: Result) -> str: ...

    def plot(self, result: Result, figure: str) -> Any: ...

    def frame(self, result: Result, table: str) -> Any: ...


looks: Looks | None = None
"""Set when `fedkin.report.looks` is imported, as `fedkin.api` does."""


def required() -> Looks:
    """Who makes them."""
    if looks is None:
        raise FedKinError("figures and tables of a result come from fedkin.report.looks: import it first")
    return looks
