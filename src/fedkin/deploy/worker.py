"""What a site does when the server asks: the client half of a method on a cohort of one, its own.

The server names a method, its options and a phase; all three are looked up among what is installed here and checked.
No code comes over the network, and the site's own policy has the last word. What goes back is what the phase returns
as named tensors, written down in the log in words and bytes before it leaves; the personal model is never part of it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import secrets
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedkin.core.federation import Masked, wire_bytes
from fedkin.data import Reading, Shown
from fedkin.data.image_folder import AS_THEY_ARE
from fedkin.data.own import read_site
from fedkin.data.targets import WORDS, Targets
from fedkin.deploy.joining import Joined, OwnCohort, join, whole
from fedkin.deploy.node import LIMIT
from fedkin.deploy.policy import Declined, Policy, rounded
from fedkin.deploy.state import Stamp, write_private
from fedkin.deploy.trunk import LacksFrozenWeights
from fedkin.deploy.wire import Parcel, pack, unpack
from fedkin.engines.measurement import measurement
from fedkin.errors import FedKinError, UsageError
from fedkin.methods.base import REPORTS
from fedkin.use.model_file import Card, tensors_of
from fedkin.use.model_file import save as save_model

Say = Callable[[str], None]

MODEL = "personal.safetensors"
RECORD = "record.jsonl"
NOTED = ("kind", "run", "round", "phase", "call", "config", "reason")  # of a message, on record
SERVER_HALF = {"start", "round", "shared", "deliver", "deliver_to", "deliver_to_all", "welcome", "needs", "finish"}
PERSONAL = "rows"  # what `report` adds for the simulator, and no site sends


@dataclass
class Worker:
    """`secret`: noise and private starting points are drawn from a seed of this site's own. Without it they are drawn
    from the run's seed, as in a simulation, and the server could draw them too."""

    name: str
    data: Path
    folder: Path
    say: Say
    label: str = "label"
    targets: Targets = "classes"
    vocabulary: int = 0
    categories: tuple[str, ...] = ()
    shown: Shown = AS_THEY_ARE
    device: str = "auto"
    secret: bool = True
    limit: int = LIMIT
    policy: Policy = field(default_factory=Policy)
    joined: Joined | None = None
    finished: bool = False
    refused: str | None = None  # why the server does not want this site, if so
    process: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._noted: dict[str, Any] = {}  # of the message that is being answered, for the record
        if self.targets == "tokens" and not self.vocabulary:
            raise UsageError("how many token ids are there? Say --vocabulary N, the same at all sites")
        say = self.say
        self.say = lambda text: say(printable(text))
        how = Reading(self.label, None, self.categories, self.vocabulary, self.targets, self.shown)
        read = read_site(self.data, self.name, how)
        self.own, self.columns = read.parts[0], read.columns
        if self.policy.test_share is not None and self.own.tests is None:
            self._hold_back(self.policy.test_share)
        self.say(f"{self.data}: {len(self.own.x)} samples of shape {self.own.x.shape[1:]}, {self._labelled()}")

    def _labelled(self, told: str = "") -> str:
        """What the samples are labelled with, in words."""
        if self.targets == "classes":
            return f"{told}{len(np.unique(self.own.y))} classes"
        return f"targets that are {WORDS[self.targets]}"

    @property
    def model_file(self) -> Path:
        """The model of the last run that ended; each run's own is in its folder."""
        return self.folder / MODEL

    @cached_property
    def data_print(self) -> str:
        """Tells whether the data are those a run began with; stays here."""
        digest = hashlib.sha256(str((self.own.x.dtype, self.own.x.shape, self.own.tests)).encode())
        digest.update(np.ascontiguousarray(self.own.x).data)
        digest.update("\n".join(map(str, self.own.y.tolist())).encode())
        if self.columns:
            digest.update(repr(self.columns).encode())
        return digest.hexdigest()

    def _hold_back(self, share: float) -> None:
        """The site's own test samples, the same for every run: the server's share and seed do not enter."""
        own, rng = self.own, np.random.Generator(np.random.PCG64(self._seed()))
        order = rng.permutation(len(own.x))
        tests = max(1, round(share * len(order)))
        if tests >= len(order):
            raise FedKinError(f"{self.data}: {len(order)} samples are too few to keep {share:g} of them for testing")
        self.own = replace(own, x=own.x[order], y=own.y[order], tests=tests)

    def answer(self, parcels: Mapping[str, bytes]) -> bytes:
        """The reply to a message, on record before it leaves."""
        self._noted = {"asked_bytes": sum(map(len, parcels.values()))}
        reply = self._answer(parcels)
        try:
            self._record(len(reply))
        except OSError as error:
            self.say(f"failed: {self.folder / RECORD} cannot be written ({error}); nothing is answered off the record")
            return pack({}, {"kind": "failed", "reason": "the site cannot write its record"})
        return reply

    def _record(self, size: int) -> None:
        """One line of JSON: what was asked and what is answered, by names and sizes. Lines are only ever added."""
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **self._noted, "sent_bytes": size}
        file = os.open(self.folder / RECORD, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, (json.dumps(line) + "\n").encode("ascii"))
        finally:
            os.close(file)

    def _answer(self, parcels: Mapping[str, bytes]) -> bytes:
        """Whatever goes wrong becomes a reply that says so."""
        try:
            own = unpack(parcels["own"], self.limit)
            shared = unpack(parcels["all"], self.limit) if "all" in parcels else Parcel({}, {})
            message = Parcel(own.fields, {**shared.values, **own.values})
            kind = message.fields.get("kind")
            self._noted |= {name: str(message.fields[name])[:2000] for name in NOTED if name in message.fields}
            self._noted["asked"] = _sizes(message.values)
            if kind == "hello":
                return self._hello()
            if kind == "join":
                return self._join(message)
            if kind == "call":
                return self._call(message)
            if kind == "done":
                return self._done(message)
            if kind == "refused":
                self.refused = printable(f"the server refuses: {str(message.fields.get('reason'))[:300]}")
                return pack({}, {"kind": "bye"})
            raise FedKinError(f"a message of no known kind ({kind!r})")
        except FedKinError as error:
            self.say(f"failed: {error}")
            return self._failed(str(error)[:500])
        except (Exception, SystemExit) as error:  # a network's own code may try to end the process
            self.say(f"failed: {''.join(traceback.format_exception(error))}")
            return self._failed(f"{type(error).__name__}; the site's log says more")

    @property
    def failed(self) -> bool:
        """Whether the last message could not be answered."""
        return "failed" in self._noted

    def _failed(self, reason: str) -> bytes:
        self._noted["failed"] = reason
        return pack({}, {"kind": "failed", "reason": reason})

    # ------------------------------------------------------------ joining

    def _hello(self) -> bytes:
        from fedkin.version import VERSION

        x, y = self.own.x, self.own.y
        labels = np.unique(y) if self.targets == "classes" else y[:0]
        facts: dict[str, Any] = {
            "kind": "hello",
            "site": self.name,
            "process": self.process,
            "fedkin": VERSION,
            "samples": len(x),
            "tests": self.own.tests,
            "shape": list(x.shape[1:]),
            "dtype": x.dtype.name,
            "labels": [v.item() for v in labels],
            "targets": self.targets,
            "width": y.shape[1] if y.ndim == 2 else 1,
            "vocabulary": self.vocabulary,
        }
        if self.columns:
            facts["columns"] = [[c.name, list(c.categories)] for c in self.columns]
        words = sum(len(c.categories) for c in self.columns)
        table = f", the names of {len(self.columns)} columns and of {words} words in them" if self.columns else ""
        self.say(
            f"sent: name, {len(x)} samples of shape {tuple(x.shape[1:])}, {self._labelled('the names of ')}{table}"
        )
        return pack({}, facts)

    def _join(self, message: Parcel) -> bytes:
        try:
            self.joined, sizes, remark = join(self, message)
        except LacksFrozenWeights as error:
            self.say("sent: that it has not the server's frozen weights; they are sent once")
            return pack({}, {"kind": "lacking", "frozen": str(error)})
        job, config, begin = self.joined, self.joined.config, message.fields["round"]
        if message.fields.get("late") is True:
            how = f"after its round {begin}, for a model by the recipe of {config.method}: {config.epochs} epochs"
        else:
            how = f"{config.method}, {config.model}, {config.rounds} rounds, from round {begin + 1}"
        self.say(f"joined run {job.run} as number {job.place + 1} of {len(job.site.names)}: {how}{remark}")
        counts = ", ".join(f"{n} {k}" for k, n in sizes.items())
        self.say(f"sent: that it takes part, and on how many samples: {counts}")
        return pack({}, {"kind": "joined", **sizes, "remark": remark})

    # ------------------------------------------------------------ working

    def _call(self, message: Parcel) -> bytes:
        f, job = message.fields, self.joined
        if job is None or f.get("run") != job.run or f.get("attempt") != job.attempt:
            raise FedKinError("asked to work for a run that this site has not joined")
        phase, number = str(f["phase"]), whole(f, "round")
        call = whole(f, "call", low=-1)
        self._check_count(job, number)
        measures = phase in REPORTS.values()
        self._check_phase(job, phase)
        if not measures:
            self._in_order(job, number, call, f.get("checkpoints"))
        before = job.kept
        begin, steps = time.perf_counter(), job.site.chooser.client_steps
        cohort = OwnCohort(job.site, np.array([job.place], np.int64), number, phase)
        cohort.secret = self._seed() if self.secret else None
        cohort.exact = measures or self.policy.evaluation == 0
        try:
            given = {k: _on(v, job) for k, v in message.values.items()}
            reply = getattr(job.method, phase)(cohort, **given)
            checked = _checked(reply, phase)
        except BaseException:
            job.kept = before
            raise
        if measures:
            job.kept = before
            rows = checked.pop(PERSONAL)
            if isinstance(rows, Tensor):
                self._keep_model(job, rows, number)
            checked = self.policy.coarse(measurement(checked), job.site.task, job.site.extra)
        else:
            job.stamp = Stamp(number, call, job.attempt, phase)
            job.vault.save(job.stamp, job.kept)
        loss = float(cohort.losses.float().nanmean()) if len(cohort.losses) else math.nan
        loss = rounded(loss) if self.policy.evaluation != 0 else loss
        fields = {
            "kind": "reply",
            "loss": loss if math.isfinite(loss) else None,
            "seconds": time.perf_counter() - begin,
            "steps": job.site.chooser.client_steps - steps,
        }
        packed = pack(checked, fields, job.transport)
        self._noted["sent"] = _sizes(checked)
        job.questions[number] = job.questions.get(number, 0) + 1
        if len(packed) > self.limit:
            raise FedKinError(f"a reply of {len(packed)} bytes: at most {self.limit} can be sent")
        when = f"after round {number}" if measures else f"round {number + 1}"
        known = f"loss {loss:.4g}, " if math.isfinite(loss) else ""
        work = f"{known}{fields['steps']} steps, {fields['seconds']:.2f} s"
        told = ", ".join(m.name for m in (job.site.task.metric, *job.site.extra))
        words = f"{_in_words(checked)} ({told})" if measures else _in_words(checked)
        self.say(f"sent: {words}; {work}; {len(packed)} bytes in all; {when}, {phase}")
        return packed

    def _check_count(self, job: Joined, number: int) -> None:
        """Questions that are answered have an end in each round, and so have rounds."""
        if number > job.config.rounds:
            raise FedKinError(f"asked for round {number + 1} of {job.config.rounds}")
        if job.questions.get(number, 0) >= self.policy.questions:
            raise Declined(
                f"one question more of round {number + 1}: this site's policy answers at most "
                f"{self.policy.questions} (questions)"
            )

    def _check_phase(self, job: Joined, phase: str) -> None:
        """A client function of this method: public, and it takes a client first."""
        function = getattr(type(job.method), phase, None) if phase.isidentifier() else None
        if phase.startswith("_") or phase in SERVER_HALF or not inspect.isfunction(function):
            raise FedKinError(f"phase {phase!r}: {job.config.method} has no such client function")
        if list(inspect.signature(function).parameters)[1:2] != ["client"]:
            raise FedKinError(f"phase {phase!r}: {job.config.method} has no such client function")

    def _in_order(self, job: Joined, number: int, call: int, checkpoints: object) -> None:
        asked, last = (number, call), (job.stamp.round, job.stamp.call)
        if asked == last and job.stamp.attempt == job.attempt:  # asked again: from where it was before
            job.vault.undo()
            job.stamp = job.vault.stamp() or job.stamp
            job.load()
        elif asked < last:
            raise FedKinError(f"asked for round {number + 1}, but this site is at round {job.stamp.round + 1}")
        rounds = checkpoints if isinstance(checkpoints, list) else []
        job.vault.mark([c for c in rounds if isinstance(c, int)], job.stamp, number)

    def _keep_model(self, job: Joined, rows: Tensor, number: int) -> None:
        card = Card(**{**vars(job.card), "round": number})
        tensors = tensors_of(job.site.layout.load(job.network, rows[0].detach().cpu()))
        if all(bool(t.isfinite().all()) for t in tensors.values()):
            save_model(job.vault.folder / MODEL, tensors, card)
        else:
            self.say(f"this site's model after round {number} is not finite: the one before is kept")

    def _seed(self) -> int:
        """This site's own seed; made once, kept beside its state."""
        path = self.folder / "secret"
        if not path.exists():
            write_private(path, str(secrets.randbits(62)).encode())
        return int(path.read_text())

    def _done(self, message: Parcel) -> bytes:
        self.finished = True
        made = self.joined.vault.finish() if self.joined is not None else None
        if made is None:
            self.say("the run is over; no model of it was kept here")
        else:
            self.say(f"the run is over; this site's model is {self._publish(made)}")
        return pack({}, {"kind": "bye"})

    def _publish(self, made: Path) -> str:
        """The finished model at the place where it is looked for; the one that was there stays beside it."""
        try:
            if self.model_file.exists():
                write_private(self.folder / f"previous-{MODEL}", self.model_file.read_bytes())
            write_private(self.model_file, made.read_bytes())
        except OSError as error:
            return f"{made}; {self.model_file} could not be written ({error})"
        return f"{self.model_file}, also {made}"


def _on(value: Any, job: Joined) -> Any:
    return value.to(job.site.source.device) if isinstance(value, Tensor) else value


def _checked(reply: object, phase: str) -> dict[str, Tensor | Masked]:
    """Only named tensors leave: a function that returns a bare tensor (a model) is not one for the server."""
    if reply is None:
        return {}
    if not isinstance(reply, Mapping):
        raise FedKinError(f"phase {phase!r}: what it returns stays here")
    return dict(reply)


def _sizes(values: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of what travels, by name; numbers and words count as eight."""
    return {n: wire_bytes(v) if isinstance(v, Tensor | Masked) else 8 for n, v in values.items()}


def printable(text: str) -> str:
    """For a log on a terminal: no control codes, and no second line that looks like a first."""
    lines = (
        "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        for line in text.rstrip("\n").split("\n")
    )
    return "\n    ".join(lines)


def _in_words(values: Mapping[str, Tensor | Masked]) -> str:
    words = []
    for name, value in values.items():
        count = int(value.mask.sum()) if isinstance(value, Masked) else value.numel()
        words.append(f"{name} {size_in_words(wire_bytes(value))}, {count} numbers")
    return "; ".join(words) or "that it is done"


def size_in_words(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB" if size >= 1000 else f"{size} B"
