"""A setting that is given is applied or refused by name, on every way in; what is recorded is what was applied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance import every_method
from torch import nn

import fedkin as fk
from fedkin.cli.flags import grid_configs, run_config_of
from fedkin.config import Config, make_config
from fedkin.data import Dataset, iid, make_split
from fedkin.errors import FedKinError, UsageError
from fedkin.methods import METHODS, options_of
from fedkin.robust import ATTACKS, ReplyAttack
from fedkin.rounds import Job, footprint, prepare
from fedkin.runs.asked import request
from fedkin.runs.folder import RunFolder
from fedkin.testing import job_of, personal_rows

SITES, CLASSES, SIDE = 4, 3, 16
BASE: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch": 8, "lr": 0.1, "device": "cpu", "way": "each", "model": "mlp"}


def site(number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    y = np.arange(16) % CLASSES
    return rng.integers(0, 255, (16, SIDE, SIDE), np.uint8), y


LISTS = [site(i) for i in range(SITES)]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as a folder of files, as one file, and as one file with users."""
    root = tmp_path_factory.mktemp("data")
    (root / "sites").mkdir()
    for i, (x, y) in enumerate(LISTS):
        np.savez(root / "sites" / f"site-{i}.npz", x=x, y=y)
    x, y = (np.concatenate(part) for part in zip(*LISTS, strict=True))
    np.savez(root / "all.npz", x=x, y=y, user=np.repeat(np.arange(SITES), 16))
    return root


# ---------------------------------------------------------------- ways in


def by_list(places: Path, values: dict[str, Any]) -> Job:
    return job(request(clients=LISTS, **values))


def by_folder(places: Path, values: dict[str, Any]) -> Job:
    return prepare(make_config({"data": str(places / "sites"), **values}))


def by_file(places: Path, values: dict[str, Any]) -> Job:
    return prepare(make_config({"data": str(places / "all.npz"), "clients": 4, "partition": "iid", **values}))


def by_users(places: Path, values: dict[str, Any]) -> Job:
    return prepare(make_config({"data": str(places / "all.npz"), "partition": "natural", **values}))


def by_dataset(places: Path, values: dict[str, Any]) -> Job:
    x, y = (np.concatenate(part) for part in zip(*LISTS, strict=True))
    data = Dataset("mine", x[:, None], y.astype(np.int64), CLASSES)
    return job(request(data=data, **{"clients": 4, "partition": iid(), **values}))


def by_flags(places: Path, values: dict[str, Any]) -> Job:
    words = {k: str(v).lower() if isinstance(v, bool) else v if k == "options" else str(v) for k, v in values.items()}
    method = words.pop("method", "fedavg")
    sets = [f"{k}={v}" for k, v in words.pop("options", {}).items()]
    return prepare(
        run_config_of(method, {"data": str(places / "all.npz"), "clients": "4", "partition": "iid", **words}, sets)
    )


def by_toml(places: Path, values: dict[str, Any]) -> Job:
    import json

    options = values.get("options", {})
    lines = [
        f"{k} = {json.dumps(v)}"
        for k, v in {"data": str(places / "sites"), **values}.items()
        if k != "options" and v is not None
    ]
    lines += ["[options]", *(f"{k} = {json.dumps(v)}" for k, v in options.items())]
    (places / "one.toml").write_text("\n".join(lines))
    return prepare(run_config_of(str(places / "one.toml"), {}, []))


def job(asked: Any) -> Job:
    return prepare(asked.config, **asked.objects)


ROUTES: dict[str, Callable[[Path, dict[str, Any]], Job]] = {
    "lists": by_list,
    "folder": by_folder,
    "file": by_file,
    "users": by_users,
    "dataset": by_dataset,
    "flags": by_flags,
    "toml": by_toml,
}


# ---------------------------------------------------------------- what a setting can change


def facts(made: Job) -> dict[str, Any]:
    """Everything a setting may change, after the run."""
    begun = made.site.initial.clone()
    records = []
    while not made.finished:
        record = made.advance() if made.fed.round < made.config.rounds else made.finish()
        records.append(record if record is None else (record.round, record.participants, record.failed))
    result = made.result()
    return {
        "split": made.prepared.split_hash,
        "samples": made.site.source.x.clone(),
        "first": begun,
        "trained": result._rows,
        "records": records,
        "bytes": result.bytes,
        "accuracy": repr(result.accuracy),
        "metrics": [list(r.metrics) for r in result.history],
        "point": made.prepared.eval_point,
        "malicious": result.malicious,
        "names": made.site.names,
        "layout": [(s.name, s.start) for s in made.site.layout.slots],
        "parameters": made.prepared.parameters,
        "precision": made.prepared.precision,
        "device": made.prepared.device,
        "options": made.options,
        "stops": made.fed.stop_on_failure,
        "chunk": made.engine._chunk,
        "way": made.site.chooser.forced,
    }


def differs(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape != two.shape or not torch.equal(one, two)
    return bool(one != two)


@dataclass(frozen=True)
class Walk:
    """How one setting is tried: its value, what it must change, and the ways in on which it is refused instead."""

    value: Any
    changes: tuple[str, ...] = ("trained",)
    refused: tuple[str, ...] = ()
    besides: dict[str, Any] = field(default_factory=dict)  # given as well, in both runs


OWN = ("lists", "folder", "toml")
ATTACKED = {"attack": "ipm", "malicious": 0.5}
ELSEWHERE = "elsewhere"  # no part of what a job computes: its own test below
TABLE: dict[str, Walk | str] = {
    "method": Walk("fedper"),
    "data": ELSEWHERE,
    "data_dir": Walk("/nowhere", (), tuple(ROUTES)),
    "label": Walk("kind", (), tuple(ROUTES)),
    "client_column": Walk("who", (), tuple(ROUTES), {"partition": "natural"}),
    "categories": Walk("sex", (), tuple(ROUTES)),
    "impute": Walk("local", (), tuple(ROUTES)),
    "scale": Walk("local", (), tuple(ROUTES)),
    "image_size": Walk("8", (), tuple(ROUTES)),
    "image_mode": Walk("grey", (), tuple(ROUTES)),
    "clients": Walk(3, ("split",), OWN),
    "partition": Walk("dirichlet:0.5:1", ("split",), OWN),
    "samples_per_client": Walk(8, ("split",)),
    "quantity_skew": Walk(1.0, ("split",)),
    "test_share": Walk(0.5, ("split",)),
    "validation_share": Walk(0.3, ("split",)),
    "shift": Walk("brightness", ("samples", "trained")),
    "severity": Walk(1, ("samples", "trained"), (), {"shift": "fog"}),
    "task": Walk("classification:weights=balanced"),
    "metrics": Walk("auc", ("metrics",)),
    "model": Walk("fedcap-emnist", ("parameters", "trained")),
    "start_from": ELSEWHERE,  # test_warm
    "init": ELSEWHERE,
    "head": Walk("", ("trained",), (), {"method": "fedper"}),
    "buffers": Walk("local", (), tuple(ROUTES)),
    "rounds": Walk(3, ("trained", "records")),
    "participation": Walk(0.5, ("trained", "records")),
    "epochs": Walk(2),
    "batch": Walk(3),
    "optimiser": Walk("adam"),
    "lr": Walk(0.02),
    "lr_schedule": Walk("exponential:gamma=0.5"),
    "lr_factors": Walk("lognormal:0.5"),
    "momentum": Walk(0.9),
    "weight_decay": Walk(0.3),
    "clip_grad": Walk(0.5),
    "accumulate": Walk(2),
    "augment": Walk(True),
    "order": Walk("fixed"),
    "seed": Walk(1, ("split", "first", "trained")),
    "eval_point": Walk("after_local", ("point", "trained")),
    "eval_every": Walk(2, ("records",)),
    "patience": ELSEWHERE,  # these three: test_choosing
    "min_gain": ELSEWHERE,
    "keep": ELSEWHERE,
    "drop": Walk(0.9, ("records",)),
    "straggle": Walk(0.9, ("records",)),
    "attack": Walk("ipm", ("trained", "malicious"), (), {"attackers": None}),
    "malicious": Walk(0.75, ("malicious",), (), {"attack": "ipm"}),
    "knowledge": Walk("own", ("trained",), (), ATTACKED),
    "attackers": Walk("1", ("malicious",), (), {"attack": "ipm"}),
    "rule": Walk("median"),
    "device": ELSEWHERE,
    "precision": ELSEWHERE,
    "way": Walk("batched", ("way",)),
    "chunk": Walk(1, ("chunk",)),
    "on_failure": Walk("stop", ("stops",)),
    "force": ELSEWHERE,
    "runs_dir": ELSEWHERE,
    "checkpoint_every": ELSEWHERE,
    "options": Walk({"mu": 2.0}, ("options", "trained"), (), {"method": "fedprox"}),
}


def test_the_walk_knows_every_setting() -> None:
    assert set(TABLE) == {f.name for f in fields(Config)}


@pytest.fixture(scope="module")
def usual(places: Path) -> Callable[[str, dict[str, Any]], dict[str, Any]]:
    """What comes out without the setting, worked out once for each way in and what is given besides."""
    known: dict[str, dict[str, Any]] = {}

    def of(route: str, values: dict[str, Any]) -> dict[str, Any]:
        key = f"{route}{sorted(values.items(), key=repr)}"
        if key not in known:
            known[key] = facts(ROUTES[route](places, values))
        return known[key]

    return of


def tries() -> Iterator[tuple[str, str]]:
    every = {"lists", "flags"}
    for name, walk in TABLE.items():
        of_data = isinstance(walk, Walk) and ("split" in walk.changes or walk.refused)
        for route in ROUTES if of_data else every:
            if isinstance(walk, Walk):
                yield name, route


@pytest.mark.parametrize(("name", "route"), sorted(tries()))
def test_given_is_applied_or_refused(name: str, route: str, places: Path, usual: Any) -> None:
    walk = TABLE[name]
    assert isinstance(walk, Walk)
    if (name, route) in (("partition", "users"), ("clients", "lists")):
        return  # this way in is a partition; here the clients are the data
    if name == "clients" and route == "users":
        walk = replace(walk, changes=("split", "names"))
    besides = {k: v for k, v in walk.besides.items() if v is not None}
    values = {**BASE, **besides}
    if name == "buffers":
        values.pop("model")
    given = {**values, name: walk.value}
    if route in walk.refused:
        with pytest.raises(UsageError, match=rf"^{name}=.* would change nothing: "):
            ROUTES[route](places, given)
        return
    before, after = usual(route, values), facts(ROUTES[route](places, given))
    for fact in walk.changes:
        assert differs(before[fact], after[fact]), f"{name}={walk.value!r} left {fact} as it was"
    if name in ("way", "chunk", "on_failure"):
        assert torch.allclose(before["trained"], after["trained"], atol=1e-5)


# ---------------------------------------------------------------- settings that are about files and machines


def test_data_and_their_place(places: Path, tmp_path: Path) -> None:
    (tmp_path / "ucihar.npz").write_bytes(b"")
    with pytest.raises(FedKinError, match=str(tmp_path)):
        prepare(make_config({"data": "ucihar", "data_dir": str(tmp_path)}))
    assert facts(by_file(places, BASE))["split"] != facts(by_users(places, BASE))["split"]
    with pytest.raises(UsageError, match="not both"):
        fk.run(clients=LISTS, data="digits")


def test_the_device_and_its_precision() -> None:
    with pytest.raises(UsageError, match="device='cuda:99'"):
        prepare(make_config({"device": "cuda:99"}))
    with pytest.raises(UsageError, match="precision='tf32' is a GPU format"):
        prepare(make_config({"device": "cpu", "precision": "tf32"}))


def test_force_begins_what_does_not_fit(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "host_room", lambda: 0)
    with pytest.raises(UsageError, match="or --force to try"):
        by_flags(places, BASE)
    assert by_flags(places, {**BASE, "force": True}).config.force


def test_folders_and_checkpoints(places: Path, tmp_path: Path) -> None:
    values = {**BASE, "clients": LISTS, "rounds": 2}
    with pytest.raises(UsageError, match="checkpoint_every=1 would change nothing: the run leaves no folder"):
        fk.run(**values, checkpoint_every=1)
    result = fk.run(**values, checkpoint_every=1, runs_dir=str(tmp_path))
    assert len(list((Path(str(result.run)) / "checkpoints").iterdir())) >= 2


# ---------------------------------------------------------------- own data take every setting of a split


def test_every_seed_of_a_comparison_on_lists_has_a_split_of_its_own() -> None:
    results, _ = fk.compare(["fedavg"], clients=LISTS, seeds=3, **BASE)
    assert len({r.prepared.split_hash for r in results}) == 3


def test_c_pfl_runs_on_lists() -> None:
    result = fk.run("c-pfl", clients=LISTS, **BASE)
    assert result.config.validation_share == METHODS["c-pfl"].holdout
    assert any(n.name == "scores" and torch.isfinite(n.value).any() for n in result.notes)


def test_lists_and_folders_split_alike(places: Path) -> None:
    more = {**BASE, "seed": 5, "samples_per_client": 10, "quantity_skew": 0.5, "validation_share": 0.2}
    one, two = by_list(places, more), by_folder(places, more)
    assert [p.tolist() for p in one.site.parts["train"]] == [p.tolist() for p in two.site.parts["train"]]


def test_a_cap_keeps_the_class_mix_and_the_test_share(places: Path) -> None:
    made = by_list(places, {**BASE, "samples_per_client": 8})
    for train, test in zip(made.site.parts["train"], made.site.parts["test"], strict=True):
        assert (len(train), len(test)) == (6, 2)
    (x, y), *_ = LISTS
    four = [(x, y, x[:8], y[:8])] * 2
    made = job(request(clients=four, samples_per_client=8, **BASE))
    assert [len(p) for p in made.site.parts["train"]] == [6, 6]
    assert [len(p) for p in made.site.parts["test"]] == [2, 2]


def test_shares_that_the_data_decide_are_refused(places: Path) -> None:
    (x, y), *_ = LISTS
    with pytest.raises(UsageError, match=r"test_share=0.5 would change nothing: every client brings its own test"):
        fk.run(clients=[(x, y, x, y), (x, y, x, y)], test_share=0.5, **BASE)
    fk.run(clients=[(x, y, x, y), (x, y)], test_share=0.5, **BASE)
    with pytest.raises(UsageError, match=r"test_share=0.5 would change nothing: shards:2 deals the test samples"):
        by_file(places, {**BASE, "partition": "shards:2", "test_share": 0.5})
    data = by_dataset(places, BASE)
    dataset = Dataset("mine", data.site.source.x.numpy(), data.site.source.y.numpy(), CLASSES)
    pair = dataset, make_split(dataset, 4, "iid", 0)
    assert fk.run(data=pair, clients=4, **BASE).config.partition == "own"
    for name, value in {"test_share": 0.5, "partition": "iid", "clients": 3, "quantity_skew": 1.0}.items():
        with pytest.raises(UsageError, match=f"^{name}=.* would change nothing"):
            fk.run(data=pair, **{name: value}, **BASE)
    shifted = fk.run(data=pair, shift="fog", **BASE)
    assert differs(shifted._rows, fk.run(data=pair, **BASE)._rows)


def test_what_is_recorded_is_what_was_applied(places: Path, tmp_path: Path) -> None:
    folder = {**BASE, "data": str(places / "sites"), "runs_dir": str(tmp_path)}
    for result in (fk.run(**folder), fk.run(**folder, clients=SITES, partition="natural")):
        assert (result.config.clients, result.config.partition) == (SITES, "natural")
        run = RunFolder.open(str(result.run))
        assert (run.info.config["clients"], run.info.config["partition"]) == (SITES, "natural")
    with pytest.raises(UsageError, match=r"clients=3 would change nothing: the data are of 4 clients"):
        fk.run(**folder, clients=3)
    listed = fk.run(clients=LISTS, **BASE)
    assert (listed.config.clients, listed.config.partition, listed.config.data) == (SITES, "natural", "own")


def test_natural_means_everybody_unless_a_number_is_given(places: Path) -> None:
    everybody = by_users(places, BASE)
    assert everybody.prepared.clients == SITES
    assert not everybody.prepared.remarks
    chosen = by_users(places, {**BASE, "clients": 3})
    assert any("3 of the 4 users take part" in r for r in chosen.prepared.remarks)


def test_data_that_say_little_are_remarked_on() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 3)).astype(np.float32)
    settings = {**BASE, "rounds": 1}
    one = fk.run(clients=[(x, np.zeros(8, int))] * 2, **settings)
    assert one.accuracy.macro == 100
    assert any("of one class: an accuracy of 100 % says nothing" in r for r in one.remarks)
    each = fk.run(clients=[(x, np.arange(8)), (x, np.arange(8) % 2)], **settings)
    assert any("1 of 2 clients (client-0) is tested only on classes without" in r for r in each.remarks)
    none = fk.run(clients=[(x, np.arange(8) % 2)] * 2, test_share=0, **settings)
    assert any("2 of 2 clients (client-0, ...) are without test samples" in r for r in none.remarks)
    assert not fk.run(clients=LISTS, **settings).prepared.remarks


# ---------------------------------------------------------------- names of settings live with the configuration


def test_a_configuration_knows_what_was_given() -> None:
    config = make_config({"lr": 0.1})
    assert config.asked == {"lr"}
    assert replace(config, rounds=3).asked == {"lr"}
    assert config == make_config({"lr": 0.1}, given=())
    assert config.identity() == make_config({"lr": 0.1}, given=()).identity()
    assert "given" not in config.to_dict()
    assert config.without(["lr"]) == Config()
    assert make_config(config.to_dict()).asked == set()  # a record, no request


def test_a_run_can_be_had_again_from_its_record() -> None:
    once = fk.run("local", data="digits", samples_per_client=20, **BASE)
    assert torch.equal(fk.run(**once.config.to_dict())._rows, once._rows)


def test_resuming_knows_it_too(tmp_path: Path) -> None:
    stopped = {"seen": 0}

    def stop(event: Any) -> None:
        stopped["seen"] += 1
        if stopped["seen"] == 3:
            raise KeyboardInterrupt

    settings: dict[str, Any] = {**BASE, "rounds": 3, "seed": 2, "test_share": 0.4, "samples_per_client": 12}
    whole = fk.run("c-pfl", clients=LISTS, **settings)
    with pytest.raises(KeyboardInterrupt):
        fk.run("c-pfl", clients=LISTS, **settings, runs_dir=str(tmp_path), checkpoint_every=1, on_event=stop)
    run = next(tmp_path.iterdir())
    assert set(RunFolder.open(run).info.asked) >= {"seed", "test_share"}
    assert "clients" not in RunFolder.open(run).info.asked
    assert torch.equal(fk.resume(str(run), clients=LISTS)._rows, whole._rows)


def test_a_partition_as_an_object_is_the_same_as_its_text(tmp_path: Path) -> None:
    one = fk.run("local", data="digits", clients=5, partition=fk.pathological(2), runs_dir=str(tmp_path), **BASE)
    info = RunFolder.open(str(one.run)).info
    assert info.objects == []
    asked = make_config({"method": "local", "data": "digits", "clients": 5, "partition": "pathological:2", **BASE})
    assert info.identity == asked.identity()


# ---------------------------------------------------------------- grids


def test_a_grid_leaves_out_what_changes_nothing_and_says_so() -> None:
    said: list[str] = []
    configs = grid_configs(
        ["fedavg", "local", "fedcap"],
        {"rule": "mean,median", "attack": "none,sf", "malicious": "0.4"},
        [],
        None,
        [],
        said.append,
    )
    assert [(c.method, c.attack, c.rule) for c in configs] == [
        ("fedavg", "none", "mean"),
        ("local", "none", "mean"),
        ("fedcap", "none", "mean"),
        ("fedavg", "none", "median"),
        ("fedavg", "sf", "mean"),
        ("local", "sf", "mean"),
        ("fedcap", "sf", "mean"),
        ("fedavg", "sf", "median"),
    ]
    assert [c.malicious for c in configs if c.attack == "none"] == [0.3] * 4
    assert [s.split(":")[0] for s in said] == ["local", "fedcap"]
    with pytest.raises(UsageError, match="rule='median' would change nothing"):
        grid_configs(["local", "fedcap"], {"rule": "mean,median"}, [], None)
    with pytest.raises(UsageError, match=r"malicious=0.4 would change nothing"):
        grid_configs(["local", "fedavg"], {"malicious": "0.4"}, [], None)


def test_compare_in_python_does_the_same(caplog: pytest.LogCaptureFixture) -> None:
    settings = {**BASE, "rounds": 1, "clients": LISTS}
    results, rows = fk.compare(
        ["fedavg", "local"], rule=["mean", "median"], attack=["none", "sf"], malicious=0.5, **settings
    )
    assert len(results) == len(rows) == 6
    assert "local: rule would change nothing" in caplog.text
    with pytest.raises(UsageError, match="rule='median' would change nothing"):
        fk.compare(["local"], rule=["mean", "median"], **settings)


# ---------------------------------------------------------------- what methods and attacks say of themselves


USES = {
    "rule": "median",
    "optimiser": "adam",
    "momentum": 0.9,
    "weight_decay": 0.3,
    "clip_grad": 0.01,
    "accumulate": 2,
    "lr": 0.03,
    "epochs": 2,
    "head": "",
}
OTHER_OPTIONS = [
    ("fedrep", {"head_epochs": 1}),
    ("co-pfl", {"lr": 0.1}),
    ("co-pfl", {"optimiser": "sgd"}),
    ("fedcap", {"ablation": "2"}),
]


@pytest.mark.parametrize(("name", "options"), every_method(*OTHER_OPTIONS, options={}))
def test_a_method_says_which_settings_change_nothing(name: str, options: dict[str, Any]) -> None:
    """Two rounds with and without each setting: the personal models differ exactly where the method says so."""
    unused = METHODS[name].unused(options_of(METHODS[name], options, name))

    def models(**settings: Any) -> dict[str, torch.Tensor]:
        made = job_of(name, options, sizes=(9, 6, 7, 5, 8, 6), rounds=3, **settings)
        while not made.finished:
            made.advance() if made.fed.round < made.config.rounds else made.finish()
        return made.site.layout.tensors(personal_rows(made))

    usual = models()
    for setting, value in USES.items():
        if setting == "head" and setting not in unused:
            continue  # without a head some are another method, and some are none
        found = models(**{setting: value})
        near = 1e-5 if setting == "head" else 0  # other places in a row: sums are taken in another order
        same = all(torch.allclose(usual[k], found[k], rtol=0, atol=near) for k in usual)
        assert same == (setting in unused), f"{name}: {setting}={value!r}"


@pytest.mark.parametrize("name", list(ATTACKS))
def test_an_attack_says_whether_it_looks_at_others(name: str) -> None:
    attack = ATTACKS[name]()
    updates, bad = torch.randn(7, 20, generator=torch.Generator().manual_seed(0)), torch.arange(7) < 3
    if not isinstance(attack, ReplyAttack):
        assert not attack.uses_knowledge
        return
    own, full = (attack(updates, bad, k, np.random.default_rng(0)) for k in ("own", "full"))
    assert torch.equal(own.nan_to_num(), full.nan_to_num()) != attack.uses_knowledge


# ---------------------------------------------------------------- one by one


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(x)
        return logits


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"severity": 3}, "severity=3 would change nothing: no corruption"),
        ({"knowledge": "own"}, "knowledge='own' would change nothing: everybody is honest"),
        ({"attackers": "1"}, "attackers='1' would change nothing"),
        ({"attack": "sf", "knowledge": "own"}, "knowledge='own' would change nothing: attack sf does not look"),
        ({"attack": "sf", "attackers": "1", "malicious": 0.5}, "malicious=0.5 would change nothing: attackers=1 says"),
        ({"method": "fedcap", "rule": "krum"}, "rule='krum' would change nothing: every client's model is mixed"),
        ({"method": "local", "rule": "krum"}, "rule='krum' would change nothing"),
        ({"method": "co-pfl", "momentum": 0.9}, "momentum=0.9 would change nothing"),
        ({"head": "head"}, "head='head' would change nothing: the method shares whole models"),
        ({"buffers": "average"}, "buffers='average' would change nothing: MLP keeps no statistics"),
        ({"optimiser": "adam", "momentum": 0.9}, "momentum=0.9 goes with optimiser sgd"),
        ({"data_dir": "/tmp"}, "data_dir='/tmp' would change nothing"),
        ({"partition": "iid"}, "partition='iid' would change nothing: every client brings its own"),
    ],
)
def test_what_would_change_nothing_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        fk.run(clients=LISTS, **{**BASE, **given})


def test_what_asks_for_nothing_is_not() -> None:
    fk.run(
        "local",
        clients=LISTS,
        **{**BASE, "rounds": 1},
        rule="mean",
        malicious=0,
        momentum=0,
        shift=None,
        checkpoint_every=0,
        data_dir=None,
        partition="natural",
        attack="none",
    )


def test_a_network_and_its_name() -> None:
    values = {k: v for k, v in BASE.items() if k != "model"}
    data = request(clients=LISTS).objects["data"]
    with pytest.raises(UsageError, match="model='mlp' would change nothing: the network is given as an object"):
        prepare(make_config({**values, "model": "mlp"}), model=Normed(), data=data)
    network = Normed()
    one, two = (fk.run(clients=LISTS, model=network, buffers="local", init=i, **values) for i in ("seed", "given"))
    assert one.config.model == "Normed"
    assert differs(one._rows, two._rows)
    with pytest.raises(UsageError, match="init='given'"):
        fk.run(clients=LISTS, init="given", **BASE)
