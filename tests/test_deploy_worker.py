"""A site's worker, its state on disk, and the server's side of an exchange, without a network between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cryptography")

from typer.testing import CliRunner

from fedkin.cli import app
from fedkin.config import make_config
from fedkin.data import load
from fedkin.deploy.server import believable, prepare_deployed
from fedkin.deploy.sites import Facts, together
from fedkin.deploy.state import Stamp, Vault
from fedkin.deploy.wire import Parcel, pack, unpack
from fedkin.deploy.worker import TRAVELS, Worker
from fedkin.engines.flower import Delivery, FlowerEngine, Terms
from fedkin.errors import DataError, FedKinError
from fedkin.federation import Answer, Each, Masked, gate
from fedkin.methods.ditto import Ditto

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
        self.job = prepare_deployed(make_config(values), facts, FlowerEngine(None, ["oslo"]))  # type: ignore[arg-type]
        self.labels = together(facts)[2]

    def ask(self, values: Mapping[str, Any] | None = None, **fields: Any) -> Parcel:
        return unpack(self.worker.answer({"own": [pack(values or {}, fields)]}))

    def join(self, attempt: int = 1, round: int = 0, **change: Any) -> Parcel:
        config = {k: v for k, v in self.job.config.to_dict().items() if k in TRAVELS}
        fields = {"run": "run-1", "attempt": attempt, "round": round, "place": 0, "clients": 1, "labels": self.labels,
                  "config": {**config, **change.pop("config", {})}, **change}  # fmt: skip
        return self.ask({"initial": self.job.site.initial}, kind="join", **fields)

    def call(self, phase: str, round: int, call: int = 0, attempt: int = 1, checkpoints: Sequence[int] = (),
             **values: Any) -> Parcel:  # fmt: skip
        fields = {"run": "run-1", "attempt": attempt, "phase": phase, "round": round, "call": call,
                  "checkpoints": list(checkpoints)}  # fmt: skip
        return self.ask(values, kind="call", **fields)

    def personal(self) -> Tensor:
        assert self.worker.joined is not None
        return self.worker.joined.store.tensors["personal"].clone()


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
        ("personal", "stays here"), ("after_local", "stays here"), ("round", "no such client function"),
        ("start", "no such client function"), ("state", "no such client function"), ("__init__", "no such"),
        ("deliver", "no such client function"), ("options", "no such client function"), ("os.system", "no such"),
    ]:  # fmt: skip
        reply = told.call(phase, 0)
        assert reply.fields["kind"] == "failed"
        assert why in reply.fields["reason"], phase
        assert not reply.values


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"config": {"method": "os.system"}}, "unknown method"),
        ({"config": {"lr": "import os"}}, "lr="),
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
    states = [told.personal() if told.call("train", r, checkpoints=range(max(0, r - 1), r + 1), model=model) else None
              for r in range(4)]  # fmt: skip
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
    assert fresh.worker.joined.store.tensors == {}


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
        ({"site": "../oslo"}, "name"), ({"site": 3}, "name"),
        ({"samples": 0}, "samples"), ({"samples": 9.0}, "samples"),
        ({"samples": True}, "samples"), ({"tests": 10}, "samples"), ({"shape": []}, "shape"), ({"shape": [0]}, "shape"),
        ({"labels": []}, "classes"), ({"labels": [1, "1"]}, "neither"), ({"labels": [1, 1]}, "neither"),
        ({"dtype": "object"}, "type"),
    ],
)  # fmt: skip
def test_facts_are_checked(change: dict[str, Any], why: str) -> None:
    assert Facts.of(FACTS).name == "oslo"
    with pytest.raises(DataError, match=why):
        Facts.of({**FACTS, **change})


def test_sites_that_do_not_fit_together() -> None:
    one = Facts.of(FACTS)
    assert together([one, Facts.of({**FACTS, "labels": [7, 1]})])[2] == [0, 1, 7]
    with pytest.raises(DataError, match="must be alike"):
        together([one, Facts.of({**FACTS, "site": "lima", "shape": [3]})])
    with pytest.raises(DataError, match="numbers and with words"):
        together([one, Facts.of({**FACTS, "site": "lima", "labels": ["a"]})])


def test_measurements_that_cannot_be_true_do_not_count() -> None:
    right = torch.tensor([[5.0], [9.0], [2.0], [2.0]])
    of = torch.tensor([[8.0], [8.0], [800.0], [8.0]])
    loss = torch.tensor([0.5, 0.1, 0.1, torch.nan])
    answer = Answer(np.arange(4), {"correct": right, "count": of, "loss": loss})
    correct, count, losses = believable(answer, [8, 8, 8, 8])
    assert correct.tolist() == [5, 0, 0, 0]
    assert count.tolist() == [8, 0, 0, 0]
    assert losses[0] == pytest.approx(0.5)
    assert np.isnan(losses[1:]).all()


# ---------------------------------------------------------------- an exchange


class Script:
    """A post whose sites answer as a test says: (client, time asked) to a delivery, a reason, or None for silence."""

    def __init__(self, plan: Callable[[int, int], Delivery | str | None], absent: Sequence[int] = ()) -> None:
        self.plan, self.absent, self.asked = plan, set(absent), dict[int, int]()
        self.sent: list[tuple[list[int], Mapping[str, object]]] = []
        self.due: dict[int, Delivery | str] = {}
        self.cancelled: list[int] = []

    def send(self, ids: Sequence[int], message: Mapping[str, object], fields: Mapping[str, Any]) -> dict[int, str]:
        self.sent.append((list(ids), message))
        for client in ids:
            self.asked[client] = self.asked.get(client, 0) + 1
            found = self.plan(client, self.asked[client])
            if client not in self.absent and found is not None:
                self.due[client] = found
        return {c: "it is not connected" for c in ids if c in self.absent}

    def collect(self) -> dict[int, Delivery | str]:
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


def test_replies_are_stacked_in_order_and_odd_ones_set_apart() -> None:
    def plan(client: int, asked: int) -> Delivery | str:
        return Delivery({"model": torch.zeros(1, 2)}) if client == 1 else "boom" if client == 2 else good(client)

    engine = FlowerEngine(Script(plan), NAMES)
    answer = engine.call(IDS, "train", {"model": torch.zeros(3)}, 0)
    assert answer.ids.tolist() == [0, 3]
    assert isinstance(answer.replies["model"], Tensor)
    assert answer.replies["model"][:, 0].tolist() == [0.0, 3.0]
    assert answer.failed == {2: "site 'lima': boom"}
    assert "shape [2] instead of [3]" in gate(answer)[1][1]
    assert engine.losses[3] == 3.5
    assert engine.client_steps == 4


def test_a_reply_that_is_no_row_is_a_failure() -> None:
    wrong = [Delivery({"model": 3.0}), Delivery({"model": torch.zeros(())}), Delivery({"model": torch.zeros(2, 3)})]
    engine = FlowerEngine(Script(lambda c, a: wrong[c] if c < 3 else good(c)), NAMES)
    answer = engine.call(IDS, "train", {}, 0)
    assert answer.ids.tolist() == [3]
    assert answer.failed == {c: f"site '{NAMES[c]}': 'model' is not one row of numbers" for c in range(3)}


def test_each_site_gets_its_own_row() -> None:
    script = Script(good)
    FlowerEngine(script, NAMES).call(IDS[1:], "train", {"model": Each(torch.arange(3.0)[:, None])}, 0)
    ids, message = script.sent[0]
    assert ids == [1, 2, 3]
    assert isinstance(message["model"], Each)
    assert message["model"].rows[:, 0].tolist() == [0.0, 1.0, 2.0]


def test_the_deadline_ends_an_exchange_and_late_replies_are_not_wanted() -> None:
    script = Script(lambda c, a: None if c == 2 else good(c))
    answer = FlowerEngine(script, NAMES, Terms(deadline=0.2)).call(IDS, "train", {}, 0)
    assert answer.ids.tolist() == [0, 1, 3]
    assert "'lima': no reply within 0.2 s" in answer.failed[2]
    assert "too late" in answer.failed[2]
    assert script.cancelled == [2]


def test_with_too_few_replies_those_who_come_back_are_asked_again() -> None:
    script = Script(lambda c, a: "died" if c >= 2 and a == 1 else good(c), absent=[1])
    message = {"model": Each(torch.arange(4.0)[:, None])}
    answer = FlowerEngine(script, NAMES, Terms(deadline=5, minimum=0.75)).call(IDS, "train", message, 0)
    assert answer.ids.tolist() == [0, 2, 3]
    assert answer.failed == {1: "site 'kyoto': it is not connected"}
    ids, again = script.sent[1]
    assert ids == [2, 3]
    assert again["model"].rows[:, 0].tolist() == [2.0, 3.0]  # type: ignore[attr-defined]


def test_after_long_enough_the_run_stops_and_says_who_is_missing() -> None:
    engine = FlowerEngine(Script(good, absent=[1, 2, 3]), NAMES, Terms(deadline=0.1, minimum=0.5, give_up=0.2))
    with pytest.raises(FedKinError, match=r"1 of 4 sites answered, 2 are needed.*'kyoto'.*resume"):
        engine.call(IDS, "train", {}, 4)


def test_calls_are_numbered_within_their_round() -> None:
    seen: list[tuple[int, int]] = []

    class Noting(Script):
        def send(self, ids: Sequence[int], message: Mapping[str, object], fields: Mapping[str, Any]) -> dict[int, str]:
            seen.append((fields["round"], fields["call"]))
            return super().send(ids, message, fields)

    engine = FlowerEngine(Noting(good), NAMES)
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
