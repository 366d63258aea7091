"""A run whose numbers are not to be believed says so, and one that is merely bad does not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.rounds import Accuracy, RoundRecord
from fedkin.rounds.divergence import BrokenLosses, Refusal, at_chance, divergence, loss_out_of_hand
from fedkin.runs.folder import RunFolder
from fedkin.testing import finished, job_of

TINY: dict[str, Any] = {"rounds": 2, "clients": 6, "epochs": 1, "way": "each", "device": "cpu", "partition": "iid"}


SKEWED: dict[str, Any] = {**TINY, "clients": 20, "rounds": 3, "partition": "pathological:2"}


def record(round: int, micro: float, train: float, test: float) -> RoundRecord:
    return RoundRecord(round, Accuracy(micro, micro, micro, 0.0), test, train, 0, 0, 0.0, 1, 0, 0)


FINE = [record(1, 10.0, 2.0, 2.2), record(2, 60.0, 1.0, 1.1)]
REFUSED = "'model' has 3 values that are not finite"


@pytest.mark.parametrize(
    ("history", "refusals", "says"),
    [
        (FINE, [], None),
        ([], [], None),
        (FINE, [Refusal(1, 5, 10, REFUSED)], None),  # half is not most
        (FINE, [Refusal(1, 1, 10, REFUSED), Refusal(2, 6, 10, REFUSED)], "in round 2 the replies of 6 of 10 benign"),
        ([FINE[0], replace(FINE[1], train_loss=math.inf)], [], "the training loss was not finite after round 2"),
        ([replace(FINE[0], test_loss=math.inf), FINE[1]], [], "the test loss was not finite after round 1"),
        ([replace(r, test_loss=math.nan) for r in FINE], [], None),  # nobody has test samples
        ([record(1, 9.0, 2.1, 2.3), record(2, 10.0, 1.9, 2.2)], [], None),  # at chance, but learning
        ([record(1, 9.0, 700.0, 2.3), record(2, 10.0, 1.9, 2.2)], [], "the training loss had reached 700 by round 1"),
        ([record(1, 9.0, 2.0, 2.3), record(2, 10.0, 1.9, 50.0)], [], "the test loss had reached 50 by round 2"),
        ([record(1, 9.0, 700.0, 2.3), record(2, 12.0, 1.9, 2.2)], [], None),  # it came back
    ],
)
def test_what_a_history_says(history: list[RoundRecord], refusals: list[Refusal], says: str | None) -> None:
    found = divergence(history, refusals, classes=10, chance=10.0)
    assert found is None if says is None else found is not None and says in found


def test_being_at_chance_under_attack_is_what_the_attack_is_for() -> None:
    lost = [record(1, 9.0, 700.0, 2.3), record(2, 10.0, 1.9, 2.2)]
    assert divergence(lost, [], 10, 10.0, attacked=True) is None
    assert divergence([replace(FINE[1], test_loss=math.inf)], [], 10, 10.0, attacked=True) is not None
    assert not at_chance(record(1, 100.0, 0, 0), classes=1, chance=100.0), "one class: nothing to guess"


def unasked() -> float:
    raise AssertionError("measured although it decides nothing")


def test_a_loss_that_was_large_before_anything_was_learnt_is_no_divergence() -> None:
    high = [record(1, 9.0, 24.0, 24.5), record(2, 10.0, 24.0, 24.5)]
    assert "reached 24.5" in str(divergence(high, [], 10, 10.0))
    assert divergence(high, [], 10, 10.0, first_loss=lambda: 24.5) is None
    assert divergence(high, [], 10, 10.0, first_loss=lambda: 12.0) is not None
    assert divergence(FINE, [], 10, 10.0, first_loss=unasked) is None
    assert "is 24.5" in str(loss_out_of_hand(high[1], 10, lambda: 2.3))
    assert loss_out_of_hand(high[1], 10, lambda: 12.0) is None
    assert loss_out_of_hand(FINE[1], 10, unasked) is None


def test_whose_loss_broke_is_said() -> None:
    lost = [replace(FINE[0], train_loss=math.inf), FINE[1]]
    one, most = (
        str(divergence(lost, [], 10, 10.0, broken=[BrokenLosses(1, "training", n, 6, "ward-3")])) for n in (1, 4)
    )
    assert "the training loss of 1 of 6 clients (ward-3) was not finite after round 1; the others' was" in one
    assert "the training loss of 4 of 6 clients (ward-3 first) was not finite after round 1; a smaller" in most


def numbers(scale: float = 1.0, first: float = 1.0) -> list[tuple[Any, Any]]:
    """Features that tell three classes apart; nobody has scaled them."""
    rng, found = np.random.default_rng(0), []
    for k in range(6):
        y = rng.integers(0, 3, 60)
        x = rng.normal(size=(60, 12)) + 4 * np.eye(12)[y]
        found.append(((x * (first if k == 0 else scale)).astype(np.float32), y))
    return found


def test_features_that_nobody_scaled_and_one_client_beyond_bounds() -> None:
    settings: dict[str, Any] = {"rounds": 2, "epochs": 1, "device": "cpu", "model": "mlp"}
    still = fk.run("fedavg", clients=numbers(100, 100), lr=1e-12, **settings)
    assert still.history[-1].test_loss > 5 * math.log(3)
    assert still.diverged is None
    one = fk.run("fedavg", clients=numbers(first=1e20), lr=0.1, **settings)
    assert "the training loss of 1 of 6 clients (client-0) was not finite after round 1" in str(one.diverged)


@pytest.mark.parametrize("way", ["each", "batched"])
def test_a_loss_that_one_clients_sample_breaks_is_that_clients_alone(way: str) -> None:
    """Mini-batches are filled up to one size; what fills them is a client's own."""
    relative = fk.task(lambda o, y: ((o - y) / y).abs().mean(), {"mae": torch.nn.functional.l1_loss})
    clients = []
    for k, n in enumerate((9, 7, 17)):
        y = np.full((n, 1), 2.0)
        y[0] = k > 0
        clients.append((np.random.default_rng(k).normal(size=(n, 6)), y, np.ones((3, 6)), np.ones(3)))
    linear, settings = torch.nn.Linear(6, 1), {**TINY, "rounds": 1, "batch": 4, "way": way}
    del settings["clients"], settings["partition"]
    result = fk.run("local", clients=clients, model=linear, init="given", task=relative, **settings)
    assert "the training loss of 1 of 3 clients (client-0) was not finite" in str(result.diverged)


def test_a_loss_out_of_hand_is_a_remark() -> None:
    job = finished(job_of("fedavg", lr=0.05))
    assert not any("loss" in r for r in job.result().remarks)
    job.history[-1] = record(2, 60.0, 1.0, 8e8)
    found = job.result()
    assert found.diverged is None
    assert any(r.startswith("the test loss at the end is 8e+08") for r in found.remarks)


@pytest.mark.parametrize("method", ["fedavg", "fedcap", "local"])
def test_a_learning_rate_without_sense_is_told(method: str) -> None:
    broken, fine = (fk.run(method, lr=lr, **TINY) for lr in (1e30, 0.05))
    assert broken.diverged is not None
    assert f"diverged: {broken.diverged}" in broken.remarks
    assert broken.to_dict()["diverged"] == broken.diverged
    assert "6 of 6" in broken.diverged or method == "local"
    assert fine.diverged is None
    assert not any("diverged" in r for r in fine.remarks)


def test_a_collapse_that_stays_finite_is_told_and_a_short_run_is_not_called_one() -> None:
    collapsed, short = (fk.run("fedavg", **SKEWED, lr=lr) for lr in (5.0, 0.01))
    assert "the training loss had reached" in str(collapsed.diverged)
    assert short.diverged is None
    assert short.accuracy.micro < 13, "as bad as guessing"
    assert any("no more than always guessing the most frequent class gives (13.23 %)" in r for r in short.remarks)


def test_what_attackers_send_is_no_divergence_of_the_run() -> None:
    class Flood:
        """Five of six clients send what is not finite."""

        def __init__(self, bad: set[int]) -> None:
            self.bad = bad

        def __call__(self, ids: Any, phase: str, message: Any, answer: Any, round: int) -> Any:
            for k, client in enumerate(answer.ids.tolist()):
                if client in self.bad:
                    for value in answer.replies.values():
                        value[k] = torch.nan
            return answer

    honest = fk.run("fedavg", **TINY, lr=0.05, attack="sf", malicious=0.5)
    bad = set(honest.malicious)
    assert len(bad) == 3
    assert tampered(Flood(bad), attack="sf", malicious=0.5).diverged is None
    more = tampered(Flood(bad | {min(set(range(6)) - bad)}), attack="sf", malicious=0.5)
    assert more.diverged is None, "one benign client of three"
    most = tampered(Flood(set(range(5)) | bad), attack="sf", malicious=0.5)
    assert most.diverged is not None
    assert "benign clients were refused" in most.diverged


def tampered(tamper: Any, **settings: Any) -> Any:
    from fedkin.config import make_config
    from fedkin.rounds import run_config

    return run_config(make_config({"method": "fedavg", "lr": 0.05, **TINY, **settings}), tamper=tamper)


def test_refusals_outlive_a_checkpoint() -> None:
    job = finished(job_of("fedavg", lr=1e30))
    again = job_of("fedavg", lr=1e30)
    again.restore(job.state())
    assert again.refusals == job.refusals
    assert again.broken == job.broken != []
    assert again.result().diverged == job.result().diverged is not None


def test_a_run_says_it_and_its_exit_status_is_1(tmp_path: Path) -> None:
    flags = [w for k, v in TINY.items() for w in (f"--{k}", str(v))] + ["--runs-dir", str(tmp_path)]
    shown = CliRunner().invoke(app, ["run", "fedavg", "--lr", "1e30", *flags])
    assert shown.exit_code == 1
    assert "diverged   in round 1 the replies of 6 of 6 benign clients were refused" in shown.stdout
    assert shown.stdout.count("were refused") == 1, "said once"
    (folder,) = tmp_path.iterdir()
    run = RunFolder.open(folder)
    assert run.info.status == "finished"
    assert "were refused" in str(run.info.diverged)
    assert "diverged: in round 1" in (folder / "log.txt").read_text()
    assert json.loads((folder / "run.json").read_text())["result"]["diverged"] == run.info.diverged
    listed = CliRunner().invoke(app, ["runs", "--runs-dir", str(tmp_path)], env={"COLUMNS": "200"})
    assert "finished, diverged" in listed.stdout
    assert "were refused" in CliRunner().invoke(app, ["show", "last", "--runs-dir", str(tmp_path)]).stdout
    from fedkin.report.page import write_report
    from fedkin.web.views import summary

    assert "were refused" in summary(run.info)["diverged"]
    (page,), _ = write_report([run], tmp_path / "report", ["html"])
    text = page.read_text()
    assert '<span class="bad">diverged</span>' in text
    assert "were refused" in text
    assert CliRunner().invoke(app, ["run", "fedavg", "--lr", "inf", *flags]).exit_code == 2
