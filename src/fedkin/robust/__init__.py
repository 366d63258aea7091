"""Attacks (rows in, rows out), aggregation rules (rows in, row out), and how well attackers are found."""

from fedkin.robust.adversary import Adversary
from fedkin.robust.attacks import ATTACKS, Attack, Backdoor, DataAttack, ReplyAttack, make_attack
from fedkin.robust.detection import Detection, Detector, Rates, Verdict, Watched, detection, verdicts_of
from fedkin.robust.rules import RULES, Outcome, Rule, apply, make_rule
from fedkin.robust.server_side import ServerSide
from fedkin.robust.wrappers import GAS, Bucketing

__all__ = [
    "ATTACKS",
    "GAS",
    "RULES",
    "Adversary",
    "Attack",
    "Backdoor",
    "Bucketing",
    "DataAttack",
    "Detection",
    "Detector",
    "Outcome",
    "Rates",
    "ReplyAttack",
    "Rule",
    "ServerSide",
    "Verdict",
    "Watched",
    "apply",
    "detection",
    "make_attack",
    "make_rule",
    "verdicts_of",
]
