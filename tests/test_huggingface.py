"""Data sets of Hugging Face's `datasets`, made in memory: of each client, or one for all, by the types of columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedkin as fk
from fedkin.data import Reading, own_clients, own_whole
from fedkin.data.huggingface import is_huggingface
from fedkin.errors import DataError, UsageError

hf = pytest.importorskip("datasets")
from PIL import Image  # noqa: E402 - comes with the same extra

RNG = np.random.default_rng(0)
ILL = hf.ClassLabel(names=["well", "ill"])  # not in alphabetical order
QUICK: dict[str, Any] = {"rounds": 1, "epochs": 1, "device": "cpu", "way": "each"}


def patients(n: int = 24, **more: Any) -> Any:
    ill = np.arange(n) % 2
    columns = {
        "age": (50 + 10 * ill + RNG.normal(0, 3, n)).tolist(),
        "ward": ["north" if i % 3 else "south" for i in range(n)],
        "stage": (np.arange(n) % 3).tolist(),
        "label": ill.tolist(),
        **more,
    }
    kinds = {"age": hf.Value("float32"), "ward": hf.Value("string"), "stage": hf.ClassLabel(names=["I", "II", "III"])}
    kinds |= {"label": ILL} | {name: hf.Value("string") for name in more}
    return hf.Dataset.from_dict(columns, features=hf.Features(kinds))


def photographs(n: int = 12, size: tuple[int, int] = (9, 6), mode: str = "RGB") -> Any:
    light = np.arange(n) % 2
    pixels = [RNG.normal(200 - 150 * k, 9, (size[1], size[0], 3)).clip(0, 255).astype(np.uint8) for k in light]
    columns = {"image": [Image.fromarray(p).convert(mode) for p in pixels], "kind": light.tolist()}
    kinds = hf.Features({"image": hf.Image(), "kind": hf.ClassLabel(names=["night", "day"])})
    return hf.Dataset.from_dict(columns, features=kinds)


def tokens(n: int = 16, length: int = 7) -> Any:
    ids = RNG.integers(1, 30, (n, length))
    columns = {"input_ids": ids.tolist(), "attention_mask": (ids > 3).astype(int).tolist(), "label": [0, 1] * (n // 2)}
    return hf.Dataset.from_dict(columns)


def test_a_table_is_that_of_the_data_frame() -> None:
    """Numbers, words and classes, with the classes of the label in their own order."""
    sets = {"oslo": patients(), "rome": patients(18)}
    dataset, split = own_clients(sets).split()
    frames = {name: one.to_pandas() for name, one in sets.items()}
    for frame in frames.values():
        frame["label"] = np.array(["well", "ill"])[frame["label"]]
        frame["stage"] = np.array(["I", "II", "III"])[frame["stage"]]
    same, split_of_frames = own_clients(frames).split()
    assert dataset.columns == same.columns == ("age", "ward=north", "ward=south", "stage=I", "stage=II", "stage=III")
    assert (dataset.x == same.x).all()
    assert (dataset.class_names, same.class_names) == (("well", "ill"), ("ill", "well"))
    assert (dataset.y == 1 - same.y).all()
    assert split.names == split_of_frames.names == ("oslo", "rome")


def test_it_trains_and_predicts_the_same_as_in_training() -> None:
    sets = [patients(40), patients(40)]
    result = fk.run("fedper", clients=sets, model="mlp", scale="local", **QUICK | {"rounds": 4, "lr": 0.1})
    assert result.accuracy.macro > 90
    new = patients(6)
    said = result.predict(new.remove_columns("label"), 1)
    assert said.tolist() == ["well", "ill"] * 3
    frame = new.to_pandas().drop(columns="label")
    frame["stage"] = np.array(["I", "II", "III"])[frame["stage"]]
    assert said.tolist() == result.predict(frame, 1).tolist()
    with pytest.raises(DataError, match="column 'label' is not in the model"):
        result.predict(new, 1)


def test_a_class_that_nobody_has_keeps_its_place() -> None:
    kinds = hf.Features({"a": hf.Value("float32"), "label": hf.ClassLabel(names=["none", "x", "y"])})
    one = hf.Dataset.from_dict({"a": [1.0, 2.0, 3.0, 4.0], "label": [1, 2, 1, 2]}, features=kinds)
    dataset, _ = own_clients([one]).split()
    assert (dataset.class_names, dataset.classes, dataset.y.tolist()) == (("none", "x", "y"), 3, [1, 2, 1, 2])
    numbered = hf.ClassLabel(names=["10", "9"])  # numbers as names, which elsewhere would be sorted
    dataset, _ = own_clients(
        [one.cast_column("label", hf.Value("int64")).map(_less).cast_column("label", numbered)]
    ).split()
    assert (dataset.class_names, dataset.y.tolist()) == (("10", "9"), [0, 1, 0, 1])


def _less(row: dict[str, Any]) -> dict[str, Any]:
    return {"label": row["label"] - 1}


def test_missing_values_are_those_of_a_table() -> None:
    one = patients(8).map(lambda row, i: {"age": None if i == 2 else row["age"]}, with_indices=True)
    with pytest.raises(DataError, match=r"client 'client-0': column 'age' has no value in row 2; impute="):
        fk.run("fedavg", clients=[one], **QUICK)
    result = fk.run("fedavg", clients=[one, patients(8)], impute="federated", **QUICK)
    assert "1 missing, filled (federated mean)" in result.prepared.columns[0]


def test_one_data_set_for_all_by_a_column() -> None:
    whole = patients(24, site=["a", "b", "b", "b"] * 6)
    result = fk.run("fedavg", data=whole, client_column="site", **QUICK)
    assert [(c.name, c.train_samples + c.test_samples) for c in result.per_client] == [("a", 6), ("b", 18)]
    frame = own_whole(whole.to_pandas(), Reading(client_column="site"))
    both = [own_whole(whole, Reading(client_column="site")).split()[1], frame.split()[1]]  # type: ignore[union-attr]
    assert both[0].hash == both[1].hash


def test_one_data_set_dealt_by_a_partition() -> None:
    result = fk.run("fedavg", data=patients(40), clients=4, partition="dirichlet:1", seed=3, **QUICK)
    assert sum(c.train_samples + c.test_samples for c in result.per_client) == 40
    again = fk.run("fedavg", data=photographs(24), label="kind", clients=2, partition=fk.iid(), **QUICK)
    assert again.personal(0).names == ("night", "day")


def test_splits_are_kept() -> None:
    """Of a client, and by a column; where a partition would mix them, that is said."""
    split = hf.DatasetDict(train=patients(20), test=patients(6))
    dataset, made = own_clients({"oslo": split, "rome": patients(8)}).split()
    assert [len(rows) for rows in made.train] == [20, 6]
    assert made.test[0].tolist() == list(range(20, 26))
    assert (dataset.x[made.test[0], 0] == np.asarray(split["test"]["age"][:], np.float32)).all()
    sites = hf.DatasetDict(train=patients(12, site=["a", "b", "c"] * 4), test=patients(4, site=["a", "a", "b", "a"]))
    _, made = own_whole(sites, Reading(client_column="site")).split()  # type: ignore[union-attr]
    assert made.names == ("a", "b", "c")
    assert [(len(a), len(b)) for a, b in zip(made.train, made.test, strict=True)] == [(4, 3), (4, 1), (4, 0)]
    with pytest.raises(UsageError, match=r"split into train and test, and a partition deals all.*concatenate_datasets"):
        fk.run("fedavg", data=split, clients=2, partition="iid", **QUICK)
    only = fk.run("fedavg", data=hf.DatasetDict(train=patients(20)), clients=2, partition="iid", **QUICK)
    assert len(only.per_client) == 2
    with pytest.raises(UsageError, match=r"test_share=0\.5 would change nothing: every client brings its own test"):
        fk.run("fedavg", clients=[split, split], test_share=0.5, **QUICK)


def test_images() -> None:
    sets = [photographs(), hf.DatasetDict(train=photographs(), test=photographs(6))]
    result = fk.run("fedper", clients=sets, label="kind", model="mlp", **QUICK)
    assert result.personal(0).samples.shape == (3, 6, 9)
    assert result.per_client[1].test_samples == 6
    assert result.predict(photographs(4).remove_columns("kind"), 0).shape == (4,)
    small = fk.run("fedavg", clients=[photographs(), photographs(8, (12, 12), "L")], label="kind", model="mlp",
                   image_size="4x5", image_mode="grey", **QUICK)  # fmt: skip
    assert small.personal(0).samples.shape == (1, 4, 5)
    first = np.asarray(sets[0][0]["image"])
    dataset, _ = own_clients(sets, Reading("kind")).split()
    assert (dataset.x[0] == first.transpose(2, 0, 1)).all()


class Rated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(30, 8), nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        weight = attention_mask.unsqueeze(-1).float()
        return self.head((self.words(input_ids) * weight).sum(1) / weight.sum(1).clamp(min=1))


def test_sequences_are_arrays_by_name() -> None:
    result = fk.run("fedper", clients=[tokens(), tokens(20)], model=Rated, **QUICK)
    assert [(p.name, p.shape, p.dtype) for p in result.personal(0).samples.parts] == [
        ("input_ids", (7,), "int64"),
        ("attention_mask", (7,), "int64"),
    ]
    assert result.predict(tokens(4).remove_columns("label"), 0).shape == (4,)
    shown = tokens().with_format("torch", columns=["input_ids", "label"])
    dataset, _ = own_clients([shown]).split()
    assert [p.name for p in dataset.parts] == ["input_ids"]  # what the data set shows, and nothing else


def test_one_sequence_of_numbers_is_one_array() -> None:
    values = RNG.normal(size=(10, 3, 2)).astype(np.float32)
    kinds = hf.Features({"series": hf.Array2D((3, 2), "float32"), "label": hf.Value("int64")})
    one = hf.Dataset.from_dict({"series": values, "label": [0, 1] * 5}, features=kinds)
    dataset, _ = own_clients([one]).split()
    assert (dataset.x == values).all()
    assert not dataset.parts


@pytest.mark.parametrize(
    ("task", "label", "shape"),
    [("multi-label", [[0, 1, 1], [1, 0, 0]] * 6, (12, 3)), ("regression", [0.5, 1.5] * 6, (12, 1))],
)
def test_other_targets(task: Any, label: list[Any], shape: tuple[int, ...]) -> None:
    one = hf.Dataset.from_dict({"x": RNG.normal(size=(12, 4)).tolist(), "y": label})
    kind: Any = {"multi-label": "labels", "regression": "numbers"}[task]
    dataset, _ = own_clients([one], Reading("y", targets=kind)).split()
    assert dataset.y.shape == shape
    network = nn.Linear(4, shape[1])
    assert fk.run("fedavg", clients=[one, one], label="y", task=task, model=network, **QUICK).score.macro >= 0


def test_a_run_goes_on_with_the_same_data(tmp_path: Path) -> None:
    whole = patients(24, site=["a", "b"] * 12)
    told = {"client_column": "site", "runs_dir": str(tmp_path), "checkpoint_every": 1}
    result = fk.run("fedavg", data=whole, **told, **QUICK)
    more = fk.resume(str(result.run), data=whole, rounds=2)
    assert [r.round for r in more.history] == [1, 2]
    with pytest.raises(DataError, match="cannot go on"):
        fk.resume(str(result.run), data=patients(24, site=["a", "b"] * 12), rounds=3)
    late = fk.join(result, clients={"c": patients(10)})
    assert late.personal("c").names == ("well", "ill")


def custom() -> Any:
    return patients().with_transform(lambda batch: batch)


def two_orders() -> list[Any]:
    return [patients(), patients().cast_column("label", hf.Value("int64")).cast_column("label", hf.ClassLabel(2))]


@pytest.mark.parametrize(
    ("clients", "settings", "said"),
    [
        (lambda: [patients().remove_columns("label")], {}, "client 'client-0': expected a column 'label', found age"),
        (lambda: [patients()], {"label": "kind"}, "expected a column 'kind', found age, ward, stage, label"),
        (lambda: [patients().to_iterable_dataset()], {}, "is a stream of samples"),
        (lambda: [custom()], {}, r"set_transform.*data.map"),
        (lambda: [patients().select([])], {}, "client 'client-0' has no samples"),
        (lambda: hf.DatasetDict(train=patients(), test=patients()), {}, "is a data set in splits: give data="),
        (lambda: [hf.DatasetDict(train=patients(), dev=patients())], {}, "has the splits 'train', 'dev'"),
        (lambda: [patients()], {"image_size": "8"}, "image_size='8' would change nothing"),
        (lambda: [photographs()], {"label": "kind", "impute": "local"}, "impute='local' would change nothing"),
        (lambda: [photographs(), photographs(size=(6, 9))], {"label": "kind"}, "they must be alike"),
        (lambda: [photographs().add_column("place", ["x"] * 12)], {"label": "kind"}, "beside the images 'image' there"),
        (lambda: [photographs().cast_column("image", hf.Image(decode=False))], {"label": "kind"}, "holds no image"),
        (lambda: [hf.Dataset.from_dict({"x": [[1.0], [1.0, 2.0]], "label": [0, 1]})], {}, "pad them to one length"),
        (lambda: [hf.Dataset.from_dict({"x": [{"a": 1}], "label": [0]})], {}, "column 'x' is of the type"),
        (two_orders, {}, r"the classes of client 'client-0' are 'well', 'ill', those of client 'client-1' '0', '1'"),
        (lambda: [patients().map(lambda row: {"label": -1})], {}, r"no label in row 0 \('None'\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said(clients: Callable[[], Any], settings: dict[str, Any], said: str) -> None:
    with pytest.raises((DataError, UsageError), match=said):
        fk.run("fedavg", clients=clients(), **settings, **QUICK)


def test_whose_rows_they_are_has_to_be_known() -> None:
    with pytest.raises(UsageError, match=r"client_column='city': the data set has no such column; it has age, ward"):
        fk.run("fedavg", data=patients(), client_column="city", **QUICK)
    lonely = hf.DatasetDict(train=patients(4, site=["a"] * 4), test=patients(2, site=["b"] * 2))
    with pytest.raises(DataError, match="client 'b' has test samples, and none for training"):
        fk.run("fedavg", data=lonely, client_column="site", **QUICK)


def test_other_things_are_none() -> None:
    assert is_huggingface(patients())
    assert is_huggingface(hf.DatasetDict(train=patients()))
    assert not any(map(is_huggingface, (pd.DataFrame({"a": [1]}), {}, {"a": 1}, [1], None, torch.zeros(2))))
