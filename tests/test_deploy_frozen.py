"""A network with frozen parts on a real site: the frozen weights travel once, or never, and learn nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("httpx")

from test_deploy_worker import Told

from fedkin.deploy.trunk import as_values, frozen_of, trunk_hash
from fedkin.models import MODELS, ModelEntry, lora
from fedkin.use.model_file import load as load_model


def half_frozen(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes))
    network[1].requires_grad_(False)
    return network


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    monkeypatch.setitem(MODELS._entries, "half-frozen", ModelEntry(half_frozen, "for this test", "none"))
    return Told(tmp_path, "fedavg", model="half-frozen")


def test_who_has_the_frozen_weights_is_not_sent_them(told: Told, tmp_path: Path) -> None:
    assert told.join(frozen=trunk_hash(frozen_of(told.job.model))).fields["kind"] == "joined"
    assert not (tmp_path / "site" / "trunks").exists()
    model = told.job.method.model
    assert model.numel() == 170  # 16 x 10 + 10 of 1,210
    assert told.call("train", 0, model=model).values["model"].shape == (1, 170)  # type: ignore[union-attr]
    told.call("report", 1, -1, model=model)
    kept = load_model(tmp_path / "site" / "runs" / "run-1" / "personal.safetensors").module
    assert torch.equal(kept[1].weight, told.job.model[1].weight)  # type: ignore[index]
    assert torch.equal(kept[3].weight.flatten(), model[:160])  # type: ignore[index]


def test_who_lacks_the_frozen_weights_is_sent_them_once_and_keeps_them(told: Told, tmp_path: Path) -> None:
    with torch.no_grad():
        told.job.model[1].weight += 1.0  # type: ignore[index,operator]
    wanted, values = trunk_hash(frozen_of(told.job.model)), as_values(told.job.model)
    assert told.join(frozen=wanted).fields["kind"] == "lacking"
    assert told.worker.joined is None
    answer = told.join(frozen=wanted, values=values)
    assert answer.fields["kind"] == "joined"
    assert "the frozen weights (0.0 MB) came from the server and are kept" in answer.fields["remark"]
    assert told.worker.joined is not None
    network = told.worker.joined.network
    assert torch.equal(network[1].weight, told.job.model[1].weight)  # type: ignore[index]
    again = told.join(attempt=2, frozen=wanted)  # the values did not come with it
    assert again.fields["kind"] == "joined"
    assert "are those of an earlier run" in again.fields["remark"]
    kept = next((tmp_path / "site" / "trunks").iterdir())
    assert kept.stat().st_mode & 0o077 == 0
    kept.write_bytes(b"damaged")
    assert told.join(attempt=3, frozen=wanted).fields["kind"] == "lacking"


def test_frozen_weights_that_are_not_those_announced_are_refused(told: Told, tmp_path: Path) -> None:
    with torch.no_grad():
        told.job.model[1].weight += 1.0  # type: ignore[index,operator]
    wanted, values = trunk_hash(frozen_of(told.job.model)), as_values(told.job.model)
    other = {**values, "frozen:1.bias": values["frozen:1.bias"] + 1}
    assert "not those that the server announced" in told.join(frozen=wanted, values=other).fields["reason"]
    strange = {**values, "frozen:9.bias": values["frozen:1.bias"]}
    assert "do not fit this site's network" in told.join(frozen=wanted, values=strange).fields["reason"]
    for odd in ("", "others", 7, "../" * 21 + "a", "G" * 64):
        assert "are not frozen alike" in told.join(frozen=odd, values=values).fields["reason"]
    assert not (tmp_path / "site" / "trunks").exists()


def test_a_site_without_frozen_parts_refuses_those_of_a_server(tmp_path: Path) -> None:
    told = Told(tmp_path, "fedavg", model="mlp")
    assert "are not frozen alike" in told.join(frozen="0" * 64).fields["reason"]


def test_the_hash_tells_names_shapes_and_values_apart() -> None:
    a = {"x": torch.zeros(2, 3), "y": torch.ones(1)}
    assert trunk_hash(a) == trunk_hash(dict(reversed(a.items())))
    others = [{**a, "x": torch.zeros(3, 2)}, {"z": a["x"], "y": a["y"]}, {**a, "y": -a["y"]}, {"x": a["x"]}]
    assert len({trunk_hash(o) for o in [a, *others]}) == 5
    assert trunk_hash({}) == ""


def low_rank(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    return lora(half_frozen(shape, classes, vocabulary), 2, head="3")


def test_low_rank_updates_travel_without_their_trunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS._entries, "low-rank", ModelEntry(low_rank, "for this test", "none"))
    told = Told(tmp_path, "fedper", model="low-rank")
    assert told.join(frozen=trunk_hash(frozen_of(told.job.model))).fields["kind"] == "joined"
    body = told.job.method.body  # type: ignore[attr-defined]
    assert body.numel() == 2 * (64 + 16)
    assert told.call("train", 0, body=body).values["body"].shape == (1, 160)  # type: ignore[union-attr]
