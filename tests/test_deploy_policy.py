"""A site that protects itself: what its policy refuses before anything is computed, what stays on record, what is never
overwritten."""

from __future__ import annotations

import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_deploy_worker import Told
from typer.testing import CliRunner

from fedkin.cli.application import app
from fedkin.config import make_config
from fedkin.deploy.joining import TRAVELS
from fedkin.deploy.policy import Declined, Policy, Rule
from fedkin.deploy.state import ASIDE
from fedkin.deploy.worker import Worker, printable
from fedkin.errors import UsageError
from fedkin.methods import METHODS, options_of
from fedkin.tasks import make_task
from fedkin.use.model_file import load as load_model


def policy(**given: Any) -> Policy:
    return Policy.of(given, TRAVELS)


def allows(rules: Policy, method: str, options: dict[str, Any] | None = None, **settings: Any) -> bool:
    config = make_config({"method": method, "options": options or {}, **settings})
    try:
        rules.check(config, options_of(METHODS[method], config.options, method))
    except Declined:
        return False
    return True


# ---------------------------------------------------------------- the policy itself


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"method": ["fedavg"]}, "did you mean 'methods'"),
        ({"methods": "fedavg"}, "no list"),
        ({"methods": []}, "no list"),
        ({"methods": ["fedavgg"]}, "did you mean 'fedavg'"),
        ({"questions": 0}, "whole number from 1"),
        ({"questions": 2.5}, "whole number"),
        ({"questions": True}, "whole number"),
        ({"test_share": 1.5}, "from 0.01 to 0.99"),
        ({"evaluation": "coarse"}, "exact"),
        ({"evaluation": 0.9}, "from 0.001 to 0.5"),
        ({"least_noise": -1}, "least_noise"),
        ({"least_noise": "much"}, "least_noise"),
        ({"settings": {"epoch": 3}}, "did you mean 'epochs'"),
        ({"settings": {"runs_dir": "x"}}, "unknown name"),
        ({"settings": {"epochs": {"max": 3}}}, "unknown rule"),
        ({"settings": {"epochs": {}}}, "least, most or among"),
        ({"settings": {"epochs": {"most": "3"}}}, "is no number"),
        ({"settings": {"epochs": {"among": 3}}}, "no list"),
        ({"settings": 3}, r"\[settings\]"),
        ({"options": {"fedpkdaa": {}}}, "did you mean 'fedpkda'"),
        ({"options": {"fedpkda": {"noize": 1}}}, "did you mean 'noise'"),
        ({"options": {"fedpkda": 3}}, "write"),
    ],
)
def test_policies_that_cannot_be_kept_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Policy.of(given, TRAVELS)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (5, [5, 5.0], [4, True, "5", None]),
        ("sgd", ["sgd"], ["adam", None, 1]),
        (True, [True], [1, False]),
        ({"least": 2}, [2, 3.5], [1.999, None, "3", True, float("nan")]),
        ({"most": 2}, [2, -1], [2.001, None, float("inf"), float("nan")]),
        ({"least": 1, "most": 2}, [1, 1.5, 2], [0.9, 2.1]),
        ({"among": ["a", 3]}, ["a", 3], ["b", 4, None]),
    ],
)
def test_rules(rule: Any, good: list[Any], bad: list[Any]) -> None:
    made = Rule.of("x", rule)
    for value in good:
        made.check("x", value)
    for value in bad:
        with pytest.raises(Declined, match=r"x=.*this site's policy allows"):
            made.check("x", value)


def test_methods_settings_and_options() -> None:
    rules = policy(
        methods=["fedavg", "fedcap"],
        settings={"epochs": {"most": 5}, "optimiser": "sgd"},
        options={"fedcap": {"lam": {"least": 0.1}}},
    )
    assert allows(rules, "fedavg", epochs=5)
    assert not allows(rules, "fedavg", epochs=6)
    assert not allows(rules, "fedavg", epochs=5, optimiser="adam")
    assert not allows(rules, "fedper", epochs=5)
    assert allows(rules, "fedcap", {"lam": 0.1}, epochs=1)
    assert not allows(rules, "fedcap", {"lam": 0.0}, epochs=1)
    assert allows(Policy(), "fedcap", {"lam": 0.0}, epochs=1000)


@pytest.mark.parametrize(
    ("rules", "options", "good"),
    [
        ({"least_noise": 0.1}, {}, True),
        ({"least_noise": 0.1}, {"noise": 0}, False),
        ({"least_noise": 0.1}, {"noise": 0.1, "clip": 10.0}, False),  # the same noise on features ten times as large
        ({"least_noise": 0.1}, {"noise": 1.0, "clip": 10.0}, True),
        ({"least_noise": 0.1}, {"clip": float("inf")}, False),
        ({"least_noise": 0.1}, {"target_epsilon": 1e9}, False),  # which would make the noise as good as none
        ({"most_epsilon": 8}, {"target_epsilon": 8.0}, True),
        ({"most_epsilon": 8}, {"target_epsilon": 9.0}, False),
        ({"most_epsilon": 8}, {"noise": 5.0}, False),
        ({"least_noise": 1, "most_epsilon": 8}, {"noise": 1.0}, True),
        ({"least_noise": 1, "most_epsilon": 8}, {"target_epsilon": 4.0}, True),
        ({"least_noise": 1, "most_epsilon": 8}, {"target_epsilon": 9.0, "noise": 5.0}, False),
    ],
)
def test_the_noise_that_counts(rules: dict[str, Any], options: dict[str, Any], good: bool) -> None:
    assert allows(policy(**rules), "fedpkda", options) is good
    assert allows(policy(**rules), "fedavg")


@pytest.mark.parametrize("right", range(0, 41, 4))
def test_a_coarse_answer_has_few_values(right: int) -> None:
    loss = torch.tensor([1.2345])
    values = {"correct": torch.tensor([[float(right)]]), "count": torch.tensor([[40.0]]), "loss": loss}
    task = make_task("classification")
    told = policy(evaluation=0.25).coarse(values, task, ())
    assert float(told["correct"]) in (0, 10, 20, 30, 40)  # type: ignore[arg-type]
    assert abs(float(told["correct"]) - right) <= 5  # type: ignore[arg-type]
    assert float(told["count"]) == 40  # type: ignore[arg-type]
    assert float(told["loss"]) == pytest.approx(1.2)  # type: ignore[arg-type]
    assert torch.equal(policy(evaluation="exact").coarse(values, task, ())["correct"], values["correct"])  # type: ignore[arg-type]
    with pytest.raises(Declined, match="no evaluation"):
        policy(evaluation="none").coarse(values, task, ())


def test_the_policy_on_the_security_page_is_one() -> None:
    page = (Path(__file__).parent.parent / "docs" / "security.md").read_text(encoding="utf-8")
    [body] = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    made = Policy.of(tomllib.loads(body), TRAVELS)
    assert (made.methods, made.questions, made.evaluation) == (("fedcap", "fedpkda"), 12, 0.1)
    assert not allows(made, "fedcap", epochs=20)
    assert allows(made, "fedcap", {"lam": 0.5}, epochs=2, rounds=200)


# ---------------------------------------------------------------- at a site


def guarded(told: Told, **given: Any) -> Told:
    told.worker.policy = policy(**given)
    return told


def test_a_run_that_the_policy_declines_is_not_joined(tmp_path: Path) -> None:
    told = guarded(Told(tmp_path, "fedpkda"), least_noise=0.5)
    reply = told.join()
    assert reply.fields["kind"] == "failed"
    assert "this site's policy asks for at least 0.5" in reply.fields["reason"]
    assert "policy asks for" in told.lines[-1]
    assert told.worker.joined is None
    assert not (tmp_path / "site" / "runs").exists()  # refused before anything was made


def test_questions_have_an_end(tmp_path: Path) -> None:
    told = guarded(Told(tmp_path, "fedavg"), questions=3)
    told.join()
    model = told.job.method.model
    assert told.call("train", 0, model=model).fields["kind"] == "reply"
    kinds = [told.call("report", 0, -1, model=model).fields["kind"] for _ in range(10)]
    assert kinds == ["reply"] * 2 + ["failed"] * 8
    assert "answers at most 3" in told.lines[-1]
    assert told.call("train", 1, model=model).fields["kind"] == "reply"  # the next round
    reply = told.call("report", 6, -1, model=model)  # there are five
    assert "round 7 of 5" in reply.fields["reason"]


def test_a_hundred_reports_do_not_tell_the_classes(tmp_path: Path) -> None:
    """A model that always says one class, asked about for each: exact answers are the counts, coarse ones are not."""
    found = {}
    for name, evaluation in (("exact", "exact"), ("coarse", 0.5)):
        told = guarded(Told(tmp_path / name, "fedavg"), evaluation=evaluation)
        told.join()
        layout, counts = told.job.site.layout, []
        for label in range(10):
            row = torch.zeros(layout.width)
            layout.tensors(row)[f"{layout.head_name}.bias"][label] = 100.0
            counts.append(float(told.call("report", 1, -1, model=row).values["correct"]))  # type: ignore[arg-type]
        found[name] = counts
    assert sum(found["exact"]) == 15  # the test samples of a site with 60
    assert len(set(found["exact"])) > 2
    assert set(found["coarse"]) == {0.0}


@pytest.mark.parametrize(("method", "phase", "name"), [("fedcap", "compare", "model"), ("c-pfl", "validate", "bodies")])
@pytest.mark.parametrize("evaluation", ["exact", 0.5, "none"])
def test_no_phase_tells_what_the_evaluation_may_not(
    tmp_path: Path, method: str, phase: str, name: str, evaluation: Any
) -> None:
    """FedCAP compares two models on the test samples and C-PFL's committee votes: exact counts for any model sent."""
    told = guarded(Told(tmp_path, "fedavg"), evaluation=evaluation)
    assert told.join(config={"method": method, "validation_share": 0.2}).fields["kind"] == "joined"
    layout, first = told.job.site.layout, told.job.site.initial
    sent = first[layout.columns("model")] if name == "model" else layout.body(first)[None]
    reply = told.call(phase, 0, **{name: sent})
    assert (reply.fields["kind"] == "reply") == (evaluation == "exact"), reply.fields
    assert bool(reply.values) == (evaluation == "exact")
    assert evaluation == "exact" or "this site's policy (evaluation)" in reply.fields["reason"]


def test_a_training_loss_is_as_coarse_as_the_evaluation(tmp_path: Path) -> None:
    losses = {}
    for name, evaluation in (("exact", "exact"), ("none", "none")):
        told = guarded(Told(tmp_path / name, "fedavg"), evaluation=evaluation)
        told.join()
        losses[name] = told.call("train", 0, model=told.job.method.model).fields["loss"]
    assert losses["none"] == float(f"{losses['exact']:.2g}") != losses["exact"]


def test_what_a_greeting_and_an_answer_to_an_invitation_tell(tmp_path: Path) -> None:
    told = Told(tmp_path, "fedavg")
    data = {"samples", "tests", "shape", "dtype", "labels", "targets", "width", "vocabulary"}
    assert set(told.hello) == {"kind", "site", "process", "fedkin"} | data
    assert set(told.join().fields) == {"kind", "train", "validation", "test", "remark"}
    reply = told.call("train", 0, model=told.job.method.model)
    assert set(reply.fields) == {"kind", "loss", "seconds", "steps"}


def test_without_evaluation_the_model_is_kept_all_the_same(tmp_path: Path) -> None:
    told = guarded(Told(tmp_path, "fedavg"), evaluation="none")
    told.join()
    reply = told.call("report", 1, -1, model=told.job.method.model)
    assert reply.fields["kind"] == "failed"
    assert not reply.values
    assert (tmp_path / "site" / "runs" / "run-1" / "personal.safetensors").exists()


def test_the_site_draws_its_test_samples_itself(tmp_path: Path) -> None:
    def site(seed: int, share: float) -> tuple[set[int], int]:
        told = Told(tmp_path, "fedavg", seed=seed, test_share=share)
        told.worker = Worker(
            "oslo", tmp_path / "oslo.npz", tmp_path / "site", told.lines.append, policy=policy(test_share=0.2)
        )
        hello = told.ask(kind="hello").fields
        reply = told.join(run=f"run-{seed}")
        assert reply.fields["kind"] == "joined", reply.fields
        job = told.worker.joined
        assert job is not None
        rows = job.site.parts["test"][0]
        assert (hello["tests"], reply.fields["test"]) == (12, 12)
        return {hash(told.worker.own.x[i].tobytes()) for i in rows}, len(rows)

    first = site(1, 0.9)
    assert first == site(2, 0.3)
    assert first[1] == 12


# ---------------------------------------------------------------- on record


def record(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def test_what_was_asked_and_answered_is_on_record(tmp_path: Path) -> None:
    told = Told(tmp_path, "ditto")
    told.join()
    told.call("train", 0, model=told.job.method.model)
    told.call("personal\x1b[2J", 0)
    lines = record(tmp_path / "site")
    assert [line["kind"] for line in lines] == ["hello", "join", "call", "call"]
    size = 4 * told.job.method.model.numel()
    assert lines[2]["asked"] == {"model": size}
    assert lines[2]["sent"] == {"model": size}
    assert lines[2]["sent_bytes"] > size
    assert (lines[2]["round"], lines[2]["phase"]) == ("0", "train")
    assert "'method': 'ditto'" in lines[1]["config"]
    assert "no such client function" in lines[3]["failed"]
    raw = (tmp_path / "site" / "record.jsonl").read_bytes()
    assert b"\x1b" not in raw
    assert (tmp_path / "site" / "record.jsonl").stat().st_mode & 0o077 == 0
    again = Told(tmp_path, "ditto")
    assert (tmp_path / "site" / "record.jsonl").read_bytes().startswith(raw)  # lines are only added
    secret = again.worker._seed()
    assert str(secret).encode() not in (tmp_path / "site" / "record.jsonl").read_bytes()


def test_nothing_is_answered_off_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(tmp_path, "ditto")
    told.join()
    real = os.open

    def full(path: Any, *rest: Any) -> int:
        if str(path).endswith("record.jsonl"):
            raise OSError(28, "No space left on device")
        return real(path, *rest)

    monkeypatch.setattr(os, "open", full)
    reply = told.call("train", 0, model=told.job.method.model)
    assert (reply.fields["kind"], dict(reply.values)) == ("failed", {})
    assert "off the record" in told.lines[-1]


@pytest.mark.parametrize("text", ["\x1b[2J\x1b[31mowned", "a\rb", "x\n2026-01-01T00:00:00Z sent: nothing", "\x07\x9b"])
def test_no_terminal_codes_reach_a_sites_log(tmp_path: Path, text: str) -> None:
    told = Told(tmp_path, "ditto")
    told.ask(kind="refused", reason=text)
    told.lines.append(str(told.worker.refused))  # said by whoever ends the connection
    told.ask(kind=text)
    told.call(text, 0)
    told.join(run=text)
    told.ask({"initial": torch.zeros(1)}, kind="join", run=text)
    for line in told.lines:
        assert all(c.isprintable() or c == "\n" for c in line)
        assert "\n2026" not in line
    assert "\x1b" not in printable(text)


# ---------------------------------------------------------------- never overwritten


def trained(told: Told, run: str, attempt: int = 1, rounds: int = 1) -> None:
    assert told.join(attempt=attempt, run=run).fields["kind"] == "joined"
    for number in range(rounds):
        fields = {"run": run, "attempt": attempt, "checkpoints": []}
        told.ask({"model": told.job.method.model}, kind="call", phase="train", round=number, call=0, **fields)
        told.ask({}, kind="call", phase="report", round=number + 1, call=-1, **fields)


def test_each_run_keeps_its_model_and_the_last_finished_one_is_in_use(tmp_path: Path) -> None:
    told, site = Told(tmp_path, "ditto"), tmp_path / "site"
    trained(told, "run-1")
    assert not (site / "personal.safetensors").exists()  # not before the run is over
    told.ask(kind="done")
    first = (site / "personal.safetensors").read_bytes()
    assert "this site's model is" in told.lines[-1]
    trained(told, "run-2", rounds=2)
    assert (site / "personal.safetensors").read_bytes() == first  # a run that is going on changes nothing
    told.ask(kind="done")
    assert load_model(site / "personal.safetensors").card.run == "run-2"
    assert (site / "previous-personal.safetensors").read_bytes() == first
    assert (site / "runs" / "run-1" / "personal.safetensors").read_bytes() == first
    reply = told.join(attempt=9, run="run-1")
    assert "is over at this site" in reply.fields["reason"]
    assert (site / "runs" / "run-1" / "personal.safetensors").read_bytes() == first


def test_a_model_that_was_not_saved_is_not_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(tmp_path, "ditto")
    told.join()
    told.ask(kind="done")
    assert "no model of it was kept" in told.lines[-1]
    trained(told, "run-2")
    (tmp_path / "site" / "personal.safetensors").mkdir()
    told.ask(kind="done")
    assert "could not be written" in told.lines[-1]
    assert "runs/run-2/personal.safetensors" in told.lines[-1]


def test_a_run_that_is_begun_anew_wipes_nothing(tmp_path: Path) -> None:
    told, site = Told(tmp_path, "ditto"), tmp_path / "site"
    trained(told, "run-1")
    kept = {p.name: p.read_bytes() for p in (site / "runs" / "run-1").iterdir()}
    reply = told.join(attempt=2)
    assert "set aside in run-1~1" in reply.fields["remark"]
    assert {p.name: p.read_bytes() for p in (site / "runs" / "run-1~1").iterdir()} == kept
    assert told.worker.joined is not None
    assert told.worker.joined.kept == {}
    assert told.join(attempt=3).fields["remark"] == ""  # nothing was done since: nothing to set aside
    for attempt in range(4, 4 + ASIDE - 1):
        trained(told, "run-1", attempt)
    trained_once = told.join(attempt=50)
    assert f"set aside in run-1~{ASIDE}" in trained_once.fields["remark"]
    fields = {"run": "run-1", "attempt": 50, "checkpoints": []}
    told.ask({"model": told.job.method.model}, kind="call", phase="train", round=0, call=0, **fields)
    assert "begun anew" in told.join(attempt=51).fields["reason"]
    assert told.join(attempt=1, run="run-1~1").fields["kind"] == "failed"  # no run can have such a name


def test_changed_data_of_the_same_size_are_noticed(tmp_path: Path) -> None:
    told = Told(tmp_path, "ditto")
    trained(told, "run-1")
    arrays = dict(np.load(tmp_path / "oslo.npz"))
    arrays["x"][3, 0, 2, 2] += 1
    np.savez(tmp_path / "oslo.npz", **arrays)
    told.worker = Worker("oslo", tmp_path / "oslo.npz", tmp_path / "site", told.lines.append, secret=False)
    reply = told.join(attempt=2, round=1)
    assert reply.fields["kind"] == "failed"
    assert "not those it began the run with" in reply.fields["reason"]
    assert told.join(attempt=1, run="run-2").fields["kind"] == "joined"


# ---------------------------------------------------------------- the commands


def test_commands(tmp_path: Path) -> None:
    def fedkin(*words: str, code: int) -> str:
        outcome = CliRunner().invoke(app, list(words))
        assert outcome.exit_code == code, outcome.output
        return " ".join(outcome.output.split())

    file, experiment = tmp_path / "policy.toml", tmp_path / "experiment.toml"
    file.write_text('methods = ["fedcap"]\n[settings]\nepochs = { most = 3 }\n')
    experiment.write_text('method = "fedcap"\nepochs = 5\n')
    asked = ["doctor", "--policy", str(file)]
    assert "can be kept" in fedkin(*asked, code=0)
    assert "epochs=5: this site's policy allows at most 3" in fedkin(*asked, "--config", str(experiment), code=1)
    experiment.write_text('method = "fedcap"\nepochs = 3\n')
    assert "allows the experiment" in fedkin(*asked, "--config", str(experiment), code=0)
    file.write_text("question = 3\n")
    assert "did you mean 'questions'" in fedkin(*asked, code=1)
    np.savez(tmp_path / "oslo.npz", x=np.zeros((9, 2)), y=np.arange(9) % 2)
    words = ["client", "--server", "127.0.0.1:1", "--data", str(tmp_path / "oslo.npz"), "--name", "oslo", "--insecure"]
    assert "did you mean 'questions'" in fedkin(*words, "--policy", str(file), code=2)
