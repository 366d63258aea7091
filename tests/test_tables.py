"""Tables with mixed columns: categories become inputs, missing values are filled, numbers standardised, each as asked,
from training samples only; and what a model learnt from is prepared the same way when it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.cli.commands import main  # noqa: F401  registers the commands
from fedkin.config import make_config
from fedkin.data import Brought, Preparing, Reading, own_clients
from fedkin.errors import DataError, UsageError
from fedkin.models.ready import Prepare
from fedkin.preparation import Column, Preparation
from fedkin.rounds import load_data
from fedkin.use.model_file import Card, load, save
from fedkin.use.predict import predict, read_samples

pd = pytest.importorskip("pandas")

SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "device": "cpu", "way": "each", "model": "mlp"}
CITIES = (("oslo", "rome"), ("rome", "lima"), ("oslo", "lima", "bonn"))


def frame(seed: int, cities: tuple[str, ...], rows: int = 24) -> Any:
    rng = np.random.default_rng(seed)
    age, dose = rng.normal(50 + 5 * seed, 9, rows), rng.exponential(1000, rows)
    age[rng.random(rows) < 0.2] = np.nan
    city = rng.choice(np.array(cities, object), rows)
    city[rng.random(rows) < 0.15] = None
    return pd.DataFrame(
        {
            "age": age,
            "city": city,
            "smokes": rng.random(rows) < 0.5,
            "dose": dose,
            "stage": pd.Categorical(rng.choice([1, 2, 10], rows), [1, 2, 10]),
            "label": rng.choice(["ill", "well"], rows),
        }
    )


FRAMES = {f"site{i}": frame(i, cities) for i, cities in enumerate(CITIES)}


def prepared(settings: dict[str, Any], clients: Any = FRAMES) -> Any:
    how = Reading()
    return load_data(make_config({"data": "own", **settings}), brought=Brought(own_clients(clients, how)))


def test_categories_become_one_input_for_each_word_of_any_client() -> None:
    clients = {
        "a": pd.DataFrame({"n": [1, 2], "c": ["x", "y"], "b": [True, False], "label": [0, 1]}),
        "b": pd.DataFrame({"c": ["z", "x"], "n": [3.5, 4], "b": [True, True], "label": [0, 1]}),
    }
    dataset, _ = prepared({}, clients)
    assert dataset.columns == ("n", "c=x", "c=y", "c=z", "b=False", "b=True")
    assert dataset.x.tolist() == [
        [1, 1, 0, 0, 0, 1],
        [2, 0, 1, 0, 1, 0],
        [3.5, 0, 0, 1, 0, 1],
        [4, 1, 0, 0, 0, 1],
    ]
    assert dataset.prepared[1] == "c: a category of 3, 3 inputs, one for each word"


def test_true_is_one_word_however_it_is_written() -> None:
    spellings = (["true", "FALSE", "True"], ["TRUE", "false", None], [True, False, True])
    clients = {str(k): pd.DataFrame({"b": b, "label": [0, 1, 0]}) for k, b in enumerate(spellings)}
    assert prepared({"impute": "local"}, clients)[0].columns == ("b=False", "b=True", "b=(missing)")


def test_numbers_as_categories() -> None:
    clients = {k: pd.DataFrame({"n": [1, 2], "f": f, "label": [0, 1]}) for k, f in (("a", [3, 1]), ("b", [1.0, 7.0]))}
    dataset, _ = prepared({}, clients)
    assert dataset.columns == ("n", "f")
    how = Reading(categories=("f",))
    dataset, _ = own_clients(clients, how).split()
    assert dataset.columns == ("n", "f=1", "f=3", "f=7")
    with pytest.raises(UsageError, match="categories='g': no such column; there are n, f"):
        own_clients(clients, Reading(categories=("g",)))


@pytest.mark.parametrize("which", ["local", "federated"])
def test_fitted_as_scikit_learn_does_on_training_rows(which: str) -> None:
    from sklearn.preprocessing import StandardScaler

    dataset, split = prepared({"impute": which, "scale": which})
    raw = pd.concat(FRAMES.values(), ignore_index=True)
    for name in ("age", "dose"):
        column = dataset.columns.index(name)
        values = raw[name].to_numpy()
        everything = map(np.concatenate, zip(split.train, split.test, strict=True))
        for train, rows in zip(split.train, everything, strict=True):
            fit = train if which == "local" else np.concatenate(split.train)
            scaler = StandardScaler().fit(values[fit][:, None])
            expected = scaler.transform(np.where(np.isnan(values), np.nanmean(values[fit]), values)[:, None])[:, 0]
            assert dataset.x[rows, column] == pytest.approx(expected[rows], rel=1e-5, abs=1e-5)
    missing = raw["city"].isna().to_numpy()
    assert missing.any()
    assert (dataset.x[:, dataset.columns.index("city=(missing)")] == missing).all()
    assert len(dataset.preparations) == (1 if which == "federated" else 3)


def test_median_and_the_most_frequent_word() -> None:
    dataset, split = prepared({"impute": "local:numbers=median,words=frequent"})
    assert not any("missing" in name for name in dataset.columns)
    for (_, one), train, made in zip(FRAMES.items(), split.train, dataset.preparations, strict=True):
        own = one.iloc[train - train.min() + (train.min() % 24)]
        assert made.columns[0].fill == pytest.approx(own["age"].median())
        assert made.columns[1].categories[int(made.columns[1].fill or 0)] == own["city"].mode()[0]
    assert "filled (local median) with" in dataset.prepared[0]


def test_test_rows_have_no_part_in_what_is_fitted() -> None:
    _, split = prepared({"impute": "federated", "scale": "federated"})
    changed = {k: f.copy() for k, f in FRAMES.items()}
    for i, one in enumerate(changed.values()):
        one.loc[split.test[i] - 24 * i, "dose"] = 1e6
    for which in ("local", "federated"):
        settings = {"impute": which, "scale": which}
        assert prepared(settings)[0].preparations == prepared(settings, changed)[0].preparations


def test_one_client_alone_is_the_same_locally_and_federated() -> None:
    one = {"a": FRAMES["site0"]}
    local, federated = (prepared({"impute": w, "scale": w}, one)[0] for w in ("local", "federated"))
    assert (local.x == federated.x).all()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, DataError, "client 'site0': column '(age|city)' has no value in row .*impute='local' .* fills missing"),
        ({"impute": "federated:numbers=median"}, UsageError, "a median of all clients does not follow from sums"),
        ({"impute": "some"}, UsageError, "impute='some': accepts none, local or federated"),
        ({"impute": "local:numbers=mode"}, UsageError, "numbers='mode': accepts mean, median"),
        ({"impute": "none:numbers=mean"}, UsageError, "accepts none, local or federated"),
        ({"scale": "all"}, UsageError, "scale='all': accepts none, local, federated"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        prepared(settings)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"age": ["x", "y"], "label": [0, 1]}, "'b': column 'age' is not numeric, but it is in client 'a'"),
        (
            {"age": [1, "y"], "label": [0, 1]},
            r"'b': column 'age' is not numeric \(row 1: 'y'\), but holds numbers, too",
        ),
        ({"age": [1, float("inf")], "label": [0, 1]}, "'b': column 'age' holds a value that is not finite in row 1"),
        ({"age": [[1], [2]], "label": [0, 1]}, "'b': column 'age' is not numeric .a nested value"),
        ({"age": [1, 2], "label": [0, None]}, "'b': label nan is not a class .row 1"),
        ({"age": [1, 2], "label": [0, 1.5]}, "'b': label 1.5 is not a class .row 1"),
        ({"size": [1, 2], "label": [0, 1]}, "'b': column 'age' is missing"),
        ({"age": [], "label": []}, "client 'b' has no samples"),
    ],
)
def test_a_client_whose_table_does_not_fit_is_named(other: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        fk.run(clients={"a": pd.DataFrame({"age": [1, 2], "label": [0, 1]}), "b": pd.DataFrame(other)}, **SMALL)


def test_a_client_without_any_value_of_a_column() -> None:
    clients = {k: f.copy() for k, f in FRAMES.items()}
    clients["site1"]["age"] = np.nan
    with pytest.raises(DataError, match=r"client 'site1' has no value of column 'age' among the training .*federated"):
        prepared({"impute": "local"}, clients)
    assert np.isfinite(prepared({"impute": "federated"}, clients)[0].x).all()
    for one in clients.values():
        one["age"] = None
    with pytest.raises(DataError, match="column 'age' has no value in any row; leave it out"):
        prepared({"impute": "federated"}, clients)


def test_too_many_words_are_refused() -> None:
    rows = 1200
    one = pd.DataFrame(
        {"name": [f"n{i}" for i in range(rows)], "v": range(rows), "label": [i % 2 for i in range(rows)]}
    )
    with pytest.raises(DataError, match="column 'name' has 1,200 different words"):
        prepared({}, [one])


def test_settings_that_no_column_needs_are_refused() -> None:
    x, y = np.zeros((8, 3), np.float32), np.arange(8) % 2
    for name, value in (("impute", "local"), ("scale", "federated"), ("label", "kind"), ("categories", "a")):
        with pytest.raises(UsageError, match=rf"{name}='{value}' would change nothing: the data are no tables"):
            fk.run(clients=[(x, y)] * 2, **SMALL, **{name: value})
    words = pd.DataFrame({"c": ["x", "y"], "label": [0, 1]})
    with pytest.raises(UsageError, match="scale='local' would change nothing: the table has no column of numbers"):
        fk.run(clients=[words, words], scale="local", **SMALL)


# ---------------------------------------------------------------- ways in


def test_frames_a_frame_with_clients_items_and_files_are_the_same(tmp_path: Path) -> None:
    settings = {**SMALL, "impute": "federated", "scale": "local"}
    expected = fk.run("fedavg", clients=FRAMES, **settings)
    whole = pd.concat([f.assign(who=k) for k, f in FRAMES.items()], ignore_index=True)
    whole.to_csv(tmp_path / "all.csv", index=False)
    whole.to_parquet(tmp_path / "all.parquet", index=False)
    (tmp_path / "sites").mkdir()
    for name, one in FRAMES.items():
        one.to_csv(tmp_path / "sites" / f"{name}.csv", index=False)
    items = {k: f.astype(object).to_dict("records") for k, f in FRAMES.items()}
    ways: list[dict[str, Any]] = [
        {"data": whole, "client_column": "who"},
        {"data": str(tmp_path / "all.parquet"), "client_column": "who"},
        {"data": str(tmp_path / "all.csv"), "client_column": "who", "categories": "stage"},
        {"data": str(tmp_path / "sites"), "categories": ["stage"]},
        {"clients": items, "categories": "stage"},
    ]
    for way in ways:
        found = fk.run("fedavg", **way, **settings)
        assert [c.name for c in found.per_client] == list(FRAMES)
        assert found.config.partition == "natural"
        assert torch.equal(found._rows, expected._rows), way


def test_a_table_is_dealt_like_any_data_set(tmp_path: Path) -> None:
    whole = pd.concat(FRAMES.values(), ignore_index=True)
    found = fk.run("fedavg", data=whole, clients=4, partition="iid", impute="local", scale="federated", **SMALL)
    assert len(found.per_client) == 4
    assert found.prepared.columns[0].startswith("age: a number, standardised (federated: mean ")
    with pytest.raises(UsageError, match="clients is one data frame: give data=frame and client_column"):
        fk.run("fedavg", clients=whole, **SMALL)
    with pytest.raises(UsageError, match="client_column='who': the data frame has no such column"):
        fk.run("fedavg", data=whole, client_column="who", **SMALL)
    whole.to_csv(tmp_path / "t.csv", index=False)
    done = CliRunner().invoke(
        app,
        ["split", "--data", str(tmp_path / "t.csv"), "--clients", "3", "--partition", "iid", "--impute", "federated"],
    )
    assert done.exit_code == 0, done.output
    assert "smokes: a category of 2" in done.output + done.stderr


def test_a_run_that_goes_on_prepares_the_same(tmp_path: Path) -> None:
    settings = {**SMALL, "rounds": 2, "impute": "local", "scale": "federated", "runs_dir": str(tmp_path)}
    result = fk.run("fedavg", clients=FRAMES, checkpoint_every=1, **settings)
    again = fk.resume(result.run, clients=FRAMES)
    assert torch.equal(result._rows, again._rows)
    kept = json.loads((Path(result.run) / "run.json").read_text())
    assert kept["prepared"]["columns"] == list(result.prepared.columns)


# ---------------------------------------------------------------- in use


@pytest.mark.parametrize("which", ["local", "federated"])
def test_new_samples_are_prepared_as_in_training(which: str, tmp_path: Path) -> None:
    settings = {"impute": which, "scale": which}
    result = fk.run("fedavg", clients=FRAMES, **settings, **SMALL)
    dataset, _ = prepared(settings)
    for number, (name, one) in enumerate(FRAMES.items()):
        new = one.drop(columns="label")
        rows = dataset.x[24 * number : 24 * (number + 1)]
        with torch.no_grad():
            expected = result.personal(name).network(torch.from_numpy(rows)).argmax(1).numpy()
        labels = np.array(["ill", "well"])[expected]
        assert (result.predict(new, name) == labels).all()
        assert (result.predict(new[new.columns[::-1]], name) == labels).all()
        assert (result.predict(new.to_dict("records"), name) == labels).all()
        assert (result.predict(new.to_dict("list"), name) == labels).all()
        assert (result.predict(new.to_numpy(object), name) == labels).all()
        ready = result.personal(name)
        card = Card.of(dataset, "mlp", site=name)
        if which == "local":
            from dataclasses import replace

            card = replace(card, preparation=ready.samples.preparations[0])
        file = save(tmp_path / f"{name}.safetensors", ready, card)
        one.to_csv(tmp_path / "new.csv", index=False)
        back = load(file)
        assert back.card == card
        x, truth = read_samples(tmp_path / "new.csv", columns=[c.name for c in back.card.samples.table])
        found = predict(back, x, truth)
        assert (np.array(found.classes)[found.best] == labels).all()
        done = CliRunner().invoke(app, ["predict", "--model", str(file), "--data", str(tmp_path / "new.csv"), "--json"])
        assert done.exit_code == 0, done.output
        assert [p["prediction"] for p in json.loads(done.stdout)["predictions"]] == labels.tolist()


def test_new_samples_that_do_not_fit_are_refused() -> None:
    clients = {k: f.dropna().drop(columns="smokes") for k, f in FRAMES.items()}
    result = fk.run("fedavg", clients=clients, **SMALL)
    new = clients["site0"].drop(columns="label").head(2)
    for change, message in (
        (
            lambda f: f.assign(city="paris"),
            "column 'city' holds 'paris' in row 0, a word that no client had; known are bon",
        ),
        (lambda f: f.assign(age="old"), "column 'age' is not numeric .row 0: 'old'"),
        (
            lambda f: f.assign(age=np.nan),
            "column 'age' has no value in row 0, and the model was trained without missing",
        ),
        (lambda f: f.drop(columns="age"), "column 'age' is missing, which the model has"),
        (lambda f: f.assign(more=1), "column 'more' is not in the model"),
        (lambda f: f.head(0), "no samples"),
        (lambda f: f.to_numpy(object)[:, 1:], r"shape \(2, 3\): give a data frame"),
        (lambda f: 3, r"shape \(\): give a data frame"),
        (lambda f: [{"age": 1}, {"city": 2}], "item 1 has 'city', the first 'age'"),
        (lambda f: {"age": [1], "city": ["a", "b"]}, "columns of different lengths"),
        (lambda f: {"age": np.zeros((2, 2))}, "'age' has values of shape"),
    ):
        with pytest.raises(DataError, match=message):
            result.predict(change(new), 0)


def test_a_plain_table_takes_frames_too() -> None:
    clients = {k: f[["dose", "label"]].assign(more=1.5) for k, f in FRAMES.items()}
    result = fk.run("fedavg", clients=clients, **SMALL)
    new = clients["site0"].drop(columns="label")
    expected = result.predict(new.to_numpy(), 0)
    assert (result.predict(new[["more", "dose"]], 0) == expected).all()


@pytest.mark.slow
def test_onnx_prepares_too(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from fedkin.data.encoding import encoded, table_of
    from fedkin.use.export import from_result

    result = fk.run("fedavg", clients=FRAMES, impute="local", scale="local", **SMALL)
    dataset, _ = prepared({"impute": "local", "scale": "local"})
    (path,) = from_result(result, Card.of(dataset, "mlp"), [1], tmp_path, ["onnx"])
    new = FRAMES["site1"].drop(columns="label")
    columns = result.personal(1).samples.table
    raw = encoded(table_of(new, [c.name for c in columns]), columns)
    _, shares = ort.InferenceSession(str(path)).run(None, {"samples": raw})
    assert (np.array(["ill", "well"])[shares.argmax(1)] == result.predict(new, 1)).all()


# ---------------------------------------------------------------- the preparation itself


def slowly(preparation: Preparation, raw: np.ndarray[Any, Any]) -> list[list[float]]:
    found = []
    for row in raw:
        made: list[float] = []
        for value, c in zip(row, preparation.columns, strict=True):
            value = c.fill if np.isnan(value) and c.fill is not None else value
            made += [float(value == k) for k in range(c.codes)] if c.categories else [(value - c.mean) / c.std]
        found.append(made)
    return found


def test_arrays_and_tensors_are_prepared_as_a_loop_does() -> None:
    preparation = Preparation(
        (
            Column("a", fill=2.5, mean=1e9, std=3.0),
            Column("b", ("x", "y", "z"), fill=3.0),
            Column("c"),
            Column("d", ("u", "v"), fill=1.0),
            Column("e", ("w",)),
        )
    )
    rng = np.random.default_rng(0)
    raw = np.stack([1e9 + rng.normal(size=50), *(rng.integers(0, k, 50) for k in (3, 9, 2, 1))], 1)
    raw[rng.random(raw.shape) < 0.2] = np.nan
    raw[:, [2, 4]] = np.nan_to_num(raw[:, [2, 4]])
    expected = np.array(slowly(preparation, raw), np.float32)
    assert preparation(raw) == pytest.approx(expected)
    assert np.array_equal(Prepare(preparation)(torch.from_numpy(raw)).numpy(), preparation(raw))
    assert len(preparation.inputs()) == expected.shape[1]
    assert not preparation.plain
    assert Preparation((Column("a"),)).plain
    with pytest.raises(DataError, match="rows of 5 columns"):
        Prepare(preparation)(torch.zeros(2, 4))


@pytest.mark.parametrize(
    "change",
    [
        {"name": 3},
        {"categories": ["x", "x"]},
        {"categories": [1]},
        {"fill": "1"},
        {"fill": True},
        {"fill": 7.0},
        {"std": 0.0},
        {"mean": float("nan")},
        {"more": 1},
    ],
)
def test_a_damaged_preparation_is_refused(change: dict[str, Any]) -> None:
    good = {"name": "a", "categories": ["x", "y"], "fill": 2.0, "mean": 0.0, "std": 1.0}
    assert Preparation.of({"columns": [good]}).columns[0].codes == 3
    with pytest.raises(ValueError, match="column"):
        Preparation.of({"columns": [{**good, **change}]})


def test_defaults_ask_for_nothing() -> None:
    assert Preparing.of("none", "none") == Preparing()
    assert make_config({"impute": "none", "scale": "none"}).identity() == make_config({}).identity()
    assert make_config({"impute": "local"}).identity() != make_config({}).identity()


# ---------------------------------------------------------------- clients that come later


@pytest.mark.parametrize("which", ["local", "federated"])
def test_who_comes_later_is_prepared_as_the_run_was(which: str) -> None:
    settings = {"impute": which, "scale": which}
    result = fk.run("fedavg", clients=FRAMES, **settings, **SMALL)
    new = frame(7, CITIES[0])
    late = fk.join(result, clients={"late": new[new.columns[::-1]]}, epochs=1)
    prepared_by = late.personal("late").samples.preparations[0]
    if which == "federated":
        assert prepared_by == result.personal(0).samples.preparations[0]
    else:
        assert prepared_by.columns[0].mean not in [
            result.personal(i).samples.preparations[0].columns[0].mean for i in range(3)
        ]
    assert set(late.predict(new.drop(columns="label"), "late")) <= {"ill", "well"}
    with pytest.raises(DataError, match="client 'odd': column 'city' has the word 'york', which nobody in the run has"):
        fk.join(result, clients={"odd": new.assign(city="york")})
    with pytest.raises(DataError, match="client 'odd': column 'age' is missing, which the run has"):
        fk.join(result, clients={"odd": new.drop(columns="age")})


def test_a_column_that_32_bits_blur_is_told_unless_it_is_scaled(tmp_path: Path) -> None:
    """Tables are scaled before they are rounded."""
    made = pd.DataFrame({"when": 1.7e9 + np.arange(30.0), "label": np.arange(30) % 2, "due": 1.7e9 + np.arange(30.0)})
    made.to_csv(file := tmp_path / "all.csv", index=False)
    told = fk.run("local", data=str(file), clients=2, partition="iid", **SMALL).remarks
    assert any("column 'when' runs from 1700000000 to 1700000029" in r for r in told)
    scaled = fk.run("local", data=str(file), clients=2, partition="iid", scale="federated", **SMALL).remarks
    assert not any("32 bits" in r for r in scaled)
    plan = {**SMALL, "model": "linear", "scale": "local"}
    told = fk.run("local", clients=[made.drop(columns="label")], task="regression", label="due", **plan).remarks
    assert any("column 'due' runs" in r for r in told)


def test_a_table_that_nobody_scaled_is_said_before_it_trains_and_where_it_diverges(tmp_path: Path) -> None:
    plain = fk.run("fedavg", clients=[(f[["dose"]].assign(label=f["label"])) for f in FRAMES.values()], **SMALL)
    assert "column dose has mean " in plain.remarks[0]
    assert plain.remarks[0].endswith("--scale local standardises them")
    clients = [(f[["dose"]].assign(label=f["label"])) for f in FRAMES.values()]
    assert not any("--scale" in r for r in fk.run("fedavg", clients=clients, scale="local", **SMALL).remarks)
    broken = fk.run("fedavg", clients=clients, lr=1e25, **SMALL)
    assert "so may scaling the table's columns (--scale local)" in str(broken.diverged)
    scaled = fk.run("fedavg", clients=clients, scale="local", lr=1e25, **SMALL)
    assert "--scale" not in str(scaled.diverged)


def test_a_column_that_may_say_whose_a_row_is(tmp_path: Path) -> None:
    whole = pd.concat([f[["smokes", "label"]].assign(hospital=name) for name, f in FRAMES.items()])
    whole.to_csv(tmp_path / "all.csv", index=False)
    data = {"data": str(tmp_path / "all.csv"), **SMALL}
    dealt = fk.run("fedavg", clients=3, partition="iid", **data)
    assert "column hospital has 3 words and may say whose a row is" in dealt.remarks[0]
    assert "hospital" not in str(fk.run("fedavg", client_column="hospital", **data).remarks)
