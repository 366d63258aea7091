"""A site's worker, its state on disk, and the server's side of an exchange, without a network between them."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cryptography")

from typer.testing import CliRunner

from fedkin import plugins
from fedkin.cli.application import app
from fedkin.config import make_config
from fedkin.core import notes
from fedkin.core.federation import Answer, Each, Federation, Masked, Spec
from fedkin.data import load
from fedkin.data.clients import split_client, split_sizes
from fedkin.deploy.greeting import Facts, fitting, together
from fedkin.deploy.joining import TRAVELS
from fedkin.deploy.link import Arrived
from fedkin.deploy.server import prepare_deployed
from fedkin.deploy.sites import Sites, delivery
from fedkin.deploy.state import Stamp, Vault
from fedkin.deploy.wire import Parcel, pack, unpack
from fedkin.deploy.worker import Worker
from fedkin.engines.conduct import ConductRecord
from fedkin.engines.measurement import Judge
from fedkin.engines.rehearsal import most_bytes
from fedkin.engines.remote import Arrival, Bounds, Delivery, Invalid, Remote, Terms, TooFew
from fedkin.errors import DataError, FedKinError
from fedkin.methods.ditto import Ditto
from fedkin.models import MODELS
from fedkin.rounds import comparable

# ---------------------------------------------------------------- the state on disk

EXPECTED = {"personal": ((1, 3), torch.float32)}


def kept(vault: Vault) -> list[float]:
    found = vault.load(EXPECTED)
    return found["personal"][0].tolist() if found else []


def test_state_goes_forward_and_back(tmp_path: Path) -> None:
    vault = Vault(tmp_path, "run-1")
    assert vault.stamp() is None
    vault.begin(Stamp(0, -1, 7))
    stamp = Stamp(0, -1, 7)
    for number in range(5):
        checkpoints = [c for c in (number - 1, number) if c > 0]  # the server keeps its newest two
        vault.mark(checkpoints, stamp, number)
        stamp = Stamp(number, 0, 7, "train")
        vault.save(stamp, {"personal": torch.full((1, 3), float(number))})
    assert Vault(tmp_path, "run-1").stamp() == Stamp(4, 0, 7, "train")
    assert kept(vault) == [4.0] * 3
    assert sorted(p.stem for p in vault.folder.glob("round-*")) == ["round-000003", "round-000004"]
    assert vault.undo()
    assert (kept(vault), vault.stamp()) == ([3.0] * 3, Stamp(3, 0, 7, "train"))
    assert vault.go_back(3)
    assert (kept(vault), vault.stamp()) == ([2.0] * 3, Stamp(2, 0, 7, "train"))
    assert not vault.go_back(1)
    assert all(p.stat().st_mode & 0o077 == 0 for p in vault.folder.iterdir())


def test_a_state_in_the_middle_of_a_round_is_not_taken_for_its_start(tmp_path: Path) -> None:
    vault = Vault(tmp_path, "run-1")
    vault.begin(Stamp(0, -1))
    vault.save(Stamp(2, 0), {"personal": torch.ones(1, 3)})
    vault.mark([2], Stamp(2, 0), 2)
    assert not vault.go_back(2)


def test_a_crash_while_writing_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vault = Vault(tmp_path, "run-1")
    vault.begin(Stamp(0, -1))
    vault.save(Stamp(0, 0), {"personal": torch.ones(1, 3)})
    for broken in ("replace", "fsync", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(os, broken, lambda *_: (_ for _ in ()).throw(OSError("power cut")))
            with pytest.raises(OSError, match="power cut"):
                vault.save(Stamp(1, 0), {"personal": torch.zeros(1, 3)})
        again = Vault(tmp_path, "run-1")
        assert (kept(again), again.stamp()) == ([1.0] * 3, Stamp(0, 0))
        assert not list(again.folder.glob(".*"))


def test_foreign_states_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a name"):
        Vault(tmp_path, "../elsewhere")
    vault = Vault(tmp_path, "run-1")
    vault.begin(Stamp(0, -1))
    vault.save(Stamp(0, 0), {"personal": torch.ones(1, 4)})
    with pytest.raises(DataError, match="another experiment"):
        vault.load(EXPECTED)
    with pytest.raises(DataError, match="which this method does not"):
        vault.load({})
    (vault.folder / "state.safetensors").write_bytes(b"garbage")
    with pytest.raises(DataError, match="damaged"):
        vault.stamp()


# ---------------------------------------------------------------- a worker


class Told:
    """A worker, and a server that talks to it in person."""

    def __init__(self, folder: Path, method: str, **settings: Any) -> None:
        digits = load("digits")
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "oslo.npz", x=digits.x[:60], y=digits.y[:60])
        self.folder, self.lines = folder, list[str]()
        self.worker = Worker("oslo", folder / "oslo.npz", folder / "site", self.lines.append, secret=False)
        self.hello = self.ask(kind="hello").fields
        values = {"method": method, "rounds": 5, "epochs": 1, "lr": 0.05, **settings}
        facts = [Facts.of(self.hello)]
        self.job = prepare_deployed(make_config(values), facts, Remote(None, ["oslo"]))  # type: ignore[arg-type]
        self.labels = together(facts)[2]

    def ask(self, values: Mapping[str, Any] | None = None, **fields: Any) -> Parcel:
        return unpack(self.worker.answer({"own": pack(values or {}, fields)}))

    def join(self, attempt: int = 1, round: int = 0, values: Mapping[str, Any] | None = None, **change: Any) -> Parcel:
        config = {k: v for k, v in self.job.config.to_dict().items() if k in TRAVELS}
        fields = {
            "run": "run-1",
            "attempt": attempt,
            "round": round,
            "place": 0,
            "clients": 1,
            "labels": self.labels,
            "config": {**config, **change.pop("config", {})},
            **change,
        }
        return self.ask({"initial": self.job.site.initial, **(values or {})}, kind="join", **fields)

    def call(
        self, phase: str, round: int, call: int = 0, attempt: int = 1, checkpoints: Sequence[int] = (), **values: Any
    ) -> Parcel:
        fields = {
            "run": "run-1",
            "attempt": attempt,
            "phase": phase,
            "round": round,
            "call": call,
            "checkpoints": list(checkpoints),
        }
        return self.ask(values, kind="call", **fields)

    def personal(self) -> Tensor:
        assert self.worker.joined is not None
        return self.worker.joined.kept["personal"]


def test_what_leaves_a_site_is_said_and_the_model_stays(tmp_path: Path) -> None:
    told = Told(tmp_path, "ditto")
    assert told.join().fields["kind"] == "joined"
    model = told.job.method.model
    reply = told.call("train", 0, model=model)
    assert list(reply.values) == ["model"]
    assert f"sent: model 38.4 kB, {model.numel()} numbers" in told.lines[-1]
    assert "round 1, train" in told.lines[-1]
    report = told.call("report", 1, -1)
    assert sorted(report.values) == ["correct", "count", "loss"]
    assert all(v.numel() == 1 for v in report.values.values())  # type: ignore[union-attr]
    assert (tmp_path / "site" / "runs" / "run-1" / "personal.safetensors").exists()


def test_a_site_trains_in_the_order_it_is_told(tmp_path: Path) -> None:
    """The same samples in another round: only shuffled ones give another model."""
    same = {}
    for order in ("shuffled", "fixed"):
        told = Told(tmp_path / order, "fedavg", order=order)
        told.join()
        once, again = (told.call("train", r, model=told.job.method.model).values["model"] for r in (0, 1))
        same[order] = torch.equal(once, again)  # type: ignore[arg-type]
    assert same == {"shuffled": False, "fixed": True}


def test_a_site_trains_by_the_rate_of_the_round_and_by_its_own(tmp_path: Path) -> None:
    def trained(name: str, **settings: Any) -> Tensor:
        told = Told(tmp_path / name, "fedavg", **settings)
        assert told.join().fields["kind"] == "joined"
        found = told.call("train", 2, model=told.job.method.model).values["model"]
        assert isinstance(found, Tensor)
        return found

    small = trained("small", lr=0.01)
    assert torch.equal(small, trained("by round", lr=0.04, lr_schedule="exponential:gamma=0.5"))
    assert torch.equal(small, trained("by site", lr=0.04, lr_schedule="exponential:gamma=0.25", lr_factors="oslo=4"))
    assert not torch.equal(small, trained("usual", lr=0.04))


def test_a_site_is_judged_after_the_round_it_trained_in_and_as_received_later(tmp_path: Path) -> None:
    told = Told(tmp_path, "fedavg", eval_point="last_round", epochs=5)
    told.join()
    model = told.job.method.model
    told.call("train", 0, model=model)
    loss = {}
    for phase in ("report", "report_after_local", "report_last_round"):
        for now in (1, 2):
            reply = told.call(phase, now, call=-1, model=model)
            assert "rows" not in reply.values  # its model stays with it
            loss[phase, now] = float(reply.values["loss"])
    assert loss["report_last_round", 1] == loss["report_after_local", 1] < loss["report", 1]
    assert loss["report_last_round", 2] == loss["report", 2]
    assert loss["report_after_local", 2] == loss["report_after_local", 1]


def test_a_server_cannot_have_what_is_not_its_own(tmp_path: Path) -> None:
    told = Told(tmp_path, "ditto")
    told.join()
    for phase, why in [
        ("personal", "stays here"),
        ("after_local", "stays here"),
        ("round", "no such client function"),
        ("start", "no such client function"),
        ("state", "no such client function"),
        ("__init__", "no such"),
        ("deliver", "no such client function"),
        ("options", "no such client function"),
        ("os.system", "no such"),
    ]:
        reply = told.call(phase, 0)
        assert reply.fields["kind"] == "failed"
        assert why in reply.fields["reason"], phase
        assert not reply.values


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"config": {"method": "os.system"}}, "unknown method"),
        ({"config": {"lr": "import os"}}, "lr="),
        ({"config": {"lr_schedule": "os.system"}}, "unknown learning-rate schedule"),
        ({"config": {"lr_factors": "1+2+3"}}, "3 factors for 1 clients"),
        ({"config": {"lr_by_moon": "new"}}, "'lr_by_moon', which this FedKin does not know"),
        ({"config": {"options": {"lam": -1}}}, "lam"),
        ({"config": {"model": "resnet18"}}, "needs samples of shape"),
        ({"run": "../../etc"}, "not a name"),
        ({"place": 3}, "place 3"),
        ({"labels": ["a"]}, "is not in the server's list"),
        ({"attempt": "now"}, "whole number"),
    ],
)
def test_invitations_are_checked(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    told = Told(tmp_path, "ditto")
    reply = told.join(**change)
    assert reply.fields["kind"] == "failed"
    assert why in reply.fields["reason"]
    assert told.worker.joined is None


FILE = """
from pathlib import Path
import fedkin as fk

def wipe():
    Path("wiped").touch()

@fk.MODELS.register("ending")
def ending():
    raise SystemExit(3)
"""


def test_an_invitation_calls_nothing_in_a_file_but_its_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(MODELS, "_files", {})
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS.items()))
    (tmp_path / "helpers.py").write_text(FILE)
    plugins.give("helpers.py")
    told = Told(tmp_path, "ditto")
    config = {k: v for k, v in told.job.config.to_dict().items() if k in TRAVELS}
    for model, why in (("helpers.py:wipe", "nobody at this machine said"), ("ending", "SystemExit")):
        reply = told.join(config={**config, "model": model})
        assert reply.fields["kind"] == "failed"
        assert why in reply.fields["reason"]
    assert not (tmp_path / "wiped").exists()
    assert told.join().fields["kind"] == "joined"


def test_an_exception_leaves_the_state_of_the_last_exchange(tmp_path: Path) -> None:
    told = Told(tmp_path, "ditto")
    told.join()
    told.call("train", 0, model=told.job.method.model)
    before = told.personal()
    failed = told.call("train", 1, model=torch.zeros(3))
    assert failed.fields["kind"] == "failed"
    assert "the site's log says more" in failed.fields["reason"] or "shape" in failed.fields["reason"]
    assert torch.equal(told.personal(), before)
    assert told.worker.joined is not None
    assert told.worker.joined.vault.stamp() == Stamp(0, 0, 1, "train")
    assert told.call("train", 1, model=told.job.method.model).fields["kind"] == "reply"


def test_an_exception_after_a_change_takes_the_change_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(tmp_path, "ditto")
    told.join()
    model = told.job.method.model
    told.call("train", 0, model=model)
    before, honest = told.personal(), Ditto.train

    def breaks(self: Ditto, client: Any, model: Tensor) -> Any:
        honest(self, client, model)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Ditto, "train", breaks)
    assert "RuntimeError" in told.call("train", 1, model=model).fields["reason"]
    assert torch.equal(told.personal(), before)


def test_asked_again_a_site_answers_the_same(tmp_path: Path) -> None:
    told = Told(tmp_path, "ditto")
    told.join()
    model = told.job.method.model
    told.call("train", 0, model=model)
    first, after = told.call("train", 1, model=model), told.personal()
    again = told.call("train", 1, model=model)
    assert torch.equal(first.values["model"], again.values["model"])  # type: ignore[arg-type]
    assert torch.equal(told.personal(), after)
    assert "but this site is at round 2" in told.call("train", 0, model=model).fields["reason"]


def test_after_a_resume_a_site_goes_back_with_the_server(tmp_path: Path) -> None:
    """The server's checkpoint is of the start of round 3 (2 from 0); the site has been on to round 4."""
    told = Told(tmp_path, "ditto")
    told.join()
    model = told.job.method.model
    states = [
        told.personal() if told.call("train", r, checkpoints=range(max(0, r - 1), r + 1), model=model) else None
        for r in range(4)
    ]
    restarted = Told(tmp_path, "ditto")
    assert "back to its state at round 4" in restarted.join(attempt=2, round=3).fields["remark"]
    assert torch.equal(restarted.personal(), states[2])  # type: ignore[arg-type]
    restarted.call("train", 3, attempt=2, model=model)
    assert torch.allclose(restarted.personal(), states[3])  # type: ignore[arg-type]
    mid_run = Told(tmp_path, "ditto")
    assert mid_run.join(attempt=2, round=4).fields["remark"] == ""  # only the site restarted: nothing to undo
    assert torch.equal(mid_run.personal(), restarted.personal())
    early = Told(tmp_path, "ditto")
    assert "older ones are gone" in early.join(attempt=3, round=1).fields["remark"]
    fresh = Told(tmp_path, "ditto")
    fresh.join(attempt=4, round=0)
    assert fresh.worker.joined is not None
    assert fresh.worker.joined.kept == {}


def test_secret_noise_is_not_the_servers_to_draw(tmp_path: Path) -> None:
    told = Told(tmp_path, "fedpkda")
    told.join()
    shared = told.call("observe", 0).values["prototypes"]
    told.worker.secret = True
    secret = told.call("observe", 1).values["prototypes"]
    other = Told(tmp_path / "other", "fedpkda")
    other.join()
    assert isinstance(shared, Masked)
    assert isinstance(secret, Masked)
    drawn = other.call("observe", 1).values["prototypes"]
    assert isinstance(drawn, Masked)
    assert not torch.allclose(secret.values, drawn.values)
    assert (tmp_path / "site" / "secret").stat().st_mode & 0o077 == 0


# ---------------------------------------------------------------- what sites say about themselves

FACTS = {"site": "oslo", "samples": 10, "tests": None, "shape": [1, 8, 8], "dtype": "uint8", "labels": [0, 1]}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"site": "../oslo"}, "name"),
        ({"site": 3}, "name"),
        ({"samples": 0}, "samples"),
        ({"samples": 9.0}, "samples"),
        ({"samples": True}, "samples"),
        ({"tests": 10}, "samples"),
        ({"shape": []}, "shape"),
        ({"shape": [0]}, "shape"),
        ({"labels": []}, "classes"),
        ({"labels": [1, "1"]}, "neither"),
        ({"labels": [1, 1]}, "neither"),
        ({"dtype": "object"}, "type"),
    ],
)
def test_facts_are_checked(change: dict[str, Any], why: str) -> None:
    assert Facts.of(FACTS).name == "oslo"
    with pytest.raises(DataError, match=why):
        Facts.of({**FACTS, **change})


def test_sites_that_do_not_fit_together() -> None:
    one = Facts.of(FACTS)
    assert together([one, Facts.of({**FACTS, "labels": [7, 1]})])[2] == [0, 1, 7]
    with pytest.raises(DataError, match="must be alike"):
        together([one, Facts.of({**FACTS, "site": "lima", "shape": [3]})])
    with pytest.raises(DataError, match="words for labels; they must be alike"):
        together([one, Facts.of({**FACTS, "site": "lima", "labels": ["a"]})])


def test_invented_classes_are_bounded_before_a_network_is_built() -> None:
    with pytest.raises(DataError, match="11 classes, but has 10 samples"):
        Facts.of({**FACTS, "labels": list(range(11))})
    many = Facts.of({**FACTS, "site": "lima", "samples": 10**6, "labels": list(range(5000))})
    kept, odd = fitting([Facts.of(FACTS), many], 1000)
    assert [f.name for f in kept] == ["oslo"]
    assert "with its 5000 classes there would be more than --max-classes 1000" in odd["lima"]


def test_sites_of_another_kind_than_most_do_not_fit() -> None:
    facts = [Facts.of({**FACTS, "site": name}) for name in ("oslo", "lima", "rome")]
    odd = [
        Facts.of({**FACTS, "site": "paris", "shape": [3]}),
        Facts.of({**FACTS, "site": "kyoto", "labels": ["a"]}),
        Facts.of({**FACTS, "site": "riga", "dtype": "float32"}),
    ]
    kept, why = fitting([*odd, *facts], 1000)
    assert [f.name for f in kept] == ["lima", "oslo", "rome"]
    assert sorted(why) == ["kyoto", "paris", "riga"]
    assert "shape (3,)" in why["paris"]
    assert "words for labels; most sites have uint8 samples of shape (1, 8, 8), numbers" in why["kyoto"]
    assert fitting([], 5) == ([], {})


class Deaf:
    """A link that nobody is on."""

    limit = 1 << 20

    def nodes(self) -> dict[int, str | None]:
        return {}


def gathering(*facts: dict[str, Any]) -> Sites:
    made = Sites(Deaf(), lambda text: None)  # type: ignore[arg-type]
    made.facts = {f["site"]: Facts.of(f) for f in facts}
    return made


def test_the_start_names_the_flag_that_goes_on_with_those_who_came() -> None:
    two, odd = [FACTS, {**FACTS, "site": "lima"}], {**FACTS, "site": "paris", "shape": [3]}
    with pytest.raises(FedKinError, match=r"2 of 3 sites came.*--wait, or start with those who came: --least 2"):
        gathering(*two).gather(3, 0.01)
    with pytest.raises(DataError, match=r"site 'paris' does not fit.*must be alike.*--least 2"):
        gathering(*two, odd).gather(3, 60)
    assert [f.name for f in gathering(*two, odd).gather(3, 60, least=2)] == ["lima", "oslo"]
    assert [f.name for f in gathering(*two).gather(3, 0.01, least=1)] == ["lima", "oslo"]
    with pytest.raises(FedKinError, match="2 of 4 sites came"):
        gathering(*two).gather(4, 0.01, least=3)
    declined = gathering(*two)
    declined.trouble["paris"] = "it names 5000 classes"
    begin = time.monotonic()
    assert len(declined.gather(3, 60, least=2)) == 2  # all three were heard of: nobody else is waited for
    assert time.monotonic() - begin < 10
    with pytest.raises(FedKinError, match="'paris': it names 5000 classes"):
        declined.gather(3, 0.01)


def test_a_site_that_declines_does_not_prevent_the_start_where_fewer_are_enough() -> None:
    sites = gathering(FACTS, {**FACTS, "site": "lima"})
    sites.fix_clients(list(sites.facts.values()), "run", 1, lambda place: ({}, {}))
    sites._ready, sites.trouble = {0}, {"lima": "its disk is full"}
    with pytest.raises(FedKinError, match=r"'lima' cannot take part: its disk is full.*--least 1"):
        sites.assemble(60, 2)
    begin = time.monotonic()
    sites.assemble(60, 1)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"FKW1",
        b"x" * 100,
        pack({}, {"kind": "hello"}),
        pack({}, {"kind": "joined"}),
        pack({}, {"kind": "failed"}),
        pack({}, {"kind": "hello", "site": ["a"], "labels": [[]]}),
        pack({}, {"kind": "hello", **FACTS, "labels": [[1]]}),
        pack({}, {"kind": "hello", **FACTS, "samples": 10**30}),
        pack({"x": torch.zeros(300_000)}, {"kind": "hello"}),
        pack({}, {"kind": "hello", **FACTS, "fedkin": {"a": 1}, "process": 3}),
    ],
)
def test_no_greeting_ends_the_server(reply: bytes) -> None:
    lines, refused = list[str](), list[str]()
    sites = Sites(Deaf(), lines.append)  # type: ignore[arg-type]
    sites._refuse = lambda node, why: refused.append(why)  # type: ignore[method-assign]
    sites._hear(7, "hello", Arrived("t", reply), "oslo")
    sites._hear(7, "join", Arrived("t", reply), "oslo")
    assert len(lines) == 2
    assert len(refused) == 1
    assert sites.facts == {}
    assert "oslo" in sites.trouble


def test_a_small_reply_that_would_become_large_is_refused() -> None:
    """A mask that one truth value tells, and nothing under it: a few hundred bytes for gigabytes."""
    mask = torch.zeros(1, 1, dtype=torch.bool)
    small = pack({"mask": mask, "model": Masked(torch.zeros(1, 1), mask)}, {"kind": "reply"})
    large = small.replace(b'"full": [1, 1]', b'"full": [1, 1, 1900000000]')
    header = int.from_bytes(small[4:8], "little") + len(large) - len(small)
    large = large[:4] + header.to_bytes(4, "little") + large[8:]
    assert len(large) < 500
    found = delivery(large, 64 << 20)
    assert isinstance(found, Invalid)
    assert "would become 9500000001 bytes, more than the limit of 67108864" in found.reason


def test_the_server_knows_how_many_samples_train_without_drawing_any() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        samples = int(rng.integers(1, 60))
        tests = None if rng.random() < 0.5 else int(rng.integers(0, samples))
        share, aside = float(rng.choice([0, 0.01, 0.25, 0.9])), float(rng.choice([0, 0.1, 0.5, 0.99]))
        drawn = split_client(rng.integers(0, 4, samples), tests, 3, 7, share, aside)
        assert split_sizes(samples, tests, share, aside) == tuple(map(len, drawn))
    begin = time.monotonic()
    split_sizes(10**9, None, 0.25, 0.1)
    assert time.monotonic() - begin < 0.1


def test_a_round_that_leaves_somebody_out_is_not_the_best(tmp_path: Path) -> None:
    told = Told(tmp_path, "fedavg")
    job, answers = told.job, iter([(5.0, 15.0), (6.0, 15.0), (0.0, 0.0)])
    assert job.sizes == [(45, 15)]

    def measure(ids: Any, function: str, message: Any, number: int) -> Answer:
        right, count = next(answers)
        values = {"correct": torch.tensor([[right]]), "count": torch.tensor([[count]]), "loss": torch.ones(1)}
        return Answer(ids, values) if count else Answer(ids[:0], failed={0: "site 'oslo': it is not connected"})

    job.engine.measure = measure  # type: ignore[attr-defined]
    for job.fed.round in (1, 2, 3):
        job._record(1, 0)
    assert [(r.judged, r.judgeable) for r in job.history] == [(1, 1), (1, 1), (0, 1)]
    assert [r.round for r in comparable(job.history)] == [1, 2]
    assert (job.fed.notes[-1].round, job.fed.notes[-1].name) == (2, "unjudged")
    assert notes.UNJUDGED.events(job.fed.notes[-1].value) == [(0, "unjudged", "site 'oslo': it is not connected")]
    half = [dataclasses.replace(r, judged=r.round, judgeable=4) for r in job.history]
    assert [r.round for r in comparable(half)] == [3]  # where no round covers all, those that come closest


def test_measurements_that_cannot_be_true_do_not_count() -> None:
    right = torch.tensor([[5.0], [9.0], [2.0], [2.0]])
    of = torch.tensor([[8.0], [8.0], [800.0], [8.0]])
    loss = torch.tensor([0.5, 0.1, 0.1, torch.nan])
    answer = Answer(np.arange(4), {"correct": right, "count": of, "loss": loss})
    found, why = Judge(tests=[8, 8, 8, 8]).believed(answer)
    correct, count, losses = found.correct, found.total, found.loss
    assert correct.tolist() == [5, 0, 0, 0]
    assert count.tolist() == [8, 0, 0, 0]
    assert losses[0] == pytest.approx(0.5)
    assert np.isnan(losses[1:]).all()
    assert sorted(why) == [1, 2, 3]
    assert why[1] == "says 9 of 8 test samples right; it has 8"
    assert "not finite" in why[3]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38, -1.0, 0.5])
@pytest.mark.parametrize("name", ["correct", "count", "loss"])
def test_no_measurement_ends_the_server(name: str, value: float) -> None:
    said = {"correct": torch.tensor([[5.0], [5.0]]), "count": torch.tensor([[8.0], [8.0]]), "loss": torch.ones(2)}
    said[name][1] = value
    found, why = Judge(tests=[8, 8]).believed(Answer(np.arange(2), dict(said)))
    correct, count = found.correct, found.total
    assert (correct[0], count[0]) == (5, 8)
    assert np.isfinite(correct).all()
    assert (1 in why) == (count[1] == 0)


@pytest.mark.parametrize("wrong", [torch.zeros(1, 1), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1)])
def test_measurements_of_another_shape_count_for_nobody(wrong: Tensor) -> None:
    answer = Answer(np.arange(1), {"correct": wrong, "count": torch.ones(1, 2), "loss": torch.ones(1)})
    found, why = Judge(tests=[8]).believed(answer)
    assert (found.correct[0], found.total[0], list(why)) == (0, 0, [0])
    assert Judge(tests=[8]).believed(Answer(np.arange(1), {}))[1] == {
        0: "sent [] instead of ['correct', 'count', 'loss']"
    }


# ---------------------------------------------------------------- an exchange


class Script:
    """A post whose sites answer as a test says: (client, time asked) to a delivery, a reason, or None for silence."""

    def __init__(self, plan: Callable[[int, int], Arrival | None], absent: Sequence[int] = ()) -> None:
        self.plan, self.absent, self.asked = plan, set(absent), dict[int, int]()
        self.sent: list[tuple[list[int], Mapping[str, object]]] = []
        self.bounds: list[Bounds] = []
        self.due: dict[int, Arrival] = {}
        self.cancelled: list[int] = []

    def send(
        self, ids: Sequence[int], message: Mapping[str, object], fields: Mapping[str, Any], bounds: Bounds
    ) -> dict[int, str]:
        self.sent.append((list(ids), message))
        self.bounds.append(bounds)
        for client in ids:
            self.asked[client] = self.asked.get(client, 0) + 1
            found = self.plan(client, self.asked[client])
            if client not in self.absent and found is not None:
                self.due[client] = found
        return {c: "it is not connected" for c in ids if c in self.absent}

    def collect(self) -> dict[int, Arrival]:
        due, self.due = self.due, {}
        return due

    def cancel(self, ids: Sequence[int]) -> None:
        self.cancelled += ids

    def present(self, client: int) -> bool:
        return client not in self.absent


def good(client: int, asked: int = 1) -> Delivery:
    return Delivery({"model": torch.full((1, 3), float(client))}, {"loss": 0.5 + client, "steps": 2})


NAMES = ["bergen", "kyoto", "lima", "oslo"]
IDS = np.arange(4)


def rehearsed(*args: Any) -> Spec:
    return {"model": ((3,), torch.float32, False)}


def engine_of(script: Script, terms: Terms | None = None) -> Remote:
    engine = Remote(script, NAMES, terms)
    engine.rehearse = rehearsed
    return engine


def test_replies_are_stacked_in_order_and_wrong_ones_are_failures() -> None:
    def plan(client: int, asked: int) -> Delivery | str:
        return Delivery({"model": torch.zeros(1, 2)}) if client == 1 else "boom" if client == 2 else good(client)

    engine = engine_of(Script(plan))
    answer = engine.call(IDS, "train", {"model": torch.zeros(3)}, 0)
    assert answer.ids.tolist() == [0, 3]
    assert isinstance(answer.replies["model"], Tensor)
    assert answer.replies["model"][:, 0].tolist() == [0.0, 3.0]
    assert answer.failed == {1: "site 'kyoto': 'model' has shape [2] instead of [3]", 2: "site 'lima': boom"}
    assert engine.losses[3] == 3.5
    assert engine.client_steps == 4


def test_a_reply_that_is_no_row_is_a_failure() -> None:
    wrong = [Delivery({"model": 3.0}), Delivery({"model": torch.zeros(())}), Delivery({"model": torch.zeros(2, 3)})]
    engine = engine_of(Script(lambda c, a: wrong[c] if c < 3 else good(c)), Terms(minimum=0.25))
    answer = engine.call(IDS, "train", {}, 0)
    assert answer.ids.tolist() == [3]
    found = ("a float", "of shape []", "of shape [2, 3]")
    assert answer.failed == {c: f"site '{NAMES[c]}': 'model' {f}, not one row of numbers" for c, f in enumerate(found)}


def test_each_site_gets_its_own_row() -> None:
    script = Script(good)
    engine_of(script).call(IDS[1:], "train", {"model": Each(torch.arange(3.0)[:, None])}, 0)
    ids, message = script.sent[0]
    assert ids == [1, 2, 3]
    assert isinstance(message["model"], Each)
    assert message["model"].rows[:, 0].tolist() == [0.0, 1.0, 2.0]


def test_the_deadline_ends_an_exchange_and_late_replies_are_not_wanted() -> None:
    script = Script(lambda c, a: None if c == 2 else good(c))
    answer = engine_of(script, Terms(deadline=0.2)).call(IDS, "train", {}, 0)
    assert answer.ids.tolist() == [0, 1, 3]
    assert "'lima': no reply within 0.2 s" in answer.failed[2]
    assert "too late" in answer.failed[2]
    assert script.cancelled == [2]


def test_with_too_few_replies_those_who_come_back_are_asked_again() -> None:
    script = Script(lambda c, a: "died" if c >= 2 and a == 1 else good(c), absent=[1])
    message = {"model": Each(torch.arange(4.0)[:, None])}
    answer = engine_of(script, Terms(deadline=5, minimum=0.75)).call(IDS, "train", message, 0)
    assert answer.ids.tolist() == [0, 2, 3]
    assert answer.failed == {1: "site 'kyoto': it is not connected"}
    ids, again = script.sent[1]
    assert ids == [2, 3]
    assert again["model"].rows[:, 0].tolist() == [2.0, 3.0]  # type: ignore[attr-defined]


def test_after_long_enough_the_run_stops_and_says_who_is_missing() -> None:
    engine = engine_of(Script(good, absent=[1, 2, 3]), Terms(deadline=0.1, minimum=0.5, give_up=0.2))
    with pytest.raises(TooFew, match=r"1 of 4 sites answered; 1 of 4 are there, 2 are needed.*'kyoto'.*resume"):
        engine.call(IDS, "train", {}, 4)


def test_a_phase_that_asks_one_site_does_not_hang_on_it() -> None:
    """The least number is of the federation: those not asked count if they are there."""
    for script in (Script(good, absent=[2]), Script(lambda c, a: "boom"), Script(lambda c, a: Invalid("rubbish"))):
        begin = time.monotonic()
        answer = engine_of(script, Terms(give_up=60)).call(IDS[2:3], "collect", {}, 0)
        assert len(answer.ids) == 0
        assert list(answer.failed) == [2]
        assert time.monotonic() - begin < 5
    with pytest.raises(TooFew):  # of four sites two are needed, one is there
        engine_of(Script(good, absent=[1, 2, 3]), Terms(give_up=0.1)).call(IDS[2:3], "collect", {}, 0)


def test_sites_that_fail_are_asked_less_and_less_often() -> None:
    script = Script(lambda c, a: "boom" if c else good(c))
    with pytest.raises(TooFew, match=r"'kyoto': .*boom"):
        engine_of(script, Terms(minimum=1.0, pause=0.05, give_up=1.2)).call(IDS, "train", {}, 0)
    assert 2 <= script.asked[1] <= 4  # after 0, 0.05, 0.25 and 1.05 s
    script.sent.clear()


def test_a_good_reply_makes_up_for_everything() -> None:
    register = ConductRecord(2, pause=1.0, most=3)
    assert not register.failed(0, "a", 10.0, invalid=True)
    assert register.paused(0, 10.9) == "not asked for another 0 s: it failed once, last: a"
    assert register.paused(0, 11.0) is None
    assert not register.failed(0, "b", 20.0, invalid=True)
    assert register.paused(0, 23.9) is not None
    assert register.paused(1, 23.9) is None
    register.good(0)
    assert register.paused(0, 23.9) is None
    for _ in range(20):
        assert not register.failed(0, "out of memory", 100.0)  # failing is no crime, only boring
    assert "another 60 s" in str(register.paused(0, 100.0))
    assert [register.failed(1, "rubbish", 0.0, invalid=True) for _ in range(3)] == [False, False, True]
    late = ConductRecord(1, pause=0.2, most=0)
    late.failed(0, "silent", 0.0, waited=600.0)
    assert late.paused(0, 1.0) is None  # once may be bad luck
    assert not any(late.failed(0, "silent", 0.0, True, 600.0) for _ in range(50))
    assert late.paused(0, 599.0) is not None
    assert late.paused(0, 600.0) is None


def test_too_many_invalid_messages_remove_a_site_for_good() -> None:
    script = Script(lambda c, a: Delivery({"gift": torch.zeros(1, 3)}) if c == 1 else "boom" if c == 2 else good(c))
    engine, lines = engine_of(script, Terms(pause=0.0, invalid=3)), list[str]()
    fed = Federation(engine, np.ones(4), names=NAMES)
    engine.alive, engine.expel = lambda: fed.alive.ids.tolist(), lambda c, why: fed.remove([c], why)
    engine.say = lines.append
    for fed.round in range(5):
        fed.ask(fed.alive, good)
    assert fed.removed == {1: 2}
    last = "sent ['gift'] instead of ['model']"
    assert fed.why_removed[1] == f"3 invalid messages in a row, the last: {last}"
    assert lines == [f"site 'kyoto': removed for good after {fed.why_removed[1]}"]
    assert [script.asked[c] for c in range(4)] == [5, 3, 5, 5]
    again = Federation(engine, np.ones(4))
    again.restore(fed.state())
    assert (again.removed, again.why_removed) == (fed.removed, fed.why_removed)


def test_a_silent_site_costs_a_deadline_only_now_and_then() -> None:
    script = Script(lambda c, a: None if c == 2 else good(c))
    engine = engine_of(script, Terms(deadline=0.3, phases={"quick": 0.1}, pause=0.01))
    begin = time.monotonic()
    for number in range(20):
        assert engine.call(IDS, "quick", {}, number).ids.tolist() == [0, 1, 3]
    assert script.asked[2] < 15
    assert time.monotonic() - begin < 15 * 0.2
    assert {b.seconds for b in script.bounds} == {0.1}


def test_a_reply_may_become_no_more_than_twice_what_is_right() -> None:
    script = Script(good)
    engine_of(script).call(IDS, "train", {}, 0)
    assert script.bounds[0].bytes == 2 * 12 + (1 << 20)
    masked = most_bytes({"w": ((10, 4), torch.float32, True), "n": ((), torch.int64, False)})
    assert masked == 2 * (40 * 9 + 8) + (1 << 20)  # the values, where they go, and the mask


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"loss": 1e300}, "loss of 1e\\+300"),
        ({"loss": -1e300}, "loss"),
        ({"loss": "low"}, "loss of low"),
        ({"loss": 10**400}, "loss"),
        ({"loss": True, "steps": True}, ""),
        ({"steps": -1}, "-1 training steps"),
        ({"steps": 1 << 41}, "steps"),
        ({"steps": 1e300}, "steps"),
        ({"steps": None}, "steps"),
        ({"loss": float("nan")}, "loss of nan"),
        ({"loss": float("inf")}, "loss"),
        ({"loss": [1]}, "loss"),
    ],
)
def test_what_a_site_says_about_its_work_cannot_end_the_server(fields: dict[str, Any], why: str) -> None:
    said = Delivery({"model": torch.zeros(1, 3)}, fields)
    engine = engine_of(Script(lambda c, a: said if c == 1 else good(c)))
    answer = engine.call(IDS, "train", {}, 0)
    assert re.search(why, answer.failed.get(1, "")) is not None
    assert (1 in answer.failed) == bool(why)
    assert 0 <= engine.client_steps <= 7


# ---------------------------------------------------------------- what is right is known


ODD: dict[str, dict[str, Any]] = {
    "shape": {"model": torch.zeros(1, 4)},
    "axes": {"model": torch.zeros(1, 3, 1)},
    "empty": {"model": torch.zeros(1, 0)},
    "nothing": {},
    "float64": {"model": torch.zeros(1, 3, dtype=torch.float64)},
    "int64": {"model": torch.zeros(1, 3, dtype=torch.int64)},
    "names": {"gift": torch.zeros(1, 3)},
    "more": {"model": torch.zeros(1, 3), "gift": torch.zeros(1, 3)},
    "number": {"model": 1.0},
    "mask": {"model": Masked(torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool))},
    "text": {"model": "rm -rf"},
}


@pytest.mark.parametrize("how", ODD)
@pytest.mark.parametrize("liars", [1, 3, 4])
def test_a_wrong_reply_is_wrong_however_many_send_it(how: str, liars: int) -> None:
    """A site alone, and all of them together: they do not decide what is right."""
    script = Script(lambda c, a: Delivery(ODD[how]) if c < liars else good(c))
    engine = engine_of(script, Terms(minimum=0.0))
    fed = Federation(engine, np.ones(4), names=NAMES)
    replies = fed.ask(fed.all, good)
    assert list(replies.clients) == list(range(liars, 4))
    assert sorted(f.client for f in fed.failures) == list(range(liars))
    assert len(fed.ask(fed.all[:1], good)) == 0
    if liars < 4:
        assert replies["model"].tolist() == [[c] * 3 for c in range(liars, 4)]


def test_what_cannot_be_rehearsed_is_decided_by_most_of_at_least_two_and_said() -> None:
    odd, lines = Delivery({"model": torch.zeros(1, 5)}), list[str]()
    for liars, kept in (([1], [0, 2, 3]), ([0, 1, 2], [0, 1, 2]), ([0, 1], [])):
        script = Script(lambda c, a, liars=liars: odd if c in liars else good(c))  # type: ignore[misc]
        engine = Remote(script, NAMES, Terms(minimum=0.0))
        engine.rehearse, engine.say = lambda *args: "KeyError: 'x'", lines.append
        assert engine.call(IDS, "train", {}, 0).ids.tolist() == kept
    assert lines[0].startswith("phase 'train' cannot be rehearsed (KeyError: 'x')")
    engine = Remote(Script(good), NAMES, Terms(minimum=0.0))
    alone = engine.call(IDS[:1], "train", {}, 0)
    assert len(alone.ids) == 0
    assert "nothing tells what it should look like" in alone.failed[0]
    engine.call(IDS, "train", {}, 1)
    assert engine.call(IDS[:1], "train", {}, 2).ids.tolist() == [0]  # what most sent before still holds


def test_a_phase_that_answers_otherwise_later_on_is_rehearsed_anew() -> None:
    script = Script(lambda c, a: Delivery({"model": torch.zeros(1, 3 if a == 1 else 5)}))
    engine, asked = Remote(script, NAMES, Terms(pause=0.0)), list[tuple[int, bool]]()

    def rehearse(function: str, message: Any, number: int, anew: bool) -> Spec:
        asked.append((number, anew))
        return {"model": ((5 if anew else 3,), torch.float32, False)}

    engine.rehearse = rehearse
    assert len(engine.call(IDS, "train", {}, 0).ids) == 4
    assert asked == [(0, False)]
    assert len(engine.call(IDS, "train", {}, 1).ids) == 4
    assert asked == [(0, False), (1, False), (1, True)]
    script.plan = lambda c, a: Delivery({"model": torch.zeros(1, 3 if c == 0 else 5)})  # who knows the old look
    answer = engine.call(IDS, "train", {}, 2)
    assert answer.ids.tolist() == [1, 2, 3]
    assert "shape [3] instead of [5]" in answer.failed[0]


def test_calls_are_numbered_within_their_round() -> None:
    seen: list[tuple[int, int]] = []

    class Noting(Script):
        def send(
            self, ids: Sequence[int], message: Mapping[str, object], fields: Mapping[str, Any], bounds: Bounds
        ) -> dict[int, str]:
            seen.append((fields["round"], fields["call"]))
            return super().send(ids, message, fields, bounds)

    engine = engine_of(Noting(good))
    for number in (0, 0, 1):
        engine.call(IDS, "train", {}, number)
        engine.measure(IDS, "report", {}, number + 1)
    assert [s for s in seen if s[1] >= 0] == [(0, 0), (0, 1), (1, 0)]


# ---------------------------------------------------------------- the commands


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["server", "--insecure"], "which experiment"),
        (["server", "fedavg"], "--keys"),
        (["server", "fedavg", "--insecure", "--keys", "x"], "not both"),
        (["server", "fedavg", "--insecure"], "how many sites"),
        (["server", "fedavg", "--insecure", "--clients", "2", "--attack", "lie"], "for simulations"),
        (["server", "fedavg", "--insecure", "--transport", "fp8"], "fp32, fp16 or int8"),
        (["server", "fedavg", "--insecure", "--phase-deadline", "train"], "PHASE=SECONDS"),
        (["server", "fedavg", "--insecure", "--phase-deadline", "train=0"], "PHASE=SECONDS"),
        (["server", "fedavg", "--resume", "last", "--insecure"], "give no method"),
        (["server", "fedavg", "--keys", "nowhere"], "no folder of keys"),
        (["client", "--server", "here", "--data", "x.npz", "--name", "oslo", "--insecure"], "HOST:PORT"),
        (["client", "--server", "h:1", "--data", "x.npz", "--name", "oslo"], "--key and --ca"),
        (["client", "--server", "h:1", "--data", "x.npz", "--name", "../x", "--insecure"], "site name"),
        (
            ["client", "--server", "h:1", "--data", "x.npz", "--name", "oslo", "--insecure", "--key", "k"],
            "goes without",
        ),
        (["client", "--server", "h:1", "--data", "x.npz", "--name", "oslo", "--insecure"], "x.npz"),
        (["local-cluster", "2", "--method", "fedavgg"], "did you mean"),
    ],
)
def test_wrong_usage_is_said_in_words(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    if words[0] == "server":
        words = [*words, "--port", "0"]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2, found.output
    assert why in found.output
