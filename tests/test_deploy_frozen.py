"""A registered network with frozen parts on a real site: built there, not sent, and whole in the site's model file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("httpx")

from test_deploy_worker import Told

from fedkin.compute.program import frozen_digest
from fedkin.models import MODELS, ModelEntry
from fedkin.use.model_file import load as load_model


def half_frozen(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, classes))
    network[1].requires_grad_(False)
    return network


def test_frozen_parameters_are_built_on_the_site_and_kept_in_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS._entries, "half-frozen", ModelEntry(half_frozen, "for this test", "none"))
    told = Told(tmp_path, "fedavg", model="half-frozen")
    digest = frozen_digest(told.job.model, told.job.site.layout)
    assert "frozen parameters of half-frozen are not the server's" in told.join(frozen="others").fields["reason"]
    assert told.join(frozen=digest).fields["kind"] == "joined"
    model = told.job.method.model
    assert model.numel() == 170  # 16 x 10 + 10 of 1,210
    assert told.call("train", 0, model=model).values["model"].shape == (1, 170)  # type: ignore[union-attr]
    told.call("report", 1, -1, model=model)
    kept = load_model(tmp_path / "site" / "runs" / "run-1" / "personal.safetensors").module
    assert torch.equal(kept[1].weight, told.job.model[1].weight)  # type: ignore[index]
    assert torch.equal(kept[3].weight.flatten(), model[:160])  # type: ignore[index]
