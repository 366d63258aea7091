"""What is learnt: the loss that clients minimise, the metrics by which models are told apart, what a prediction is."""

from __future__ import annotations

from fedkin.tasks.classification import Classification
from fedkin.tasks.multilabel import MultiLabel
from fedkin.tasks.own import OwnTask, task
from fedkin.tasks.regression import Regression
from fedkin.tasks.survival import Survival
from fedkin.tasks.task import TASKS, USUAL, Metric, Task, make_task, task_for
from fedkin.tasks.tokens import NextToken

TASKS.sort()

__all__ = [
    "TASKS",
    "USUAL",
    "Classification",
    "Metric",
    "MultiLabel",
    "NextToken",
    "OwnTask",
    "Regression",
    "Survival",
    "Task",
    "make_task",
    "task",
    "task_for",
]
