"""Attacks (rows in, rows out), aggregation rules (rows in, row out), and how well attackers are found."""

from fedkin.robust.adversary import Adversary
from fedkin.robust.attacks import ATTACKS, Attack, DataAttack, ReplyAttack, make_attack
from fedkin.robust.detection import Detection, Rates, Verdict, Watched, detection
from fedkin.robust.rules import RULES, Outcome, Rule, apply, make_rule

__all__ = [
    "ATTACKS",
    "RULES",
    "Adversary",
    "Attack",
    "DataAttack",
    "Detection",
    "Outcome",
    "Rates",
    "ReplyAttack",
    "Rule",
    "Verdict",
    "Watched",
    "apply",
    "detection",
    "make_attack",
    "make_rule",
]
