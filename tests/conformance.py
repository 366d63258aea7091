"""The checks of `fedkin.testing`, as the tests know them."""

from __future__ import annotations

from typing import Any

import pytest

from fedkin.methods import METHODS
from fedkin.testing.method_checks import METHOD_CHECKS as CHECKS
from fedkin.testing.method_checks import (
    another_run_can_begin_with_it,
    can_be_evaluated_at_every_point,
    can_be_rehearsed,
    does_not_depend_on_the_chunk,
    handles_batch_norm,
    keeps_a_plain_state,
    keeps_its_halves_apart,
    learns_something,
    measuring_changes_nothing,
    never_asks_the_removed,
    repeats_itself,
    runs_and_serves_every_client,
    sends_no_more_than_it_says,
    survives_dropouts,
    survives_odd_replies,
    survives_poison,
    survives_stragglers,
    survives_when_everybody_is_late,
    survives_when_nobody_answers,
    works_with_two_clients,
)
from fedkin.testing.tampering import (
    misshape,
    poison,
)
from fedkin.testing.tiny import (
    federation,
    finished,
    job_of,
    personal_rows,
    sane,
    tensors_in,
    with_validation,
)
from fedkin.testing.worlds import CLASSES, FEATURES, WORLDS, Network, inside

FAMILIES = ("fedavg", "ditto", "fedper", "lg-fedavg", "c-pfl", "co-pfl", "fedcap", "fedpkda", "pfedcs")
"""One method of each kind. All methods stand every check in the fast tests; whatever else is tried with every method
takes long by their number, so there the others are for `make test-slow`."""


def every_method(*more: Any, **fixed: Any) -> list[Any]:
    """All methods as parameters of a test, those that are like another one among the long tests; and what else is to
    be tried. `fixed`: what follows the name in each, by whatever name."""
    given = list(fixed.values())
    marks = {name: [] if name in FAMILIES else [pytest.mark.slow] for name in METHODS}
    return [*(pytest.param(name, *given, id=name, marks=marks[name]) for name in METHODS), *more]


def every_check() -> list[Any]:
    """All checks as parameters of a test of one method under further options: the first is quick, the others are for
    `make test-slow`."""
    first, *others = CHECKS
    return [
        pytest.param(first, id=first.__name__),
        *(pytest.param(check, id=check.__name__, marks=pytest.mark.slow) for check in others),
    ]


__all__ = [
    "CHECKS",
    "CLASSES",
    "FAMILIES",
    "FEATURES",
    "WORLDS",
    "Network",
    "another_run_can_begin_with_it",
    "can_be_evaluated_at_every_point",
    "can_be_rehearsed",
    "does_not_depend_on_the_chunk",
    "every_check",
    "every_method",
    "federation",
    "finished",
    "handles_batch_norm",
    "inside",
    "job_of",
    "keeps_a_plain_state",
    "keeps_its_halves_apart",
    "learns_something",
    "measuring_changes_nothing",
    "misshape",
    "never_asks_the_removed",
    "personal_rows",
    "poison",
    "repeats_itself",
    "runs_and_serves_every_client",
    "sane",
    "sends_no_more_than_it_says",
    "survives_dropouts",
    "survives_odd_replies",
    "survives_poison",
    "survives_stragglers",
    "survives_when_everybody_is_late",
    "survives_when_nobody_answers",
    "tensors_in",
    "with_validation",
    "works_with_two_clients",
]
