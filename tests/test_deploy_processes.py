"""Real processes on loopback: the same results as a simulation, and what is left of a run when things go wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("cryptography")

import fedkin
from fedkin.bench.network import measure
from fedkin.cli.application import app
from fedkin.config import Config, make_config
from fedkin.core.federation import Answer
from fedkin.data import load
from fedkin.deploy.authority import new_folder, revoke
from fedkin.deploy.cluster import free_port, stop, write_experiment
from fedkin.deploy.server import Serving, run_server
from fedkin.engines.remote import Terms
from fedkin.models import MODELS
from fedkin.rounds import Event, Listener, Result, RoundRecord, run_config
from fedkin.runs.folder import RunFolder
from fedkin.use.model_file import load as load_model

HERE = Path(__file__).parent
FAMILIES = ["fedavg", "fedper", "ditto", "fedcap", "c-pfl", "fedpkda", "co-pfl"]
OTHERS = ["fedavg-ft", "fedbabu", "fedprox", "fedrep", "lg-fedavg", "local", "pfedcs"]
NAMES = ["bergen", "kyoto", "lima", "oslo", "paris", "quito", "riga", "turin"]


def write_data(folder: Path, clients: int, samples: int = 60) -> list[str]:
    """Handwritten digits dealt to files; every second site brings its own test samples."""
    folder.mkdir(parents=True)
    digits, rng = load("digits"), np.random.default_rng(0)
    order = rng.permutation(len(digits.x))
    for i, name in enumerate(NAMES[:clients]):
        rows = order[i * samples : (i + 1) * samples + 7 * i]
        x, y = digits.x[rows], digits.y[rows]
        if i % 2:
            np.savez(folder / f"{name}.npz", x=x, y=y)
        else:
            np.savez(folder / f"{name}.npz", x_train=x[15:], y_train=y[15:], x_test=x[:15], y_test=y[:15])
    return NAMES[:clients]


def experiment(method: str, **settings: Any) -> Config:
    values = {"method": method, "rounds": 2, "epochs": 1, "batch": 10, "lr": 0.05, "seed": 3, "checkpoint_every": 1}
    return make_config({**values, **settings})


class Process:
    """One `fedkin` process and its log."""

    def __init__(self, words: Sequence[str], log: Path, module: Sequence[str] = ("-m", "fedkin")) -> None:
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "300"}
        with open(log, "ab") as file:
            self.popen = subprocess.Popen(
                [sys.executable, *module, *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, words: str, seconds: float = 60.0, times: int = 1) -> None:
        until = time.monotonic() + seconds
        while self.text().count(words) < times:
            assert time.monotonic() < until, f"{words!r} did not come in {seconds} s:\n{self.text()[-3000:]}"
            assert self.popen.poll() is None or self.text().count(words) >= times, self.text()[-3000:]
            time.sleep(0.05)

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait(10)

    def ended(self, seconds: float = 60.0) -> int:
        return self.popen.wait(seconds)


class Place:
    """A folder with data files and keys, and the processes started in it."""

    def __init__(self, folder: Path, clients: int, insecure: bool = False) -> None:
        self.folder, self.insecure, self.port = folder, insecure, free_port()
        self.names = write_data(folder / "data", clients)
        self.processes: list[Process] = []
        if not insecure:
            new_folder(folder / "keys", ["127.0.0.1"], self.names)

    def start(self, words: Sequence[str], log: Path, module: Sequence[str] = ("-m", "fedkin")) -> Process:
        self.processes.append(Process(words, log, module))
        return self.processes[-1]

    def client_words(self, name: str, *more: str, key: Path | None = None) -> list[str]:
        pair = [
            "--key",
            str(key or self.folder / "keys" / "sites" / f"{name}.key"),
            "--ca",
            str(self.folder / "keys" / "ca.crt"),
        ]
        return [
            "client",
            "--server",
            f"127.0.0.1:{self.port}",
            "--data",
            str(self.folder / "data" / f"{name}.npz"),
            "--name",
            name,
            "--folder",
            str(self.folder / name),
            "--noise",
            "shared",
            "--device",
            "cpu",
            *(["--insecure"] if self.insecure else pair),
            *more,
        ]

    def client(self, name: str, *more: str) -> Process:
        return self.start(self.client_words(name, *more), self.folder / f"{name}.log")

    def liar(self, name: str, lie: str, *more: str) -> Process:
        """A client whose replies are changed before they leave; see liar.py."""
        words = [lie, *self.client_words(name, *more)]
        return self.start(words, self.folder / f"{name}.log", (str(HERE / "deploy_liar.py"),))

    def server(self, *words: str) -> Process:
        safety = ["--insecure"] if self.insecure else ["--keys", str(self.folder / "keys")]
        runs = ["--runs-dir", str(self.folder / "runs")]
        return self.start(["server", *words, "--port", str(self.port), *safety, *runs], self.folder / "server.log")

    def serving(self, **more: Any) -> Serving:
        keys = None if self.insecure else self.folder / "keys"
        return Serving(port=self.port, keys=keys, wait=90, **more)

    def serve(
        self, config: Config, lines: list[str] | None = None, on_event: Listener | None = None, **more: Any
    ) -> Result:
        """A server in this process; its clients are processes of their own."""
        config = make_config({**config.to_dict(), "runs_dir": str(self.folder / "runs")})
        say = (lines if lines is not None else []).append
        return run_server(config, self.serving(**more), clients=len(self.names), say=say, on_event=on_event)

    def simulate(self, config: Config) -> Result:
        values = {**config.to_dict(), "data": str(self.folder / "data"), "clients": len(self.names)}
        return run_config(make_config(values))

    def model(self, name: str) -> torch.Tensor:
        personal = load_model(self.folder / name / "personal.safetensors")
        assert personal.card.site == name
        return torch.cat([p.detach().flatten() for p in personal.module.parameters()])

    def close(self) -> None:
        stop([p.popen for p in self.processes])


Make = Callable[..., Place]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Make]:
    made: list[Place] = []

    def make(clients: int, insecure: bool = False) -> Place:
        made.append(Place(tmp_path / f"place-{len(made)}", clients, insecure))
        return made[-1]

    yield make
    for one in made:
        one.close()


def assert_same(place: Place, deployed: Result, simulated: Result, but: Sequence[str] = ()) -> None:
    """Accuracies, losses, bytes and every site's model agree to 1e-4 of their size."""
    for ours, theirs in zip(deployed.history, simulated.history, strict=True):
        assert (ours.round, ours.final) == (theirs.round, theirs.final)
        assert ours.accuracy.macro == pytest.approx(theirs.accuracy.macro, rel=1e-4)
        assert ours.train_loss == pytest.approx(theirs.train_loss, rel=1e-4)
        assert ours.test_loss == pytest.approx(theirs.test_loss, rel=1e-4)
        assert (ours.bytes_down, ours.bytes_up) == (theirs.bytes_down, theirs.bytes_up)
    assert [c.name for c in deployed.per_client] == [c.name for c in simulated.per_client] == place.names
    for ours, theirs in zip(deployed.per_client, simulated.per_client, strict=True):
        assert (ours.train_samples, ours.test_samples) == (theirs.train_samples, theirs.test_samples)
    for number, name in enumerate(place.names):
        if name not in but:
            theirs_row = torch.cat([p.detach().flatten() for p in simulated.personal(number).parameters()])
            assert (place.model(name) - theirs_row).abs().max() <= 1e-4 * theirs_row.abs().max(), name


# ---------------------------------------------------------------- everything goes well


def test_a_committee_with_keys_and_tls(place: Make) -> None:
    """C-PFL: training, a committee's votes and the tuning at the end, with all protection on."""
    here = place(3)
    clients = [here.client(name) for name in here.names]
    config = experiment("c-pfl", options={"committee": 1, "finetune_epochs": 2})
    lines: list[str] = []
    deployed = here.serve(config, lines)
    assert "TLS and signed keys" in lines[0]
    assert_same(here, deployed, here.simulate(config))
    assert [c.ended(30) for c in clients] == [0, 0, 0]
    sent = [line for c in clients for line in c.text().splitlines() if " sent: " in line]
    assert any("body" in line and "numbers" in line and "round 1, train" in line for line in sent)
    assert not any("rows" in line for line in sent)  # the personal model is never sent
    assert deployed.run is not None
    run = RunFolder.open(deployed.run)
    assert run.info.status == "finished"
    assert samples_shown(run) == [c.train_samples for c in deployed.per_client]
    (run.path / "sites.json").write_text('[{"site": 1e999}]')
    assert samples_shown(run) == [None] * 3


def samples_shown(run: RunFolder) -> list[int | None]:
    """Training samples as `fedkin show` knows them from the folder alone."""
    words = ["show", run.info.id, "--runs-dir", str(run.path.parent)]
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)["per_client"]
    found = [c["train_samples"] for c in told]
    table = CliRunner().invoke(app, words, env={"COLUMNS": "200"}).stdout
    for client in told:
        (line,) = (words for words in map(str.split, table.splitlines()) if words[:1] == [client["name"]])
        assert line[-1] == ("?" if client["train_samples"] is None else str(client["train_samples"]))
    return found


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Four sites that stay for one run after another."""
    here = Place(tmp_path_factory.mktemp("crew"), 4)
    for name in here.names:
        here.client(name, "--stay")
    yield here
    here.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", [*FAMILIES, *OTHERS])
def test_every_family_as_in_a_simulation(crew: Place, method: str) -> None:
    settings: dict[str, Any] = {"rounds": 3}
    if method == "c-pfl":
        settings["options"] = {"committee": 2, "finetune_epochs": 2}
    if method == "co-pfl":
        settings |= {"lr": 0.001, "optimiser": "adam"}
    config = experiment(method, **settings)
    assert_same(crew, crew.serve(config), crew.simulate(config))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "c-pfl"])
def test_rates_by_round_and_by_site_as_in_a_simulation(crew: Place, method: str) -> None:
    config = experiment(method, rounds=4, lr_schedule="cosine:warmup=2", lr_factors=f"{crew.names[1]}=0.3")
    deployed, simulated = crew.serve(config), crew.simulate(config)
    assert_same(crew, deployed, simulated)
    assert [r.lr for r in deployed.history] == [r.lr for r in simulated.history]
    assert deployed.history[0].lr == pytest.approx(0.025)


@pytest.mark.slow
def test_some_of_the_sites_each_round(crew: Place) -> None:
    """Absent sites are collected by FedCAP's extra phase."""
    config = experiment("fedcap", rounds=4, participation=0.5)
    assert_same(crew, crew.serve(config), crew.simulate(config))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["fp16", "int8"])
def test_smaller_transports_train_as_well(crew: Place, transport: str) -> None:
    config = experiment("fedavg", rounds=3)
    exact, small = crew.simulate(config), crew.serve(config, transport=transport)
    assert small.history[-1].train_loss == pytest.approx(exact.history[-1].train_loss, rel=0.05)
    assert small.history[-1].train_loss != exact.history[-1].train_loss


@pytest.mark.slow
def test_an_exchange_is_quick_and_the_wire_carries_what_the_ledger_says() -> None:
    found = measure(4, side=32, model="cnn-512", phases=4)
    assert found["seconds_median"] < 5
    assert all(1 <= ratio < 1.03 for ratio in found["wire_over_ledger"]), found


# ---------------------------------------------------------------- sites that fail or lie


def simulate_failing(place: Place, config: Config, client: int, rounds: Sequence[int]) -> Result:
    """The simulation in which this client's replies to training are lost in these rounds (counted from 0)."""

    def lose(ids: Any, phase: str, message: Mapping[str, object], answer: Answer, round: int) -> Answer:
        if round in rounds and client in ids and phase == "train":
            answer.failed[client] = "lost"
        return answer

    values = {**config.to_dict(), "data": str(place.folder / "data"), "clients": len(place.names)}
    return run_config(make_config(values), tamper=lose)


def until_back(site: Process) -> Listener:
    """Slows the rounds down until a site (its log goes on after a restart) has joined a second time."""

    def slowly(event: Event) -> None:
        if isinstance(event, RoundRecord) and event.round > 2 and site.text().count("joined run") < 2:
            time.sleep(1)

    return slowly


def failures(result: Result) -> dict[int, str]:
    """Reasons by round, counted from 0."""
    return {f.round: f.reason for f in result.failures}


@pytest.mark.slow
def test_a_site_that_lies_in_every_way(place: Make) -> None:
    here = place(4)
    lies = ["nan", "shape", "garbage", "pickle", "large", "names", "silent"]
    liar = here.names[2]
    for name in here.names:
        here.liar(name, ",".join(lies)) if name == liar else here.client(name)
    config = experiment("ditto", rounds=len(lies) + 1)
    lines: list[str] = []
    result = here.serve(config, lines, terms=Terms(deadline=25, pause=0), largest=1 << 20)
    reasons = failures(result)
    assert sorted(reasons) == list(range(1, len(lies) + 1))
    assert {f.client for f in result.failures} == {2}
    words = ["not finite", "shape", "not a valid message", "not a valid message", "limit", "gift", "too late"]
    for number, word in enumerate(words, start=1):
        assert word in reasons[number], reasons
    assert result.run is not None
    log = (Path(result.run) / "log.txt").read_text()
    assert log.count(f"client {liar} failed") == len(lies)
    simulated = simulate_failing(here, config, 2, range(1, len(lies) + 1))
    for number, name in enumerate(here.names):
        if name != liar:
            row = torch.cat([p.detach().flatten() for p in simulated.personal(number).parameters()])
            assert (here.model(name) - row).abs().max() <= 1e-4 * row.abs().max(), name


@pytest.mark.slow
def test_a_site_that_is_killed_while_it_works_and_comes_back(place: Make) -> None:
    """All have to answer, so the server waits for it, asks again, and nothing is different in the end."""
    here = place(3)
    for name in here.names[:2]:
        here.client(name)
    victim = here.liar(here.names[2], "hang")
    config = experiment("ditto", rounds=3)

    def revive() -> None:
        victim.wait_for("hanging", 120)
        victim.kill()
        here.client(here.names[2])

    thread = threading.Thread(target=revive)
    thread.start()
    lines: list[str] = []
    result = here.serve(config, lines, terms=Terms(deadline=120, minimum=1.0))
    thread.join(10)
    assert any("connection was lost" in line for line in lines)
    assert result.failures == []
    assert_same(here, result, here.simulate(config))


@pytest.mark.slow
def test_a_dead_site_does_not_stop_the_others_and_is_welcome_later(place: Make) -> None:
    here = place(3)
    for name in here.names[:2]:
        here.client(name)
    victim = here.liar(here.names[2], "hang")

    def revive() -> None:
        victim.wait_for("hanging", 120)
        victim.kill()
        here.client(here.names[2])

    thread = threading.Thread(target=revive)
    thread.start()
    result = here.serve(experiment("fedavg", rounds=60), on_event=until_back(victim))
    thread.join(10)
    trained = [e for e in result.exchanges if e.phase == "train"]
    assert len(trained) == 60
    assert trained[1].answered == 2
    assert trained[-1].answered == 3, "it did not come back in time"
    assert {f.client for f in result.failures} == {2}
    assert all(here.names[2] in f.reason for f in result.failures)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcap", "c-pfl"])
def test_a_server_that_is_killed_goes_on(place: Make, method: str) -> None:
    here = place(4)
    options = {"committee": 2, "finetune_epochs": 2} if method == "c-pfl" else {}
    config = experiment(method, rounds=12, options=options)
    toml = write_experiment(config, here.folder, 4)
    clients = [here.client(name) for name in here.names]
    server = here.server(str(toml))
    server.wait_for("round 4/12", 120)
    server.kill()
    again = here.server("--resume", "last")
    assert again.ended(180) == 0, again.text()[-3000:]
    assert "round 12/12" in again.text()
    assert [c.ended(60) for c in clients] == [0] * 4
    run = RunFolder.open(next((here.folder / "runs").iterdir()))
    assert run.info.status == "finished"
    simulated = here.simulate(config)
    assert run.table("rounds")["round"] == [r.round for r in simulated.history]
    assert run.table("rounds")["macro"] == pytest.approx([r.accuracy.macro for r in simulated.history], rel=1e-4)
    for number, name in enumerate(here.names):
        row = torch.cat([p.detach().flatten() for p in simulated.personal(number).parameters()])
        assert (here.model(name) - row).abs().max() <= 1e-4 * row.abs().max(), name


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcap", "c-pfl"])
def test_one_dies_and_comes_back_one_lies_and_the_honest_have_good_models(place: Make, method: str) -> None:
    here = place(4)
    liar, victim = here.names[1], here.names[3]
    for name in here.names[::2]:
        here.client(name)
    here.liar(liar, ",".join(["nan"] * 60))
    dying = here.liar(victim, "hang")

    def revive() -> None:
        dying.wait_for("hanging", 120)
        dying.kill()
        here.client(victim)

    thread = threading.Thread(target=revive)
    thread.start()
    options = {"committee": 2, "finetune_epochs": 5} if method == "c-pfl" else {}
    config = experiment(method, rounds=60, options=options)
    result = here.serve(config, on_event=until_back(dying), terms=Terms(deadline=60))
    thread.join(10)
    assert {f.client for f in result.failures} == {1, 3}
    assert max(f.round for f in result.failures if f.client == 3) < 59, "it did not come back in time"
    for name in (n for n in here.names if n != liar):
        words = [
            "predict",
            "--model",
            str(here.folder / name / "personal.safetensors"),
            "--data",
            str(here.folder / "data" / f"{name}.npz"),
            "--json",
        ]
        done = subprocess.run([sys.executable, "-m", "fedkin", *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["accuracy"] > 40, done.stdout  # chance: 10


# ---------------------------------------------------------------- who may not take part


@pytest.mark.slow
def test_strangers_are_refused(place: Make) -> None:
    """A certificate of another federation, a second process, a wrong authority; and one is revoked while it runs."""
    here = place(3)
    other = new_folder(here.folder / "other-keys", ["127.0.0.1"], ["kyoto"])
    own = here.client(here.names[0])

    def knock() -> None:
        own.wait_for("joined run", 120)
        words = here.client_words(here.names[0], "--folder", str(here.folder / "twin"))
        twin = here.start(words, here.folder / "twin.log")
        wrong = [str(other / "ca.crt") if w.endswith("ca.crt") else w for w in here.client_words("kyoto")]
        wrong_ca = here.start(wrong, here.folder / "wrong-ca.log")
        foreign = here.start(
            [w.replace("/keys/", "/other-keys/") for w in here.client_words("kyoto")], here.folder / "foreign.log"
        )
        twin.wait_for("does not let this site in", 60)
        assert wrong_ca.ended(60) == 1
        assert "was not signed by" in wrong_ca.text()
        assert foreign.ended(60) == 1
        assert "certificate is not accepted" in foreign.text()
        revoke(here.folder / "keys", here.names[2])
        gone.wait_for("not on the server's list", 60)
        heard.append(twin)

    heard: list[Process] = []
    here.client(here.names[1])
    for kind in ("key", "crt"):  # as handed over: revoking takes the server's copy away
        shutil.copy(here.folder / "keys" / "sites" / f"{here.names[2]}.{kind}", here.folder)
    words = here.client_words(here.names[2], key=here.folder / f"{here.names[2]}.key")
    gone = here.start(words, here.folder / "gone.log")
    thread = threading.Thread(target=knock)
    thread.start()
    result = here.serve(experiment("fedavg"), on_event=lambda event: thread.join(150))
    assert heard
    assert {f.client for f in result.failures} == {2}


# ---------------------------------------------------------------- a frozen trunk

ADAPTED = """
import torch
from torch import nn

import fedkin as fk
from fedkin.models import ModelEntry


def adapted(shape, classes, vocabulary):
    trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
    with torch.no_grad():
        for p in trunk.parameters():
            p.mul_({scale})
    return fk.lora(nn.Sequential(*trunk, nn.Linear(64, classes)), rank=2, head="5")


fk.MODELS.register("adapted")(ModelEntry(adapted, "a trunk and low-rank updates", "for this test"))
"""


@pytest.mark.slow
def test_a_trunk_travels_once_and_rounds_cost_what_the_updates_weigh(
    place: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server alone has the pre-trained weights; two runs, one after the other, with the same sites."""
    here = place(3, insecure=True)
    (here.folder / "adapted.py").write_text(ADAPTED.format(scale=1.0))
    known = {"fk": fedkin, "__name__": "adapted"}
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
    exec(compile(ADAPTED.format(scale=3.0), "adapted.py", "exec"), known)
    clients = [here.client(name, "--stay", "--plugin", str(here.folder / "adapted.py")) for name in here.names]
    config = experiment("fedper", model="adapted", rounds=3)
    updates = 4 * 2 * ((64 + 128) + (128 + 64))  # bytes: rank 2, two layers
    lines: list[str] = []
    for run in range(2):
        deployed = here.serve(config, lines)
        assert_same(here, deployed, here.simulate(config))
        assert [(r.bytes_up, r.bytes_down) for r in deployed.history] == [
            (3 * updates * n, 3 * updates * n) for n in (1, 2, 3)
        ]
        assert sum("is sent the frozen weights" in line for line in lines) == 3 + run, run
        if not run:  # one site loses its copy, another one its process, before the next run
            (kept,) = (here.folder / here.names[0] / "trunks").iterdir()
            whole = kept.read_bytes()
            kept.write_bytes(whole[:-2] + bytes([whole[-2] ^ 1]) + whole[-1:])
            clients[1].kill()
            clients[1] = here.client(here.names[1], "--stay", "--plugin", str(here.folder / "adapted.py"))
    assert kept.read_bytes() == whole
    counts = [c.text().count("came from the server and are kept") for c in clients]
    assert counts == [2, 1, 1]
    assert [c.text().count("are those of an earlier run") for c in clients] == [0, 1, 1]
