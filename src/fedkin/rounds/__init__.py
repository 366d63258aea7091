"""What a run is: its records, how it is put together, and the loop over its rounds.

Names are looked up when first used: what lists and shows runs takes its clock from here, and does without torch."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkin.options import named_spec as named_spec
    from fedkin.rounds.assemble import prepare as prepare
    from fedkin.rounds.choices import average_of as average_of
    from fedkin.rounds.choices import load_data as load_data
    from fedkin.rounds.choices import optimiser_of as optimiser_of
    from fedkin.rounds.choices import pick_device as pick_device
    from fedkin.rounds.choices import pick_precision as pick_precision
    from fedkin.rounds.choices import split_of as split_of
    from fedkin.rounds.choices import training_of as training_of
    from fedkin.rounds.job import Job as Job
    from fedkin.rounds.loop import drive as drive
    from fedkin.rounds.loop import run_config as run_config
    from fedkin.rounds.records import Accuracy as Accuracy
    from fedkin.rounds.records import ClientRecord as ClientRecord
    from fedkin.rounds.records import Event as Event
    from fedkin.rounds.records import Listener as Listener
    from fedkin.rounds.records import Prepared as Prepared
    from fedkin.rounds.records import RoundRecord as RoundRecord
    from fedkin.rounds.records import StopTraining as StopTraining
    from fedkin.rounds.records import comparable as comparable
    from fedkin.rounds.result import Result as Result


def __getattr__(name: str) -> Any:
    a_module = name.startswith("_") or find_spec(f"fedkin.rounds.{name}") is not None
    for home in () if a_module else ("records", "result", "choices", "job", "assemble", "loop"):
        module = import_module(f"fedkin.rounds.{home}")
        if name in vars(module):
            return getattr(module, name)
    raise AttributeError(f"module 'fedkin.rounds' has no attribute {name!r}")
