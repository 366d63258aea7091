"""Personal model files: what is written comes back, what is wrong is refused, and predictions are the network's."""

from __future__ import annotations

import csv
import json
import random
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.data import load as load_data
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.models import MODELS, Samples, build
from fedkin.rounds import inference
from fedkin.use import model_file
from fedkin.use.model_file import Card, Personal, load, read_card, save
from fedkin.use.predict import predict, read_samples

SAMPLES: dict[str, tuple[str, tuple[int, ...], int]] = {
    "cnn-512": ("uint8", (3, 16, 16), 0),
    "fedcap-cifar": ("uint8", (3, 16, 16), 0),
    "fedcap-emnist": ("uint8", (1, 16, 16), 0),
    "harcnn": ("float32", (3, 1, 32), 0),
    "mlp": ("float32", (6,), 0),
    "linear": ("float32", (6,), 0),
    "fasttext": ("int64", (12,), 50),
    "resnet18": ("uint8", (3, 16, 16), 0),
    "resnet18-cifar": ("uint8", (3, 8, 8), 0),
}
OF_TOKENS = ("char-lstm", "char-lstm-small")


def samples(name: str, n: int = 5) -> np.ndarray[Any, Any]:
    kind, shape, vocabulary = SAMPLES[name]
    rng = np.random.default_rng(1)
    if kind == "float32":
        return rng.standard_normal((n, *shape)).astype(np.float32)
    return rng.integers(0, vocabulary or 256, (n, *shape)).astype(kind)


def card(name: str, classes: int = 4) -> Card:
    kind, shape, vocabulary = SAMPLES[name]
    return Card(
        name,
        shape,
        classes,
        kind,
        vocabulary,
        head="head",
        mean=0.3,
        std=0.7,
        method="fedcap",  # type: ignore[arg-type]
        run="r1",
        site="siteA",
        round=7,
        seed=3,
    )


def network(name: str, classes: int = 4) -> nn.Module:
    """Not as it is built: every number, statistics too, is moved."""
    _, shape, vocabulary = SAMPLES[name]
    made = build(name, shape, classes, vocabulary, seed=9).eval()
    with torch.no_grad():
        for value in model_file.tensors_of(made).values():
            value.add_((torch.rand_like(value) - 0.5) * 0.05)
    return made


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save(tmp_path / "personal.safetensors", network("mlp"), card("mlp"))


# ---------------------------------------------------------------- there and back


def test_every_network_is_tried_here() -> None:
    assert {*SAMPLES, *OF_TOKENS} == set(MODELS)


@pytest.mark.parametrize("name", OF_TOKENS)
def test_there_and_back_with_a_score_for_each_position(tmp_path: Path, name: str) -> None:
    model, tokens = build(name, (12,), 20, 20, seed=9).eval(), np.arange(24).reshape(2, 12) % 20
    about = Card(name, (12,), 20, "int64", 20, head="head", targets="tokens")
    back = load(save(tmp_path / "personal.safetensors", model, about))
    with torch.no_grad():
        torch.testing.assert_close(back.outputs(tokens), model(torch.from_numpy(tokens)))


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_there_and_back(tmp_path: Path, name: str) -> None:
    model, x = network(name), samples(name)
    path = save(tmp_path / "deep" / "personal.safetensors", model, card(name))
    back = load(path)
    assert back.card == card(name) == read_card(path)
    assert not back.module.training
    again = {**model.state_dict()}
    for key, value in back.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, again[key], rtol=0, atol=0)
    inputs = torch.from_numpy(x)
    if x.dtype == np.uint8:
        inputs = (inputs.float() / 255 - 0.3) / 0.7
    with torch.no_grad():
        expected = torch.softmax(model(inputs), 1)
    torch.testing.assert_close(torch.from_numpy(back.probabilities(x, batch=2)).float(), expected, rtol=1e-4, atol=1e-6)


def test_only_the_owner_reads_it_and_nothing_else_is_left(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in file.parent.iterdir()] == [file.name]


def test_a_file_is_replaced_whole(file: Path) -> None:
    before = file.read_bytes()
    bad = network("mlp")
    nn.init.constant_(bad.head.bias, float("nan"))  # type: ignore[union-attr, arg-type]
    with pytest.raises(FedKinError, match=r"'head\.bias' holds a value that is not finite"):
        save(file, bad, card("mlp"))
    assert file.read_bytes() == before
    assert [p.name for p in file.parent.iterdir()] == [file.name]


class Own(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.inside = nn.Linear(6, width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.inside(x)))
        return out


def test_own_networks_are_filled_in_but_never_rebuilt(tmp_path: Path) -> None:
    own = Own()
    path = save(tmp_path / "own.safetensors", own, replace(card("mlp"), model=None))
    with pytest.raises(UsageError, match=r"your own network: load it in Python with .*model="):
        load(path)
    back = load(path, Own())
    np.testing.assert_array_equal(
        back.probabilities(samples("mlp")), Personal(back.card, own.eval()).probabilities(samples("mlp"))
    )
    with pytest.raises(DataError, match="wants F32 of shape"):
        load(path, Own(width=5))


# ---------------------------------------------------------------- what is wrong with a file


def rewrite(file: Path, tensors: Any = None, description: Any = None) -> None:
    content = load_file(file)
    described = {"format": 1, **json.loads(_header(file)["fedkin"])}
    content = tensors(content) if tensors else content
    described = description(described) if description else described
    text = described if isinstance(described, str) else json.dumps(described)
    save_file(content, file, metadata={"fedkin": text} if text else None)


def _header(file: Path) -> dict[str, str]:
    raw = file.read_bytes()
    header: dict[str, dict[str, str]] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return header["__metadata__"]


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (lambda t: {k: v for k, v in t.items() if k != "head.bias"}, r"lacks 'head\.bias'"),
        (lambda t: {**t, "extra": torch.zeros(1)}, "has 'extra'"),
        (lambda t: {**t, "head.bias": torch.zeros(5)}, r"'head\.bias' is F32 of shape \(5,\)"),
        (lambda t: {**t, "head.bias": torch.zeros(4, dtype=torch.float64)}, "is F64"),
        (lambda t: {**t, "head.bias": torch.zeros(4, dtype=torch.int64)}, "is I64"),
        (lambda t: {**t, "head.bias": torch.full((4,), float("inf"))}, "not finite"),
        (lambda t: {**t, "head.bias": torch.full((4,), float("nan"))}, "not finite"),
    ],
)
def test_wrong_weights(file: Path, tensors: Any, match: str) -> None:
    rewrite(file, tensors=tensors)
    with pytest.raises(DataError, match=match):
        load(file)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": 2}, "format 2, this FedKin reads 1"),
        ({"format": None}, "format None"),
        ({"model": "os.system"}, "is not known here"),
        ({"model": 5}, "damaged"),
        ({"model": "fasttext"}, "does not make a network"),
        ({"shape": [1_000_000, 1_000_000]}, "the network wants"),
        ({"shape": [2**62, 2**62]}, "damaged"),
        ({"shape": [-1]}, "damaged"),
        ({"shape": "abc"}, "damaged"),
        ({"shape": []}, "damaged"),
        ({"classes": 0}, "damaged"),
        ({"classes": 1_000_000}, "the network wants"),
        ({"classes": True}, "damaged"),
        ({"class_names": ["a"]}, "damaged"),
        ({"class_names": [1, 2, 3, 4]}, "damaged"),
        ({"std": 0}, "damaged"),
        ({"mean": "x"}, "damaged"),
        ({"kind": "object"}, "damaged"),
        ({"kind": []}, "damaged"),
        ({"site": "x" * 2000}, "damaged"),
        ({"unheard": 1}, "damaged"),
    ],
)
def test_wrong_descriptions(file: Path, change: dict[str, Any], match: str) -> None:
    rewrite(file, description=lambda d: {**d, **change})
    with pytest.raises(DataError, match=match):
        load(file)


@pytest.mark.parametrize("text", ["not json", "[]", "[" * 100_000, "{}", '{"format": 1}', "x" * (2 << 20)])
def test_no_description_at_all(file: Path, text: str) -> None:
    rewrite(file, description=lambda d: text)
    with pytest.raises(DataError, match="description"):
        load(file)


def test_a_file_of_somebody_else(file: Path) -> None:
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(DataError, match="not FedKin's description"):
        load(file)


@pytest.mark.parametrize("content", [b"", b"\x80\x04K\x01.", b"PK\x03\x04", b"\xff" * 100])
def test_what_is_no_model_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    for read in (load, read_card):
        with pytest.raises(DataError, match="no safetensors file"):
            read(path)
    with pytest.raises(UsageError, match="no such model file"):
        load(tmp_path / "missing")


def test_a_file_cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(DataError, match="damaged"):
        load(file)


def test_damage_anywhere_is_refused_in_words(file: Path) -> None:
    """Whatever bytes are in a file: a model with finite numbers, or an error that FedKin words itself."""
    raw, rng = file.read_bytes(), random.Random(0)
    described = 8 + int.from_bytes(raw[:8], "little")
    refused = 0
    for _ in range(400):
        content = bytearray(raw)
        for _ in range(rng.choice((1, 2, 5))):
            place = rng.randrange(described if rng.random() < 0.9 else len(raw))
            content[place] = rng.choice(b'0123456789",:{}[]e.-') if rng.random() < 0.5 else rng.randrange(256)
        file.write_bytes(bytes(content[: rng.randrange(len(raw))] if rng.random() < 0.1 else content))
        try:
            load(file)
        except FedKinError:
            refused += 1
    assert 200 < refused < 400


# ---------------------------------------------------------------- predictions


def fixed(logits: list[list[float]], **facts: Any) -> Personal:
    """A model whose answers are the samples themselves."""
    n = len(logits[0])
    return Personal(Card(None, (n,), n, **facts), nn.Identity())


def test_predictions_by_hand() -> None:
    x = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]], np.float32))
    found = predict(fixed(x.tolist(), class_names=("cat", "dog", "owl")), x, np.array(["cat", "dog"]))
    np.testing.assert_allclose(found.probabilities, [[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]], atol=1e-6)
    assert [p["prediction"] for p in found.to_dict()["predictions"]] == ["cat", "owl"]
    assert found.accuracy == 50.0
    assert found.counts() == {"cat": 1, "owl": 1}


@pytest.mark.parametrize(
    ("names", "labels", "accuracy", "foreign"),
    [
        ((), [0, 2], 100.0, ()),
        (("a", "b", "c"), [0, 2], 100.0, ()),  # numbers of classes that have names
        (("10", "20", "30"), [10, 30], 100.0, ()),
        (("10", "20", "30"), [10, 2], 50.0, ("2",)),
        (("10", "20", "30"), [10.0, 20.0], 50.0, ()),
        (("a", "b", "c"), ["a", "z"], 50.0, ("z",)),
        ((), [0, 3], 50.0, ("3",)),
    ],
)
def test_labels(names: tuple[str, ...], labels: list[Any], accuracy: float, foreign: tuple[str, ...]) -> None:
    x = np.array([[5, 0, 0], [0, 0, 5]], np.float32)
    found = predict(fixed(x.tolist(), class_names=names), x, np.array(labels))
    assert (found.accuracy, found.foreign) == (accuracy, foreign)


def test_no_labels_no_accuracy() -> None:
    assert predict(fixed([[0.0, 1.0]]), np.zeros((3, 2), np.float32)).accuracy is None
    with pytest.raises(DataError, match="3 samples, but labels"):
        predict(fixed([[0.0, 1.0]]), np.zeros((3, 2), np.float32), np.zeros(2))


@pytest.mark.parametrize(
    ("x", "match"),
    [
        (np.zeros((2, 3, 16, 16), np.float32), r"takes pixels \(uint8\)"),
        (np.zeros((2, 3, 8, 8), np.uint8), r"of shape \(3, 8, 8\)"),
        (np.array([["a"]]), "give numbers"),
        (np.zeros((0, 3, 16, 16), np.uint8), "no samples"),
    ],
)
def test_samples_that_do_not_fit(x: Any, match: str) -> None:
    with pytest.raises(DataError, match=match):
        Personal(card("cnn-512"), network("cnn-512")).probabilities(x)


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".parquet"])
def test_files(tmp_path: Path, suffix: str) -> None:
    x, y = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([1, 0, 1])
    path = tmp_path / f"data{suffix}"
    if suffix == ".npz":
        np.savez(path, x=x, y=y)
    else:
        import pandas

        frame = pandas.DataFrame({"a": x[:, 0], "label": y, "b": x[:, 1]})
        frame.to_csv(path, index=False) if suffix == ".csv" else frame.to_parquet(path)
    found, labels = read_samples(path)
    np.testing.assert_array_equal(found, x)
    assert labels is not None
    np.testing.assert_array_equal(labels, y)


def test_files_without_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((2, 2)))
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,4\n")
    assert read_samples(tmp_path / "a.npz")[1] is None
    found, labels = read_samples(tmp_path / "a.csv")
    assert found.tolist() == [[1, 2], [3, 4]]
    assert labels is None


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.csv", "", "no samples"),
        ("a.csv", "a,b\n", "no samples"),
        ("a.csv", "a\nx\n", "not numeric"),
        ("a.txt", "", "give an .npz"),
        ("a.npz", "nothing", "expected an .npz"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, name: str, content: str, match: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(FedKinError, match=match):
        read_samples(tmp_path / name)


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(DataError, match="plain arrays"):
        read_samples(tmp_path / "a.npz")


# ---------------------------------------------------------------- the command, on a model that was trained


def test_command(tmp_path: Path) -> None:
    result = fk.run("fedper", data="digits", clients=3, rounds=2, partition="iid", epochs=1, model="mlp")
    digits = load_data("digits")
    path = save(tmp_path / "personal.safetensors", result.personal(0), Card.of(digits, "mlp", site="client-0"))
    x, y = digits.x[:60], digits.y[:60]
    np.savez(tmp_path / "new.npz", x=x, y=y)

    def fedkin(*words: str, code: int = 0) -> Any:
        outcome = CliRunner().invoke(app, ["predict", "--model", str(path), "--data", *words])
        assert outcome.exit_code == code, outcome.output
        return outcome

    shown = json.loads(fedkin(str(tmp_path / "new.npz"), "--json", "--out", str(tmp_path / "p.csv")).stdout)
    with torch.no_grad():
        logits = result.personal(0).network((torch.from_numpy(x).float() / 255 - digits.mean) / digits.std)
    expected = logits.argmax(1).tolist()
    assert [p["prediction"] for p in shown["predictions"]] == [digits.class_names[i] for i in expected]
    assert shown["accuracy"] == pytest.approx(100 * np.mean(np.array(expected) == y))
    assert shown["model"]["site"] == "client-0"
    with (tmp_path / "p.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [r["prediction"] for r in rows] == [p["prediction"] for p in shown["predictions"]]
    assert sum(float(rows[0][f"p({name})"]) for name in digits.class_names) == pytest.approx(1, abs=1e-4)
    assert "accuracy" in fedkin(str(tmp_path / "new.npz")).output
    np.savez(tmp_path / "wrong.npz", x=x[:, :, :4])
    assert "the data are uint8 of shape (1, 4, 8)" in fedkin(str(tmp_path / "wrong.npz"), code=2).output
    assert "no such data file" in fedkin(str(tmp_path / "missing.npz"), code=2).output


def test_columns_of_a_table_go_by_the_names_the_model_knows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("b,label,a\n2,0,1\n4,1,3\n")
    x, labels = read_samples(tmp_path / "a.csv", columns=("a", "b"))
    assert inference.as_given(x, Samples((2,), "float32", 2, columns=("a", "b"))).tolist() == [[1, 2], [3, 4]]
    assert labels is not None
    assert labels.tolist() == [0, 1]
    for columns, message in ((("a", "c"), "'c' is missing, which the model has"), (("a",), "'b' is not in the model")):
        with pytest.raises(DataError, match=f"a.csv: column {message}"):
            read_samples(tmp_path / "a.csv", columns=columns)


def test_a_model_file_keeps_the_names_of_its_columns(tmp_path: Path) -> None:
    made = Card("mlp", (2,), 3, columns=("a", "b"))
    path = save(tmp_path / "m.safetensors", build("mlp", (2,), 3), made)
    assert load(path).card.columns == ("a", "b")
