"""What Optuna proposes and remembers. Nothing else knows of Optuna, which is an extra.

A study that is kept is a file of JSON lines, which only one process at a time writes. Nothing in it is ever unpickled:
Optuna's journal pickles snapshots where its backend has some, and this one has none."""

from __future__ import annotations

import json
import math
import os
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fedkin.compute import keys
from fedkin.errors import DataError, UsageError
from fedkin.sweep.search import Axis, combinations

try:
    import optuna
    from optuna.storages.journal import BaseJournalBackend
    from optuna.trial import FrozenTrial, TrialState
except ImportError:
    raise UsageError("fedkin tune needs Optuna: pip install 'fedkin[tune]'") from None

End = Literal["done", "pruned", "failed"]
LARGEST = 256 << 20  # bytes of a study
FACTS = "fedkin"
STARTUP, RANDOM = 5, 8  # trials before any is pruned; trials drawn at random before proposals follow results


@dataclass(frozen=True)
class Proposal:
    """A trial that is to be carried out."""

    number: int
    values: dict[str, Any]


@dataclass(frozen=True)
class Told:
    """A trial that has ended. `score`: more is better; `facts`: what was said of it."""

    number: int
    values: dict[str, Any]
    end: End
    score: float | None
    facts: Mapping[str, Any] = field(default_factory=dict)


class Lines(BaseJournalBackend):
    """A file of JSON lines. A last line that a crash left half written is dropped."""

    def __init__(self, path: Path) -> None:
        try:
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except OSError as error:
            raise DataError(f"the study {path} cannot be opened: {error.strerror or error}") from None
        try:
            _lock(self._handle, path)
            self._logs = self._read(path)
        except BaseException:
            self.close()
            raise

    def _read(self, path: Path) -> list[dict[str, Any]]:
        if not stat.S_ISREG(os.fstat(self._handle).st_mode):
            raise DataError(f"the study {path} is no ordinary file: remove it to begin anew")
        if os.fstat(self._handle).st_size > LARGEST:
            raise DataError(f"the study {path} is larger than {LARGEST >> 20} MiB")
        text = path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            os.ftruncate(self._handle, len(whole))
        logs = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = None
            if not isinstance(entry, dict):
                raise DataError(f"the study {path} is damaged in line {number}: remove the file to begin anew")
            logs.append(entry)
        return logs

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        return iter(self._logs[log_number_from:])

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        os.write(self._handle, text.encode())
        os.fsync(self._handle)
        self._logs += json.loads(f"[{','.join(text.splitlines())}]")

    def close(self) -> None:
        os.close(self._handle)


def _lock(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise UsageError(f"the study {path} is at work in another process: wait for it, or stop it") from None


class Untried(optuna.samplers.TPESampler):
    """Where there are few choices, none that was tried before: in place of a value that leads to none that is left, one
    by lot that does."""

    def __init__(self, left: Sequence[Mapping[str, Any]] | None, seed: int) -> None:
        super().__init__(seed=seed, constant_liar=True, n_startup_trials=RANDOM)
        self._left, self._lot = left, keys.generator(seed, "untried")

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        value = super().sample_independent(study, trial, param_name, param_distribution)
        if self._left is None:
            return value
        begun = trial.params.items()
        fitting = [one[param_name] for one in self._left if all(one[name] == given for name, given in begun)]
        return value if value in fitting else fitting[int(self._lot.integers(len(fitting)))]


class Study:
    """The trials of one search. Use as a context."""

    def __init__(self, path: Path | None, space: Sequence[Axis], seed: int, warmup: int) -> None:
        self._lines = None if path is None else Lines(path)
        self._space, self._seed = space, seed
        pruner = optuna.pruners.MedianPruner(n_startup_trials=STARTUP, n_warmup_steps=warmup)
        storage = optuna.storages.InMemoryStorage() if self._lines is None else None
        try:
            with _quietly():
                kept = storage or optuna.storages.JournalStorage(self._lines)  # type: ignore[arg-type]
                self._study = optuna.create_study(
                    storage=kept, pruner=pruner, study_name=FACTS, direction="maximize", load_if_exists=True
                )
                self._axes()
        except Exception as error:  # whatever a file that somebody made up provokes
            self.__exit__()
            raise DataError(f"the study {path} cannot be read ({error}): remove the file to begin anew") from None

    def _axes(self) -> None:
        """The study is of these axes, and what its trials say of them can be."""
        here = {axis.name: axis for axis in self._space}
        for trial in self._study.trials:
            if trial.params.keys() - here.keys():
                raise DataError(f"it searches {', '.join(trial.params)}")
            for name, value in trial.params.items():
                if not _within(here[name], value):
                    raise DataError(f"trial {trial.number} is of {name}={value!r}")
            if not isinstance(trial.user_attrs.get(FACTS, {}), Mapping):
                raise DataError(f"what trial {trial.number} says of itself has no names")
            if trial.state == TrialState.COMPLETE and not _finite(trial.value):
                raise DataError(f"the score of trial {trial.number} is {trial.value!r}")

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._lines.close()

    # ------------------------------------------------------------ trials

    def begun(self) -> list[Proposal]:
        """Trials that have not ended."""
        found = self._in(TrialState.RUNNING)
        return [Proposal(t.number, self._values(t.params)) for t in found if len(t.params) == len(self._space)]

    def ended(self) -> list[Told]:
        """Those that have, in order."""
        ends: dict[TrialState, End] = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned"}
        found = self._in(TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
        return [
            Told(
                t.number,
                self._values(t.params),
                ends.get(t.state, "failed"),
                t.value,
                dict(t.user_attrs.get(FACTS) or {}),
            )
            for t in found
            if t.params
        ]

    def untried(self) -> list[dict[str, Any]] | None:
        """The choices that no trial has been of; None where they are without number."""
        every = combinations(self._space)
        if every is None:
            return None
        names = [axis.name for axis in self._space]
        tried = {tuple(t.params.get(name) for name in names) for t in self._study.get_trials(deepcopy=False)}
        return [one for one in every if tuple(one[name] for name in names) not in tried]

    def ask(self) -> Proposal:
        """A new trial, of what is yet untried. What is proposed follows from the seed and from how those before
        ended."""
        with _quietly():
            number = len(self._study.trials)
            seed = int(keys.key(self._seed, "trial", number)) % (1 << 32)
            self._study.sampler = Untried(self.untried(), seed)
            trial = self._study.ask()
            return Proposal(trial.number, self._values({axis.name: _suggested(trial, axis) for axis in self._space}))

    def report(self, number: int, round: int, score: float) -> bool:
        """A trial's score after a round; whether the trial is to be pruned."""
        with _quietly():
            trial = self._trial(number)
            if round not in trial.intermediate_values:
                optuna.trial.Trial(self._study, trial._trial_id).report(score, round)
            return self._study.pruner.prune(self._study, self._trial(number))

    def tell(self, number: int, end: End, score: float | None, facts: Mapping[str, Any]) -> None:
        states = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED, "failed": TrialState.FAIL}
        with _quietly():
            optuna.trial.Trial(self._study, self._trial(number)._trial_id).set_user_attr(FACTS, dict(facts))
            self._study.tell(number, score if end == "done" else None, state=states[end])

    def importance(self) -> dict[str, float]:
        """Which share of the differences between scores goes back to each setting; empty where there is too little to
        tell."""
        scores = {t.value for t in self._in(TrialState.COMPLETE)}
        if len(self._space) < 2 or len(scores) < STARTUP:
            return {}
        with _quietly():
            evaluator = optuna.importance.FanovaImportanceEvaluator(seed=self._seed)
            return dict(optuna.importance.get_param_importances(self._study, evaluator=evaluator))

    def _values(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {axis.name: axis.rounded(params[axis.name]) for axis in self._space if axis.name in params}

    def _in(self, *states: TrialState) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False, states=states)

    def _trial(self, number: int) -> FrozenTrial:
        return self._study.get_trials(deepcopy=False)[number]


def _within(axis: Axis, value: object) -> bool:
    """Whether it can have been proposed for this axis."""
    if axis.values:
        return value in axis.values
    near = 1e-5 * max(abs(axis.low), abs(axis.high))
    return _finite(value) and axis.low - near <= value <= axis.high + near  # type: ignore[operator]


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _suggested(trial: Any, axis: Axis) -> Any:
    if axis.values:
        return trial.suggest_categorical(axis.name, list(axis.values))
    if axis.whole:
        return trial.suggest_int(axis.name, int(axis.low), int(axis.high), log=axis.log)
    return trial.suggest_float(axis.name, axis.low, axis.high, log=axis.log)


@contextmanager
def _quietly() -> Iterator[None]:
    """Optuna tells of every step; here somebody else does."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        optuna.logging.set_verbosity(before)
