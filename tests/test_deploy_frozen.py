"""A network with frozen parts on a real site: the frozen weights travel once, or never, and learn nowhere."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import nn

pytest.importorskip("httpx")

from test_deploy_worker import Told

from fedkin.deploy.greeting import Facts
from fedkin.deploy.link import Arrived
from fedkin.deploy.sites import Sites
from fedkin.deploy.trunk import as_values, frozen_of, trunk_hash
from fedkin.deploy.wire import pack, unpack
from fedkin.errors import UsageError
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
    sound = kept.read_bytes()
    flipped = sound[:-9] + bytes([sound[-9] ^ 1]) + sound[-8:]  # a file like any other, with another value
    for damaged in (b"damaged", b"", sound[:-1], flipped, sound + bytes(2 << 20)):
        kept.write_bytes(damaged)
        assert told.join(attempt=3, frozen=wanted).fields["kind"] == "lacking"
    assert told.join(attempt=3, frozen=wanted, values=values).fields["kind"] == "joined"
    assert kept.read_bytes() == sound


def test_frozen_weights_that_are_not_those_announced_are_refused(told: Told, tmp_path: Path) -> None:
    with torch.no_grad():
        told.job.model[1].weight += 1.0  # type: ignore[index,operator]
    wanted, values = trunk_hash(frozen_of(told.job.model)), as_values(told.job.model)
    right = frozen_of(told.job.model)
    nan = {**right, "1.bias": right["1.bias"] * torch.nan}
    large = torch.zeros(64 * 16 * 4 + 16 * 4 + (1 << 20) + 1, dtype=torch.uint8)
    many = {**right, **{f"x{i}": torch.zeros(0) for i in range(20_000)}}
    bomb = torch.tensor(list((1 << 40).to_bytes(8, "little")), dtype=torch.uint8)  # a header of a terabyte
    for sent, why in [
        (file_of({**right, "1.bias": right["1.bias"] + 1}), "not those that the server announced"),
        (file_of({**right, "9.bias": right["1.bias"]}), "do not fit this site's network"),
        (file_of({**right, "1.bias": right["1.bias"].double()}), "do not fit this site's network"),
        (file_of({**right, "1.bias": right["1.bias"][None]}), "do not fit this site's network"),
        (file_of({"1.bias": right["1.bias"]}), "do not fit this site's network"),
        (file_of(many), "this site's network has 4160"),
        (large, "this site's network has 4160"),
        (bomb, "cannot be read"),
        (file_of(right)[:-1], "cannot be read"),
        (file_of(right).float(), "are no file of values"),
        (file_of(right)[None], "are no file of values"),
        ("../trunk", "are no file of values"),
    ]:
        reply = told.join(frozen=wanted, values={"frozen": sent})
        assert why in reply.fields["reason"], (why, reply.fields)
    assert "not all finite" in told.join(frozen=trunk_hash(nan), values={"frozen": file_of(nan)}).fields["reason"]
    assert told.join(frozen=wanted, values={"frozen:1.bias": right["1.bias"]}).fields["kind"] == "lacking"
    for odd in ("", "others", 7, "../" * 21 + "a", "G" * 64):
        assert "are not frozen alike" in told.join(frozen=odd, values=values).fields["reason"]
    assert not (tmp_path / "site" / "trunks").exists()


class Post:
    """A link on which everything that is pushed stays."""

    limit = 1 << 20

    def __init__(self, sites: int) -> None:
        self.sites, self.sent = sites, list[dict[str, bytes]]()

    def nodes(self) -> dict[int, str | None]:
        return dict.fromkeys(range(self.sites))

    def push(self, node: int, parcels: dict[str, bytes], seconds: float) -> str:
        self.sent.append(parcels)
        return f"ticket-{len(self.sent)}"


def test_a_site_that_lacks_the_weights_for_ever_is_left_out() -> None:
    """And many that lack them share one copy of them in the server's memory."""
    post, lines, made = Post(2), list[str](), list[int]()
    sites = Sites(post, lines.append)  # type: ignore[arg-type]
    fact = {"samples": 10, "tests": None, "shape": [4], "dtype": "float32", "labels": [0, 1]}
    facts = [Facts.of({**fact, "site": name}) for name in ("lima", "oslo")]
    sites._nodes = {"lima": 0, "oslo": 1}

    def trunk() -> dict[str, torch.Tensor]:
        made.append(1)
        return {"frozen": torch.zeros(1000, dtype=torch.uint8)}

    sites.fix_clients(facts, "run-1", 1, lambda place: ({}, {}), trunk)
    assert [set(p) for p in post.sent] == [{"own"}, {"own"}]
    lacking = Arrived("t", pack({}, {"kind": "lacking", "frozen": "0" * 64}))
    for _ in range(5):
        sites._hear(0, "join", lacking, "lima")
    sites._hear(1, "join", lacking, "oslo")
    with_trunk = [p["all"] for p in post.sent if "all" in p]
    assert len(with_trunk) == 3 + 1
    assert all(one is with_trunk[0] for one in with_trunk)
    assert made == [1]
    assert "which it was sent 3 times" in sites.trouble["lima"]
    assert "oslo" not in sites.trouble


def file_of(values: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.frombuffer(bytearray(save({n: v.contiguous().clone() for n, v in values.items()})), dtype=torch.uint8)


def test_a_hundred_trunks_do_not_fill_a_disk(told: Told, tmp_path: Path) -> None:
    """Every run may come with another one: the four that were used last stay."""
    seen = []
    for number in range(7):
        with torch.no_grad():
            told.job.model[1].weight += 1.0  # type: ignore[index,operator]
        seen.append(trunk_hash(frozen_of(told.job.model)))
        values = as_values(told.job.model)
        assert told.join(run=f"run-{number}", frozen=seen[-1], values=values).fields["kind"] == "joined"
        if number in (4, 5):  # used again
            assert told.join(run=f"again-{number}", frozen=seen[2]).fields["kind"] == "joined"
    left = {p.stem for p in (tmp_path / "site" / "trunks").iterdir()}
    assert left == {seen[2], seen[4], seen[5], seen[6]}


def test_a_trunk_of_many_parts_with_long_names_travels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More parameters than a message has room for by name."""

    def deep(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
        inner: nn.Module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(150)))
        for _ in range(12):
            inner = nn.Sequential(OrderedDict([("a_module_with_a_long_name", inner)]))
        inner.requires_grad_(False)
        return nn.Sequential(nn.Flatten(), inner, nn.Linear(64, classes))

    monkeypatch.setitem(MODELS._entries, "deep", ModelEntry(deep, "for this test", "none"))
    told = Told(tmp_path, "fedavg", model="deep")
    with torch.no_grad():
        next(told.job.model.parameters()).add_(1.0)
    wanted = trunk_hash(frozen_of(told.job.model))
    assert told.join(frozen=wanted).fields["kind"] == "lacking"
    assert told.join(frozen=wanted, values=as_values(told.job.model)).fields["kind"] == "joined"


def test_a_site_without_frozen_parts_refuses_those_of_a_server(tmp_path: Path) -> None:
    told = Told(tmp_path, "fedavg", model="mlp")
    assert "are not frozen alike" in told.join(frozen="0" * 64).fields["reason"]


def test_the_hash_tells_names_shapes_and_values_apart() -> None:
    a = {"x": torch.zeros(2, 3), "y": torch.ones(1)}
    assert trunk_hash(a) == trunk_hash(dict(reversed(a.items())))
    others = [{**a, "x": torch.zeros(3, 2)}, {"z": a["x"], "y": a["y"]}, {**a, "y": -a["y"]}, {"x": a["x"]}]
    assert len({trunk_hash(o) for o in [a, *others]}) == 5
    assert trunk_hash({}) == ""


class Several(nn.Module):
    """Gives its scores as somebody else's code wants them, or takes a mask beside its samples."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.head, self.kind = nn.Linear(64, 8), nn.Linear(8, 10), kind

    def forward(self, x: torch.Tensor) -> object:
        features = self.body(x.flatten(1))
        scores = self.head(features)
        return {"dict": {"logits": scores, "loss": None}, "tuple": (scores, features), "odd": {"scores": scores}}[
            self.kind
        ]


class Masked(Several):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> object:  # type: ignore[override]
        return super().forward(x * mask)


@pytest.mark.parametrize("kind", ["dict", "tuple", "odd", "masked"])
def test_outputs_in_a_tuple_or_a_mapping_and_networks_of_two_inputs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Masked("tuple") if kind == "masked" else Several(kind)
    monkeypatch.setitem(MODELS._entries, kind, ModelEntry(lambda *_: made, "for this test", "none"))
    refused = {"odd": "returns a dict with 'scores'", "masked": "cannot take samples of shape .* argument: 'mask'"}
    if kind in refused:  # by the server, before anybody is invited
        with pytest.raises(UsageError, match=refused[kind]):
            Told(tmp_path, "fedper", model=kind)
        return
    told = Told(tmp_path, "fedper", model=kind)
    assert told.join().fields["kind"] == "joined"
    body = told.job.method.body  # type: ignore[attr-defined]
    assert told.call("train", 0, body=body).fields["kind"] == "reply"
    assert told.call("report", 1, -1, body=body).fields["kind"] == "reply"
    kept = load_model(tmp_path / "site" / "runs" / "run-1" / "personal.safetensors")
    assert kept.probabilities(np.zeros((2, 1, 8, 8), np.uint8)).shape == (2, 10)


def low_rank(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    return lora(half_frozen(shape, classes, vocabulary), 2, head="3")


def test_low_rank_updates_travel_without_their_trunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS._entries, "low-rank", ModelEntry(low_rank, "for this test", "none"))
    told = Told(tmp_path, "fedper", model="low-rank")
    assert told.join(frozen=trunk_hash(frozen_of(told.job.model))).fields["kind"] == "joined"
    body = told.job.method.body  # type: ignore[attr-defined]
    assert body.numel() == 2 * (64 + 16)
    fields = {"run": "run-1", "attempt": 1, "phase": "train", "round": 0, "call": 0, "checkpoints": []}
    letter = pack({"body": body}, {"kind": "call", **fields})
    answer = told.worker.answer({"own": letter})
    assert unpack(answer).values["body"].shape == (1, 160)  # type: ignore[union-attr]
    for whole in (letter, answer):  # a mark, the length of the header, the header, and the numbers of the updates
        assert len(whole) == 8 + int.from_bytes(whole[4:8], "little") + 4 * 160
    assert int.from_bytes(answer[4:8], "little") < 250
