"""Attacks (rows in, rows out), aggregation rules (rows in, row out), and how well attackers are found."""

from fedkin.robust.adversary import Adversary
from fedkin.robust.attacks import ATTACKS, Attack, Backdoor, DataAttack, ReplyAttack, make_attack
from fedkin.robust.detection import Detection, Detector, Rates, Verdict, Watched, detection, verdicts_of
from fedkin.robust.root import Desk
from fedkin.robust.rules import RULES, Outcome, Rule, apply, make_rule

__all__ = [
    "ATTACKS",
    "RULES",
    "Adversary",
    "Attack",
    "Backdoor",
    "DataAttack",
    "Desk",
    "Detection",
    "Detector",
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
    "verdicts_of",
]
