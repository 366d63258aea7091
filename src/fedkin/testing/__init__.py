"""What every method, attack and rule must stand, whatever its paper says; for your own as for ours.

    from fedkin.testing import METHOD_CHECKS, check_attack, check_method, check_rule

    check_method(MyMethod, {"lam": 0.5})        # a class or a registered name; AssertionError says what is wrong

or one test a promise, with pytest:

    @pytest.mark.parametrize("check", METHOD_CHECKS, ids=lambda c: c.__name__)
    def test_my_method(check):
        check(MyMethod)

A method learns classes meanwhile, or (`check_method(..., world="next-token")`, `with inside("next-token"):`) what comes
next, classes by low-rank updates of a frozen network ("low-rank"), or from samples of two parts ("two-inputs").

The federation is tiny and unpleasant: a client with one sample, a class that nobody has, few rounds.
"""

from fedkin.testing.defence_checks import check_attack, check_rule
from fedkin.testing.method_checks import METHOD_CHECKS, check_method
from fedkin.testing.tiny import federation, finished, job_of, personal_rows
from fedkin.testing.worlds import WORLDS, inside

__all__ = [
    "METHOD_CHECKS",
    "WORLDS",
    "check_attack",
    "check_method",
    "check_rule",
    "federation",
    "finished",
    "inside",
    "job_of",
    "personal_rows",
]
