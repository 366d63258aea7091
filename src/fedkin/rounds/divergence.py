"""Whether a run went wrong numerically, told from what it recorded.

Chance is what always guessing the most frequent class of the test samples gives, all clients' together: models that
have collapsed answer one class, so that is where they end. A client's own most frequent class would be too strict, as
one model for all does not know whose sample it sees. Being at chance alone is no divergence, a run may be too short:
some loss must also have been twice that of a model that knows nothing, ln(classes), and twice that of the model the run
began with, which on features that nobody scaled is large before anything was learnt. Under attack being at chance is
what the attack is for, and says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedkin.rounds.records import RoundRecord

WORSE_THAN_NOTHING = 2.0  # times what a model has that knows nothing
OUT_OF_HAND = 10.0  # times the same
ADVICE = "a smaller learning rate may help"
OF_TABLES = f"{ADVICE}, and so may scaling the table's columns (--scale local)"
GUESSING = "always guessing the most frequent class gives"


@dataclass(frozen=True)
class Refusal:
    """A round in which replies of benign clients were refused because they held numbers that are not finite."""

    round: int  # from 1
    refused: int  # clients
    asked: int
    reason: str  # of the first


@dataclass(frozen=True)
class BrokenLosses:
    """Whose loss was not finite in a record."""

    round: int
    loss: str  # "training" or "test"
    clients: int
    of: int
    first: str  # the name of one


def divergence(
    history: Sequence[RoundRecord],
    refusals: Sequence[Refusal],
    classes: int,
    chance: float,
    attacked: bool = False,
    broken: Sequence[BrokenLosses] = (),
    first_loss: Callable[[], float] = lambda: 0.0,
    advice: str = ADVICE,
) -> str | None:
    """Why the numbers of a run are not to be believed, in one sentence; None if nothing speaks against them.

    A loss of NaN is no loss at all (nobody has test samples, nobody trained); one that broke is infinite. `first_loss`:
    the test loss of the model the run began with, asked for only where it decides. `advice`: what may help."""
    for r in refusals:
        if 2 * r.refused > r.asked:
            return (
                f"in round {r.round} the replies of {r.refused} of {r.asked} benign clients were refused "
                f"({r.reason}); {advice}"
            )
    whose = {(b.round, b.loss): b for b in broken}
    for record in history:
        for name, loss in _losses(record):
            if math.isinf(loss):
                return _not_finite(name, record.round, whose.get((record.round, name)), advice)
    if attacked or not history or not classes or not at_chance(history[-1], classes, chance):
        return None
    nothing = math.log(classes)
    found = [(loss, name, r.round) for r in history for name, loss in _losses(r) if loss > WORSE_THAN_NOTHING * nothing]
    if not found or max(found)[0] <= WORSE_THAN_NOTHING * first_loss():
        return None
    loss, name, round = max(found)
    return (
        f"at the end accuracy is {history[-1].accuracy.micro:.2f} %, no more than {GUESSING} ({chance:.2f}), and "
        f"the {name} loss had reached {loss:.3g} by round {round}, where a model that knows nothing has "
        f"{nothing:.2g}; {advice}"
    )


def _not_finite(name: str, round: int, whose: BrokenLosses | None, advice: str) -> str:
    if whose is None:
        return f"the {name} loss was not finite after round {round}; {advice}"
    who = f"{whose.clients} of {whose.of} clients ({whose.first}{' first' if whose.clients > 1 else ''})"
    few = "" if 2 * whose.clients > whose.of else "the others' was, so look at these clients' samples first; "
    return f"the {name} loss of {who} was not finite after round {round}; {few}{advice}"


def loss_out_of_hand(
    last: RoundRecord, classes: int, first_loss: Callable[[], float], advice: str = ADVICE
) -> str | None:
    """A remark on a run whose loss is absurd although it is finite and some answers are right. Without classes nobody
    knows what a model has that knows nothing: the loss is held against that of the model the run began with."""
    loss = last.test_loss
    if not classes:
        first = first_loss()
        if not 0 < OUT_OF_HAND * first < loss:
            return None
        return (
            f"the test loss at the end is {loss:.3g}, and was {first:.3g} before training: it is out of hand; {advice}"
        )
    nothing = math.log(classes)
    if classes < 2 or not loss > OUT_OF_HAND * nothing or not loss > OUT_OF_HAND * first_loss():
        return None
    return (
        f"the test loss at the end is {loss:.3g}, where a model that knows nothing has {nothing:.2g}: training is "
        f"out of hand though some answers are right; {advice}"
    )


def _losses(record: RoundRecord) -> tuple[tuple[str, float], ...]:
    return ("training", record.train_loss), ("test", record.test_loss)


def at_chance(last: RoundRecord, classes: int, chance: float) -> bool:
    """Whether the accuracy is no more than guessing gives; with a single class there is nothing to guess."""
    return classes > 1 and last.accuracy.micro <= chance + 1e-9


__all__ = ["ADVICE", "GUESSING", "OF_TABLES", "BrokenLosses", "Refusal", "at_chance", "divergence", "loss_out_of_hand"]
