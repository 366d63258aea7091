"""The checks of `fedkin.testing`, as the tests know them."""

from __future__ import annotations

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

__all__ = [
    "CHECKS",
    "CLASSES",
    "FEATURES",
    "WORLDS",
    "Network",
    "another_run_can_begin_with_it",
    "can_be_evaluated_at_every_point",
    "can_be_rehearsed",
    "does_not_depend_on_the_chunk",
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
