"""What a run is: its records, how it is put together, and the loop over its rounds."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedkin.options import named_spec
    from fedkin.rounds.assemble import prepare
    from fedkin.rounds.choices import (
        average_of,
        load_data,
        optimiser_of,
        pick_device,
        pick_precision,
        split_of,
        training_of,
    )
    from fedkin.rounds.job import Job
    from fedkin.rounds.loop import drive, run_config
    from fedkin.rounds.records import Accuracy, ClientRecord, Event, Listener, Prepared, RoundRecord, comparable
    from fedkin.rounds.result import Result

__all__ = [
    "Accuracy",
    "ClientRecord",
    "Event",
    "Job",
    "Listener",
    "Prepared",
    "Result",
    "RoundRecord",
    "average_of",
    "comparable",
    "drive",
    "load_data",
    "named_spec",
    "optimiser_of",
    "pick_device",
    "pick_precision",
    "prepare",
    "run_config",
    "split_of",
    "training_of",
]


def __getattr__(name: str) -> Any:
    """Looked up when first used: what lists and shows runs takes its clock from here, and does without torch."""
    for home in ("records", "result", "choices", "job", "assemble", "loop") if name in __all__ else ():
        module = import_module(f"fedkin.rounds.{home}")
        if name in vars(module):
            return getattr(module, name)
    raise AttributeError(f"module 'fedkin.rounds' has no attribute {name!r}")
