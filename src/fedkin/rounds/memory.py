"""What a run remembers from round to round: all that a checkpoint holds of it, and how that is put back.

Before anything is put back all of it is looked at: a state that does not fit leaves the run as it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedkin.errors import DataError
from fedkin.rounds.divergence import BrokenLosses, Refusal
from fedkin.rounds.records import Halt, RoundRecord
from fedkin.rounds.validation import Snapshot

if TYPE_CHECKING:
    from fedkin.rounds.job import Job


def state_of(job: Job) -> dict[str, Any]:
    """Everything the coming rounds depend on, as plain values and tensors: a run that was prepared the same way and
    gets it goes on as this one would."""
    return {
        "round": job.fed.round,
        "finished": job.finished,
        "seconds": job.seconds,
        "clock": job.clock.state(),
        "refusals": [asdict(r) for r in job.refusals],
        "broken": [asdict(b) for b in job.broken],
        "method": job.method.state(),
        "clients": job.site.store.state(),
        "losses": job.engine.losses,
        "ways": {**job.site.chooser.state(), "client_steps": job.engine.client_steps},
        "history": [asdict(r) for r in job.history],
        "remarks": list(job.remarks),
        "halted": None if job.halted is None else asdict(job.halted),
        "kept": None if job.kept is None else job.kept.state(),
        "federation": job.fed.state(),
        "generators": generators(),
    }


def restoring(job: Job, state: Mapping[str, Any]) -> Callable[[], None]:
    """What puts such a state into a job that was prepared the same way; `DataError` that says what does not fit."""
    try:
        return _restoring(job, state)
    except DataError:
        raise
    except KeyError as error:
        raise DataError(f"it has no {error}") from None
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError, StopIteration) as error:
        raise DataError(f"{type(error).__name__}: {error}") from None


def _restoring(job: Job, state: Mapping[str, Any]) -> Callable[[], None]:
    memory, losses, round = dict(state["method"]), state["losses"], int(state["round"])
    if len(losses) != len(job.site.names):
        raise DataError(f"it is of {len(losses)} clients, the run has {len(job.site.names)}")
    if not 0 <= round <= job.config.rounds:
        raise DataError(f"it is of round {round}, the run has {job.config.rounds}")
    gone = _check_memory(job, memory)
    federation, clients = job.fed.restoring(state["federation"]), job.site.store.restoring(state["clients"])
    ways, steps = {**state["ways"], "chosen": dict(state["ways"]["chosen"])}, int(state["ways"]["client_steps"])
    known = {"training": state["seconds"], "wall": state["seconds"]}  # all that older checkpoints say
    times = {"wall": 0.0, **{part: float(seconds) for part, seconds in state.get("clock", known).items()}}
    remarks = list(state.get("remarks", []))
    if "clock" not in state:
        remarks.append(
            f"{round} rounds were done by a version that timed nothing else: the wall clock leaves out what went into "
            "their preparing, evaluating and writing"
        )
    found: dict[str, Any] = {
        "history": [RoundRecord.of(r) for r in state["history"]],
        "remarks": remarks,
        "finished": bool(state["finished"]),
        "refusals": [Refusal(**r) for r in state.get("refusals", [])],
        "broken": [BrokenLosses(**b) for b in state.get("broken", [])],
    }
    halted = state.get("halted")
    found["halted"] = None if halted is None else Halt(int(halted["round"]), str(halted["why"]))
    if (kept := state.get("kept")) is not None:
        found["kept"] = Snapshot(int(kept["round"]), bool(kept["final"]), dict(kept["method"]), dict(kept["clients"]))
        _check_memory(job, kept["method"])
        job.site.store.restoring(kept["clients"])
        found["kept"].record(found["history"])
    draws = setting_generators(state["generators"])

    def put() -> None:
        federation()  # first: a rule may still refuse what it is to remember
        clients()
        for name in gone:
            delattr(job.method, name)
        vars(job.method).update(memory)
        vars(job).update(found)
        job.engine.losses, job.fed.round = losses, round
        job.site.chooser.restore(ways)
        job.engine.client_steps = steps
        job.clock.restore(times)
        draws()

    return put


def _check_memory(job: Job, memory: Mapping[str, Any]) -> list[str]:
    """Whether the server half of this method can have these attributes; those it has now and is to lose."""
    method_class, layout = type(job.method), job.site.layout
    for name in memory:
        if not name.isidentifier() or name.startswith("__") or callable(getattr(method_class, name, None)):
            raise DataError(f"the saved state sets {name!r}, which is no memory of {method_class.__name__}")
    gone = [name for name in vars(job.method) if name != "options" and name not in memory]
    if gone and method_class.__module__.startswith("fedkin."):  # none of these forgets; a method of one's own may
        raise DataError(
            f"the saved state has no {gone[0]!r}, which {method_class.__name__} needs: another version of FedKin wrote "
            "it; start a new run, or go on with that version"
        )
    widths = {layout.width, *(layout.size(part) for part in ("model", "body", "head"))}
    for name, value in job.method.state().items():  # what is as wide as a part of the network stays so
        if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) in widths and len(value) > 1:
            found = memory.get(name)
            if not isinstance(found, torch.Tensor) or found.shape != value.shape:
                shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
                raise DataError(f"its {name!r} is {shape} where this run has {list(value.shape)}")
    return gone


# ---------------------------------------------------------------- the global generators


def generators() -> dict[str, Any]:
    """The state of the global generators. FedKin draws from none of them; a method of one's own may."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    kind, words, gauss = random.getstate()
    found = {"torch": torch.get_rng_state(), "numpy": numpy, "python": [kind, list(words), gauss]}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def setting_generators(state: Mapping[str, Any]) -> Callable[[], None]:
    """What sets them, once generators of our own have taken the same states."""
    kind, words, gauss = state["python"]
    python, numpy, cpu = (kind, tuple(words), gauss), state["numpy"], state["torch"]
    random.Random().setstate(python)
    np.random.RandomState().set_state(numpy)
    torch.Generator().set_state(cpu)
    cuda = state.get("cuda", [])
    there = torch.cuda.is_available() and len(cuda) == torch.cuda.device_count()

    def put() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(cpu)
        if there:
            torch.cuda.set_rng_state_all(cuda)

    return put
