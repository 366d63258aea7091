"""Sites that come when a run has its models: each gets one where its data are, the one that `fk.join` would give it."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("cryptography")

pytest.importorskip("pandas")

from test_deploy_processes import Place, experiment
from test_deploy_tables import SETTINGS as TABLES
from test_deploy_tables import deployed, write_tables
from test_restore import InPerson

import fedkin as fk
from fedkin.cli.application import app
from fedkin.config import make_config
from fedkin.data import load, own_clients
from fedkin.deploy import authority, client, node
from fedkin.deploy.client import ServerToJoin, serve
from fedkin.deploy.cluster import free_port
from fedkin.deploy.greeting import Facts, misfit
from fedkin.deploy.guestbook import REFUSAL, Guestbook
from fedkin.deploy.latecomers import Visit, Visitors, _log, serve_latecomers
from fedkin.deploy.link import Arrived, Link
from fedkin.deploy.node import Node
from fedkin.deploy.policy import Policy
from fedkin.deploy.server import Serving, prepare_deployed, run_server
from fedkin.deploy.wire import pack, unpack
from fedkin.deploy.worker import Worker
from fedkin.engines.remote import Arrival, Bounds, Delivery, Remote, Terms
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.methods import METHODS
from fedkin.rounds import Job, drive
from fedkin.rounds.newcomers import arrive
from fedkin.rounds.trained import Trained
from fedkin.runs.folder import RunFolder
from fedkin.use.model_file import load as load_model

SETTINGS: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch": 10, "lr": 0.05, "model": "mlp", "seed": 3}


def worker_of(folder: Path, name: str, rows: slice, **how: Any) -> tuple[Worker, Facts]:
    digits = load("digits")
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{name}.npz", x=digits.x[rows], y=digits.y[rows])
    worker = Worker(name, folder / f"{name}.npz", folder / name, lambda text: None, secret=False, device="cpu", **how)
    return worker, Facts.of(unpack(worker.answer({"own": pack({}, {"kind": "hello"})})).fields)


def trained_over_sites(folder: Path, method: str, **settings: Any) -> tuple[Job, list[Facts]]:
    """A run of two sites in this process, to its end."""
    both = [worker_of(folder, name, slice(80 * i, 80 * (i + 1))) for i, name in enumerate(("oslo", "paris"))]
    workers, facts = [w for w, _ in both], [f for _, f in both]
    carrier = InPerson(workers, facts)
    config = make_config({**SETTINGS, "method": method, **settings})
    job = prepare_deployed(config, facts, Remote(carrier, ["oslo", "paris"]))
    carrier.fix_clients(job, folder)
    drive(job, None, lambda job, record: None)
    return job, facts


class Alone(InPerson):
    """One site that came late, in this process. `instead`: what comes of a phase in place of its reply; None: nothing
    does."""

    def __init__(self, worker: Worker, place: int, instead: Mapping[str, Arrival | None] | None = None) -> None:
        super().__init__([worker], [])
        self.place, self.instead, self.asked = place, instead or {}, list[str]()

    def invite(self, visit: Visit) -> Mapping[str, Any]:
        fields, values = visit.invitation()
        seat = {"kind": "join", "run": "run-1", "attempt": self.attempt, "place": self.place, "clients": self.place + 1}
        return unpack(self.workers[0].answer({"own": pack(values, {**seat, **fields})})).fields

    def send(
        self, ids: Sequence[int], message: Mapping[str, Any], fields: Mapping[str, Any], bounds: Bounds
    ) -> dict[int, str]:
        assert list(ids) == [self.place], "somebody else was asked"
        self.asked.append(fields["phase"])
        if fields["phase"] not in self.instead:
            super().send([0], message, fields, bounds)
        elif (odd := self.instead[fields["phase"]]) is not None:
            self.came[0] = odd
        return {}

    def collect(self) -> dict[int, Arrival]:
        return {self.place + client: came for client, came in super().collect().items()}


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *((name, {}) for name in METHODS),
        ("fedavg", {"eval_point": "after_local"}),
        ("fedper", {"lr_schedule": "cosine", "lr_factors": "2+0.5", "test_share": 0.4}),
    ],
)
def test_a_site_that_comes_late_gets_what_a_simulation_gives(
    method: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    job, facts = trained_over_sites(tmp_path, method, **settings)
    trained, digits = Trained.of(job), load("digits")
    expected = arrive(trained, own_clients({"riga": (digits.x[200:260], digits.y[200:260])}))
    worker, late = worker_of(tmp_path, "riga", slice(200, 260))
    carrier = Alone(worker, 2)
    visit = Visit(trained, facts, late, expected.epochs, carrier, Serving())
    reply = carrier.invite(visit)
    assert reply["kind"] == "joined", reply
    settled = visit.settle()
    unpack(worker.answer({"own": pack({}, {"kind": "done"})}))
    own = dict(load_model(worker.model_file).module.named_parameters())
    wanted = trained.layout.tensors(expected.rows[0])
    assert all(torch.allclose(own[name], wanted[name], atol=1e-5) for name in own)
    last = expected.trials[-1]
    assert (settled.train_samples, settled.test_samples) == (last.samples, last.test_samples)
    assert settled.after == pytest.approx(last.accuracy, abs=1e-3)


# ------------------------------------------------------------ over a link


class InTurn(Worker):
    """One at a time, of those in this process: networks are not traced in two threads at once."""

    at_work = threading.Lock()

    def answer(self, parcels: Mapping[str, bytes]) -> bytes:
        with self.at_work:
            return super().answer(parcels)


class Town:
    """Sites that are threads of this process, and the server's folder; on loopback, without keys."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.threads = folder, free_port(), list[threading.Thread]()
        self.lines: dict[str, list[str]] = {}

    def site(self, name: str, rows: slice, stay: bool = False, policy: Policy | None = None, **changed: Any) -> None:
        digits, said = load("digits"), self.lines.setdefault(name, [])
        data = self.folder / f"{name}.npz"
        np.savez(data, **{"x": digits.x[rows], "y": digits.y[rows], **changed})
        worker = InTurn(
            name, data, self.folder / name, said.append, secret=False, device="cpu", policy=policy or Policy()
        )
        where = ServerToJoin(f"127.0.0.1:{self.port}", give_up=20.0)
        target = partial(self._take_part, worker, where, said, stay)
        self.threads.append(threading.Thread(target=target, name=name, daemon=True))
        self.threads[-1].start()

    @staticmethod
    def _take_part(worker: Worker, where: ServerToJoin, said: list[str], stay: bool) -> None:
        try:
            serve(worker, where, said.append, stay)
        except FedKinError as error:
            said.append(f"ended: {error}")

    def serving(self) -> Serving:
        return Serving(port=self.port, wait=60.0)

    def train(self, method: str = "fedper", **settings: Any) -> RunFolder:
        for i, name in enumerate(("oslo", "paris")):
            self.site(name, slice(80 * i, 80 * (i + 1)))
        config = make_config(
            {**SETTINGS, "method": method, "runs_dir": str(self.folder / "runs"), "checkpoint_every": 1, **settings}
        )
        result = run_server(config, self.serving(), clients=2, say=lambda text: None)
        for thread in self.threads:
            thread.join(30)
        return RunFolder.open(str(result.run))

    def row(self, name: str) -> torch.Tensor:
        module = load_model(self.folder / name / "personal.safetensors").module
        return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.fixture
def town(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Town:
    monkeypatch.setattr(client, "LET_IN", 0.5)  # whoever is refused soon gives up
    return Town(tmp_path)


def test_a_table_is_prepared_as_in_a_simulation(tmp_path: Path) -> None:
    """Its columns in an order of its own; the last site has a word that the run does not know."""
    wish = {"impute": "local", "scale": "local"}
    write_tables(tmp_path / "sites")
    job, _, workers = deployed(tmp_path / "sites", **wish)
    job.engine._checkpoints = lambda: []
    drive(job, None, lambda job, record: None)
    facts = [Facts.of(unpack(w.answer({"own": pack({}, {"kind": "hello"})})).fields) for w in workers]
    (tmp_path / "late").mkdir()
    for name, cities in (("riga", ["c", "a"]), ("turin", ["d", "a"])):
        lines = [f"{i % 2},{cities[i % 3 % 2]},{20 + i if i % 5 else ''}" for i in range(30)]
        (tmp_path / "late" / f"{name}.csv").write_text("\n".join(["label,city,age", *lines]))
    simulated = fk.run(data=str(tmp_path / "sites"), **TABLES, **wish)
    late = Worker("riga", tmp_path / "late" / "riga.csv", tmp_path / "riga", lambda text: None, secret=False)
    carrier, told = Alone(late, 2), Facts.of(unpack(late.answer({"own": pack({}, {"kind": "hello"})})).fields)
    visit = Visit(Trained.of(job), facts, told, 20, carrier, Serving())
    assert misfit(facts, told) is None
    assert carrier.invite(visit)["kind"] == "joined"
    visit.settle()
    unpack(late.answer({"own": pack({}, {"kind": "done"})}))
    made = load_model(late.model_file)
    expected = fk.join(simulated, data=tmp_path / "late" / "riga.csv")
    wanted = expected.personal("riga")
    assert made.card.preparation == wanted.samples.preparations[0]
    own = dict(made.module.named_parameters())
    assert all(torch.allclose(own[name], value, atol=1e-5) for name, value in wanted.network.named_parameters())
    other = Worker("turin", tmp_path / "late" / "turin.csv", tmp_path / "turin", lambda text: None, secret=False)
    told = Facts.of(unpack(other.answer({"own": pack({}, {"kind": "hello"})})).fields)
    carrier = Alone(other, 2)
    reply = carrier.invite(Visit(Trained.of(job), facts, told, 20, carrier, Serving()))
    assert reply["reason"] == "column 'city' has the word 'd', which nobody in the federation has"


REFUSED = {
    "oslo": "it took part in the run and has its model",
    "lima": "words for labels; the run's sites have",
    "kyoto": "method 'fedper': this site's policy allows ditto",
    "quito": "this site's policy answers at most 1 (questions)",
}


def test_sites_come_one_after_the_other_and_nobody_elses_model_changes(town: Town) -> None:
    run = town.train()
    before = {p: p.read_bytes() for p in town.folder.rglob("*") if p.is_file() and p.name != "log.txt"}
    said: list[str] = []

    def refused(name: str) -> bool:
        last = town.lines[name][-1]
        return last.startswith("ended: the server refuses") and REFUSED[name] in last

    def last_of_all() -> None:
        until = time.monotonic() + 50
        while not all(map(refused, REFUSED)) and time.monotonic() < until:
            time.sleep(0.05)
        town.site("turin", slice(350, 420), stay=True, policy=Policy(evaluation=None))

    town.site("riga", slice(200, 260))
    town.site("oslo", slice(0, 80))  # which was in the run
    town.site("lima", slice(260, 300), y=np.array(["a", "b"] * 20))
    town.site("kyoto", slice(300, 350), policy=Policy(methods=("ditto",)))
    town.site("quito", slice(420, 460), policy=Policy(questions=1))
    threading.Thread(target=last_of_all, daemon=True).start()
    found = serve_latecomers(run, town.serving(), clients=2, say=said.append)
    assert [name for name in REFUSED if not refused(name)] == []
    assert [s.site for s in found.settled] == ["riga", "turin"], said
    assert all(p.read_bytes() == content for p, content in before.items() if p.name not in ("record.jsonl", "oslo.npz"))
    riga, turin = found.settled
    assert riga.after > riga.before
    assert np.isnan(turin.after)  # it tells nothing, and has its model
    assert "how that does is not known (it says that it failed: this site's policy" in said[-1]
    assert not torch.equal(town.row("riga"), town.row("turin"))
    log = (run.path / "log.txt").read_text()
    assert "site 'riga' came late and has a model of its own, by 45 samples: accuracy" in log
    assert any("for a model by the recipe of fedper: 20 epochs" in line for line in town.lines["riga"])
    assert any("this site's model is" in line for line in town.lines["riga"])


def test_a_name_gets_one_model_of_a_run_also_from_another_server(town: Town) -> None:
    run, said = town.train(), list[str]()

    def served(clients: int, **how: Any) -> list[str]:
        return [s.site for s in serve_latecomers(run, town.serving(), clients=clients, say=said.append, **how).settled]

    def again_and_another() -> None:
        town.threads[-1].join(50)
        town.site("riga", slice(260, 320))  # with other data, to learn more
        town.threads[-1].join(50)
        town.site("turin", slice(350, 420))

    with pytest.raises(UsageError, match=r"--again riga: it has had no model of this run \(those that have: nobody\)"):
        served(1, again=["riga"])
    town.site("riga", slice(200, 260))
    threading.Thread(target=again_and_another, daemon=True).start()
    assert served(2) == ["riga", "turin"], said
    assert f"ended: the server refuses: {REFUSAL}" in town.lines["riga"][-1]
    assert Guestbook(run.path).refusal("riga") == REFUSAL  # as a server that is started anew reads it
    town.site("riga", slice(260, 320))
    assert served(1, again=["riga"]) == ["riga"], said
    assert json.loads((run.path / "latecomers.json").read_text())["models"] == {"riga": 2, "turin": 1}


@pytest.mark.parametrize(("fails_at", "counts"), [("collect", False), ("settle", True)])
def test_a_visit_counts_from_the_first_reply_that_may_be_answered(fails_at: str, counts: bool, tmp_path: Path) -> None:
    """FedCAP mixes the sites' models by an update: who takes a mixture and fails then has had it."""
    job, facts = trained_over_sites(tmp_path, "fedcap")
    worker, late = worker_of(tmp_path, "riga", slice(200, 260))
    book, entered = Guestbook(tmp_path), list[list[str]]()
    carrier = Alone(worker, 2, {fails_at: "it says that it failed: no"})

    def enter() -> None:
        book.enter("riga")
        entered.append(list(carrier.asked))

    visit = Visit(Trained.of(job), facts, late, 1, carrier, Serving(), enter)
    carrier.invite(visit)
    with pytest.raises(FedKinError, match="it says that it failed: no"):
        visit.settle()
    assert [found[-1] for found in entered] == ["collect"] * counts, "before anything is sent because of the update"
    assert (Guestbook(tmp_path).refusal("riga") is not None) == counts
    if counts:
        with pytest.raises(DataError, match="it has had its model of this run"):
            book.enter("riga")


@pytest.mark.parametrize(
    ("instead", "why", "asked"),
    [
        ({"report": None}, "no reply within 0.3 s", ["report"]),
        ({"settle": None}, "no reply within 0.3 s", ["report", "settle"]),
        ({"settle": "it says that it failed: no"}, "it says that it failed: no", ["report", "settle"]),
        ({"settle": Delivery({"x": torch.zeros(1, 3)})}, "an invalid message: ", ["report", "settle"]),
        ({"report": Delivery({"correct": torch.zeros(3, 3)})}, "an invalid message: ", ["report"]),
    ],
)
def test_a_visit_ends_with_the_first_question_that_is_not_answered(
    instead: Mapping[str, Arrival | None], why: str, asked: list[str], tmp_path: Path
) -> None:
    job, facts = trained_over_sites(tmp_path, "fedper")
    worker, late = worker_of(tmp_path, "riga", slice(200, 260))
    carrier = Alone(worker, 2, instead)
    visit = Visit(Trained.of(job), facts, late, 1, carrier, Serving(terms=Terms(0.3)))
    carrier.invite(visit)
    began = time.monotonic()
    with pytest.raises(FedKinError, match=why):
        visit.settle()
    assert carrier.asked == asked
    assert time.monotonic() - began < 3


def test_what_cannot_be_true_of_a_model_is_said_with_the_reason(tmp_path: Path) -> None:
    job, facts = trained_over_sites(tmp_path, "fedper")
    worker, late = worker_of(tmp_path, "riga", slice(200, 260))
    lie = {"correct": torch.full((1, 1), 99.0), "count": torch.full((1, 1), 15.0), "loss": torch.zeros(1)}
    carrier = Alone(worker, 2, {"report": Delivery(lie)})
    visit = Visit(Trained.of(job), facts, late, 1, carrier, Serving())
    carrier.invite(visit)
    assert np.isnan(visit.settle().after)
    assert visit.engine.untold == "says 99 of 15 test samples right; it has 15"


def test_the_log_of_a_run_is_no_way_to_another_file(tmp_path: Path) -> None:
    result = fk.run("fedper", clients=5, rounds=1, epochs=1, model="mlp", runs_dir=str(tmp_path / "runs"))
    run, other = RunFolder.open(str(result.run)), tmp_path / "other.txt"
    other.write_text("as it was")
    (run.path / "log.txt").unlink(missing_ok=True)
    (run.path / "log.txt").symlink_to(other)
    with pytest.raises(FedKinError, match="could not be written"):
        _log(run, "a line")
    assert other.read_text() == "as it was"


def test_a_name_that_fails_again_and_again_is_refused(tmp_path: Path) -> None:
    worker, late = worker_of(tmp_path, "riga", slice(200, 260))
    _, other = worker_of(tmp_path, "turin", slice(200, 260))
    said = list[str]()
    visitors = Visitors(Link(), said.append)
    visitors.guestbook, visitors.terms = Guestbook(tmp_path), Terms(pause=0.05, invalid=3)
    visitors.run_sites = [replace(late, name="oslo")]
    for number in range(3):
        visitors._admit(late, f"process {number}")
        visitors.leave("riga", "no")  # and its connection is gone
        with pytest.raises(
            DataError, match="may come again after a while" if number < 2 else "failed 3 times in a row"
        ):
            visitors._admit(late, f"process {number + 1}")
        time.sleep(0.25)
    greeting = worker.answer({"own": pack({}, {"kind": "hello"})})
    for number in range(5):
        for key_name in ("riga", None):  # None: it shows no certificate
            visitors._hear(number, "hello", Arrived("ticket", greeting), key_name)
    why = "it failed 3 times in a row and is not let in again by this server, the last time: no"
    assert said == [f"site 'riga': {why}", f"a site without a name: {why}"], "who comes all the time is told of once"
    visitors._admit(other, "process 9")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format": 1, "models": {"riga": 0}}', '{"format": 1, "models": {"../a": 1}}', None]
)
def test_a_list_of_latecomers_that_is_damaged_lets_nobody_in(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "latecomers.json"
    if content is None:
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.write_text(content)
    with pytest.raises(DataError):
        Guestbook(tmp_path)


def test_a_connection_draws_nothing_from_the_generator_that_networks_are_watched_by(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "BEAT", 0.01)
    monkeypatch.setattr(node, "TRIES", 1)
    before = random.getstate()
    worker, _ = worker_of(town.folder, "oslo", slice(0, 80))
    with pytest.raises(FedKinError, match="gave up"):  # nobody answers, it tries again
        serve(worker, ServerToJoin(f"127.0.0.1:{town.port}", give_up=0.3), lambda text: None)
    link = Link(port=town.port)
    link.start()
    try:
        with Node(f"127.0.0.1:{town.port}"):
            time.sleep(0.1)
    finally:
        link.stop()
    assert random.getstate() == before


def test_a_site_is_told_where_it_gets_a_model_when_the_run_has_begun(town: Town) -> None:
    town.site("oslo", slice(0, 80))
    town.site("paris", slice(80, 160))
    config = make_config({**SETTINGS, "method": "fedavg", "runs_dir": str(town.folder / "runs"), "rounds": 8})

    def late(event: object) -> None:
        if getattr(event, "round", 0) == 1:
            town.site("riga", slice(200, 260))
        if getattr(event, "round", 0) < 8 and not any("--join" in line for line in town.lines.get("riga", [])):
            time.sleep(0.3)

    result = run_server(config, town.serving(), clients=2, say=lambda text: None, on_event=late)
    where = f"fedkin server --join {Path(str(result.run)).name}"
    assert any(f"complete without it; it can have a model from {where}" in line for line in town.lines["riga"])


def test_a_simulation_has_no_server(tmp_path: Path) -> None:
    result = fk.run("fedper", clients=5, rounds=1, epochs=1, model="mlp", runs_dir=str(tmp_path))
    with pytest.raises(UsageError, match="was a simulation: fedkin join "):
        serve_latecomers(RunFolder.open(str(result.run)), Serving(port=0))


def test_a_class_that_the_run_does_not_know_is_refused(tmp_path: Path) -> None:
    _, run = worker_of(tmp_path, "oslo", slice(0, 80))
    _, late = worker_of(tmp_path, "riga", slice(80, 160))
    assert misfit([run], late) is None
    few = replace(run, labels=run.labels[:3])
    assert misfit([few], late) == "it has the class 3, which the run does not know (it knows 0, 1, 2)"


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--join", "last", "--resume", "last"], "--resume or --join, not both"),
        (["fedper", "--join", "last"], "give no method, file or --set"),
        (["--join", "last", "--rounds", "3"], "--rounds changes nothing with --join"),
        (["--join", "last", "--least", "3"], "--least changes nothing with --join"),
        (["--resume", "last", "--again", "riga"], "give it with --join RUN"),
    ],
)
def test_what_means_nothing_is_refused(words: list[str], why: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["server", *words, "--insecure", "--runs-dir", str(tmp_path)], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 2
    assert why in done.stderr


# ------------------------------------------------------------ with processes, keys and TLS


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedper", "ditto", "fedcap"])
def test_processes_with_keys_give_what_a_simulation_gives(method: str, tmp_path: Path) -> None:
    here = Place(tmp_path / "here", 3)
    try:
        sites = [here.client(name) for name in here.names]
        config = experiment(method, model="mlp")
        result = here.serve(config)
        assert [site.ended(30) for site in sites] == [0, 0, 0]
        digits = load("digits")
        np.savez(here.folder / "data" / "late.npz", x=digits.x[1000:1080], y=digits.y[1000:1080])
        authority.sign(here.folder / "keys", authority.new_site(here.folder / "keys" / "sites", "late"))
        server = here.server("--join", Path(str(result.run)).name, "--clients", "1", "--json")
        late = here.client("late")
        assert server.ended(90) == 0, server.text()
        assert late.ended(30) == 0, late.text()
        (here.folder / "data" / "late.npz").rename(here.folder / "late.npz")
        expected = fk.join(here.simulate(config), data=here.folder / "late.npz")
        wanted = torch.cat([p.detach().flatten() for p in expected.personal("late").parameters()])
        assert (here.model("late") - wanted).abs().max() <= 1e-5
        told = json.loads(server.text()[server.text().index("{") :])["newcomers"][0]
        assert told["site"] == "late"
        assert told["after"] == pytest.approx(expected.trials[-1].accuracy, abs=1e-3)
    finally:
        here.close()
