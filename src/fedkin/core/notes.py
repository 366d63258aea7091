"""What methods note about their rounds: every kind of note, declared once.

A method notes under a kind, `fed.note(notes.REJECTED, clients)`; whoever reads notes (the table of events, `fedkin
show`, the report, the web page, the detection of attackers) asks the declaration what they mean. A new kind is one
`declare` here or in a file of your own. A method may also note under any name that nobody has declared: it is shown as
what its values look like.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # where notes are only named, numpy is not waited for
    from numpy.typing import NDArray

Shape = Literal["number", "text", "clients", "per_client", "pairs", "table", "fields"]
"""A number; a sentence; a list of clients; a number for each client; a number for each pair of them (row: who takes,
column: from whom); {"clients": [...], column: [...], ...}; any other mapping or list."""


@dataclass(frozen=True)
class Event:
    """Something that happens to a client in a round, as the table of events and the figures name it. Of two in one
    round the later declared is the graver. `mark` and `colour` (a place in the palette) are how figures draw it."""

    kind: str
    words: str
    mark: Literal["dot", "ring", "cross", "triangle", "square"] = "dot"
    colour: int = 2
    lasting: bool = False


EVENTS: dict[str, Event] = {}


def event(*facts: Any, **more: Any) -> Event:
    """Declare something that may happen to a client."""
    made = Event(*facts, **more)
    EVENTS[made.kind] = made
    return made


NOT_EVALUATED = event("unjudged", "gave no accuracy", "dot", 2)
WAS_LEFT_OUT = event("left_out", "left out of the average", "square", 5)
HAS_FAILED = event("failed", "failed", "triangle", 3)
WAS_REJECTED = event("rejected", "rejected", "ring", 4)
WAS_REMOVED = event("removed", "removed", "cross", 1, lasting=True)


def event_of(kind: str) -> Event:
    """The declared event, or one for a kind that a file has and nobody here has declared."""
    return EVENTS.get(kind) or Event(kind, kind.replace("_", " ")[:40])


@dataclass(frozen=True)
class Kind:
    """One kind of note."""

    name: str
    about: str  # what it means, in words
    shape: Shape
    over: str = ""  # the note of the same round that says whose numbers these are; without it they are all clients'
    used: bool | None = None  # whether the clients listed here were used; a table says so in its column "used"
    event: Event | None = None  # what it means for a client not to be used, or to be in a table of "reasons"
    why: str = ""  # the reason of that event, where the value gives none
    figure: str = ""  # the figure of the report that shows it; without one it gets a figure of its own

    def verdicts(self, value: Any) -> list[tuple[int, bool]]:
        """Whose reply was used and whose was not, as far as this note says so."""
        if self.shape == "clients" and self.used is not None:
            return [(int(c), self.used) for c in value] if isinstance(value, list | tuple) else []
        columns = value if isinstance(value, Mapping) else {}
        return [(int(c), bool(u)) for c, u in zip(columns.get("clients", ()), columns.get("used", ()), strict=False)]

    def events(self, value: Any) -> list[tuple[int, str, str]]:
        """What it says happened to single clients: (client, kind, reason)."""
        if self.event is None:
            return []
        if self.shape == "table" and isinstance(value, Mapping) and "reasons" in value:
            each = zip(value["clients"], value["reasons"], strict=True)
            return [(int(c), self.event.kind, str(why)) for c, why in each]
        return [(c, self.event.kind, self.why) for c, used in self.verdicts(value) if not used]

    def read(self, value: Any, clients: int, whose: Sequence[int] | None = None) -> Any:
        """A value from a file that may be anybody's, in the form of its shape, or None where it does not fit: a finite
        number, text, clients, an array [clients] or [clients, clients] with NaN for who is not in `whose` (where that
        is known), or the mapping as it is."""
        if self.shape == "number":
            return number(value)
        if self.shape == "text":
            return value if isinstance(value, str) else None
        if self.shape == "clients":
            return client_list(value, clients)
        if self.shape in ("per_client", "pairs"):
            return spread_out(value, clients, whose, 1 if self.shape == "per_client" else 2)
        return value if isinstance(value, dict | list) else None


KINDS: dict[str, Kind] = {}


def declare(*facts: Any, **more: Any) -> Kind:
    """Declare a kind of note; see `Kind` for the arguments."""
    made = Kind(*facts, **more)
    KINDS[made.name] = made
    return made


def kind_of(name: str, value: Any = None) -> Kind:
    """The declared kind, or one for a name that nobody has declared, by what its value looks like."""
    if name in KINDS:
        return KINDS[name]
    if number(value) is not None:
        shape: Shape = "number"
    elif isinstance(value, list) and value:
        shape = "pairs" if isinstance(value[0], list) else "per_client"
    else:
        shape = "text" if isinstance(value, str) else "fields"
    return Kind(name, f"noted by the method as {name[:60]!r}", shape)


# ---------------------------------------------------------------- values from files that may be anybody's


def number(value: Any) -> float | None:
    """A finite number of a usual size."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if fits else None


def numbers(values: Iterable[Any]) -> NDArray[Any]:
    """Floats; whatever is no finite number becomes NaN."""
    import numpy as np

    return np.array([np.nan if (n := number(v)) is None else n for v in values], float)


def client_list(value: Any, clients: int) -> list[int] | None:
    fits = isinstance(value, list) and all(type(c) is int and 0 <= c < clients for c in value)
    return value if fits else None


def spread_out(value: Any, clients: int, whose: Sequence[int] | None, axes: int) -> NDArray[Any] | None:
    """A vector or a square over `whose` (or all clients) among all clients."""
    import numpy as np

    at = list(range(clients)) if whose is None else list(whose)
    if not isinstance(value, list) or not value or len(value) != len(at):
        return None
    if axes == 1:
        row = np.full(clients, np.nan)
        row[at] = numbers(value)
        return row if np.isfinite(row).any() else None
    if not all(isinstance(line, list) and len(line) == len(at) for line in value):
        return None
    square = np.full((clients, clients), np.nan)
    square[np.ix_(at, at)] = [numbers(line) for line in value]
    return square if np.isfinite(square).any() else None


# ---------------------------------------------------------------- all kinds

# whose reply was used
USED = declare("used", "whose reply the rule used", "table", event=WAS_LEFT_OUT, why="by the rule", figure="removals")
ACCEPTED = declare(
    "accepted", "clients whose reply the method used", "clients", used=True, event=WAS_REJECTED, figure="committee"
)
REJECTED = declare(
    "rejected",
    "clients whose reply the method refused",
    "clients",
    used=False,
    event=WAS_REJECTED,
    why="by the method",
    figure="removals",
)
JUDGED = declare("judged", "whose update is short enough", "table", figure="lengths")
UNJUDGED = declare(
    "unjudged", "clients that gave no accuracy, and why", "table", event=NOT_EVALUATED, figure="removals"
)
REMOVED = declare("removed", "clients that the method has removed for good", "clients", figure="removals")
ALARM = declare("alarm", "why the round changed nothing, or went by nothing", "text")

# who learns from whom, and how much each counts
PARTICIPANTS = declare("participants", "clients that learn from one another", "clients", figure="matrix")
COLLABORATORS = declare("collaborators", "how much each takes from each", "pairs", "participants", figure="matrix")
MEMBERS = declare("members", "clients whose models are combined", "clients", figure="matrix")
WEIGHTS = declare("weights", "how much each takes from each", "pairs", "members", figure="matrix")
SHARES = Kind(
    "weights", "the weight of each client's model in the average", "per_client", "members", figure="prototypes"
)  # FedPKDA's
WEIGHTS_ABSENT = declare("weights_absent", "how much clients that did not take part take from each member", "fields")
ALPHA = declare("alpha", "the weight of what each client shares in the average", "per_client", figure="contributions")
MASK = declare("mask", "the share of its weights that each client has made its own", "table", figure="contributions")

# what the server measures clients by, and the bar
COMMITTEE = declare("committee", "clients that score the others' bodies", "clients", figure="committee")
SCORES = declare("scores", "the committee's score of each client's body", "per_client", figure="committee")
THRESHOLD = declare("threshold", "the score that a body must reach", "number", figure="committee")
RELAXED = declare("relaxed", "the lowered threshold, where nothing had passed", "number", figure="committee")
NORMS = declare("norms", "the length of each client's update", "per_client", "judged", figure="lengths")
T_NORM = declare("t_norm", "the length at which a client is removed", "number", figure="lengths")

# prototypes and privacy
PULLS = declare(
    "pulls", "the pulls towards a client's own prototypes and towards the global ones", "fields", figure="prototypes"
)
PROTOTYPE_WEIGHTS = declare(
    "prototype_weights", "the weight of each client's prototype of a class", "fields", figure="prototypes"
)
EPSILON = declare(
    "epsilon", "what the noise promises: epsilon of the round, and of all rounds together", "fields", figure="epsilon"
)
