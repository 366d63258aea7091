"""Whatever is in a file or an object: a data set comes out, or an error of FedKin's that says what is wrong."""

from __future__ import annotations

import io
import random
import string
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.cli.commands import main  # noqa: F401  registers the commands
from fedkin.config import make_config, read_toml
from fedkin.errors import FedKinError
from fedkin.rounds import load_data
from fedkin.use.predict import read_samples

GOOD = "f0,f1,label\n" + "".join(f"{i},{i / 2},{i % 2}\n" for i in range(8))
CELLS = [
    "",
    " ",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "None",
    "NULL",
    "x",
    '"',
    "1,5",
    "1;2",
    "0.5",
    "٣",
    "\x00",
    "1e5",
    "-1",
    "True",
    "1_000",
    "’",
    "99999999999999999999",
    "<NA>",
]


def csv_texts(rng: random.Random) -> Iterator[bytes]:
    lines = GOOD.splitlines()
    for _ in range(60):
        made = [line.split(",") for line in lines]
        for _ in range(rng.randint(1, 3)):
            row = rng.randrange(len(made))
            kind = rng.randrange(6)
            if kind < 3:
                made[row][rng.randrange(len(made[row]))] = rng.choice(CELLS)
            elif kind == 3:
                made[row] = made[row][: rng.randrange(len(made[row]))] or [""]
            elif kind == 4:
                made[row].append(rng.choice(CELLS))
            else:
                made[0][rng.randrange(len(made[0]))] = rng.choice(["f0", "label", "", "f9", "F1"])
        yield "\n".join(",".join(row) for row in made).encode()
    raw = GOOD.encode()
    for _ in range(25):
        damaged = bytearray(raw)
        for _ in range(rng.randint(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        yield bytes(damaged[: rng.choice([len(damaged), rng.randrange(1, len(damaged))])])
    yield from (
        b"",
        b"\n\n\n",
        b"\xff\xfe",
        b"label",
        b"label\n1",
        b"f0\n1\n",
        "f0,label\n1,ä".encode("latin-1"),
        b"\xef\xbb\xbf" + raw,
        raw.replace(b"\n", b"\r\n"),
        raw.replace(b",", b";"),
        b"f0,label\n" + b'"' * 9,
    )


def npz_bytes(rng: random.Random) -> Iterator[bytes]:
    numpy = np.random.default_rng(1)
    x, y = numpy.normal(size=(8, 3)), np.arange(8) % 2
    odd: list[Any] = [
        x.astype(complex),
        x.astype(str),
        np.array(3),
        np.zeros((0, 3)),
        np.zeros((8, 0)),
        x.astype(np.float16),
        x * 1e300,
        np.full((8, 3), np.nan),
        x > 0,
        np.zeros((8, 2, 2, 2, 2)),
        x.astype("M8[s]"),
        np.zeros((8, 5, 5), np.uint8),
        y,
        np.zeros(8, [("a", int)]),
        np.arange(8) / 2,
        np.array(["a", "b"] * 4),
        np.array(["", "b"] * 4),
        y.astype("S"),
        np.array([2**63] * 8, np.uint64),
        y.astype(float),
        y[:5],
        y[:, None],
        np.stack([y, y], 1),
        -y,
        y + 10**12,
    ]
    for value in odd:
        for arrays in ({"x": value, "y": y}, {"x": x, "y": value}):
            yield packed(**arrays)
    for arrays in (
        {"x": x},
        {"y": y},
        {},
        {"x_train": x, "y_train": y},
        {"x_train": x, "y_train": y, "x_test": x[:, :2], "y_test": y},
        {"x_train": x, "y_train": y, "x_test": x[:0], "y_test": y[:0]},
        {"x": x, "y": y, "user": x},
        {"x": x, "y": y, "user": y[:3]},
        {"x": x, "y": y, "is_test": x},
        {"x": x, "y": y, "vocabulary": x},
        {"x": x, "y": y, "vocabulary": np.array("many")},
        {"x": x, "y": y, "classes": y},
        {"x": x, "y": y, "classes": np.array(["one"])},
        {"x": x, "y": y, "vocabulary": np.array(-3)},
        {"x": np.abs(x), "y": y, "vocabulary": np.array(9)},
    ):
        yield packed(**arrays)
    good = packed(x=x, y=y)
    for _ in range(20):
        damaged = bytearray(good)
        for _ in range(rng.randint(1, 8)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        yield bytes(damaged[: rng.choice([len(damaged), rng.randrange(1, len(damaged))])])
    yield from (b"", b"PK\x03\x04", b"nonsense", zipped({"x.npy": b"\x93NUMPY"}), zipped({"x": b"", "y": b""}))


def packed(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return file.getvalue()


def parquet_bytes(rng: random.Random) -> Iterator[bytes]:
    pa = pytest.importorskip("pyarrow")
    import datetime
    import decimal

    import pyarrow.parquet as pq

    columns: list[Any] = [
        [1.0, None, 3.0],
        [1, None, 3],
        ["1", "2", "3"],
        ["a", None, "b"],
        [[1], [2], [3]],
        [{"a": 1}] * 3,
        [True, False, None],
        [decimal.Decimal("1.5")] * 3,
        [datetime.date(2020, 1, 1)] * 3,
        [b"1", b"2", b"\xff"],
        [None] * 3,
        [0.5, 1.0, 2.0],
        [1.0, 2.0, 1.0],
        [float("nan")] * 3,
    ]
    for values in columns:
        for table in (
            pa.table({"f1": [1, 2, 3], "f0": values, "label": [0, 1, 0]}),
            pa.table({"f0": [1, 2, 3], "f1": [1, 2, 3], "label": values}),
        ):
            file = io.BytesIO()
            pq.write_table(table, file)
            yield file.getvalue()
    file = io.BytesIO()
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([0])], names=["f", "f", "label"]), file)
    good = file.getvalue()
    yield good
    for _ in range(10):
        damaged = bytearray(good)
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        yield bytes(damaged[: rng.choice([len(damaged), rng.randrange(1, len(damaged))])])


def toml_texts(rng: random.Random) -> Iterator[bytes]:
    good = 'method = "local"\nrounds = 1\nclients = 5\nlr = 0.1\n[options]\nwho = "all"\n'
    values = ["[]", "{}", '""', "1979-05-27", "-1", "nan", "inf", "true", "[1, 2]", '"x"', "1e99", "0x10"]
    for _ in range(40):
        lines = good.splitlines()
        at = rng.randrange(len(lines))
        name = lines[at].split(" = ")[0]
        lines[at] = rng.choice(
            [
                f"{name} = {rng.choice(values)}",
                f"{rng.choice(string.ascii_letters)} = 1",
                name,
                "[x",
                f"{name} = ",
                lines[at] + "\n" + lines[at],
            ]
        )
        yield "\n".join(lines).encode()
    yield from (b"\xff\xfe\x00", b"a = '\x00'", b"[[cell]]\nmethod = 3", b"grid = 3", b"[grid]\nlr = []")


class Broken:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        raise RuntimeError("the disk is gone")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array")


class Items(Broken):
    def __init__(self, item: Any) -> None:
        self.item = item

    def __getitem__(self, i: int) -> Any:
        return self.item


def objects() -> Iterator[Any]:
    import torch

    x, y = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32), np.arange(8) % 2
    odd: list[Any] = [
        None,
        3,
        "ab",
        b"ab",
        x,
        [],
        (),
        {},
        [1, 2],
        (x,),
        (x, y, x),
        Broken(),
        object(),
        [[[1], [1, 2]], [0, 1]],
        {"x": x, "y": y},
        {"x": x},
        {"image": x, "label": y},
        {"x_train": x, "y_train": y, "x_test": x, "y_test": y},
        (x, y[:3]),
        (x, None),
        (None, y),
        (x, [None] * 8),
        (x, ["a", 1] * 4),
        (x, [float("nan")] * 8),
        (x, y / 2),
        (x, y.astype(float)),
        (x, x),
        (x * np.nan, y),
        (x.astype(str), y),
        (x.tolist(), y.tolist()),
        (torch.tensor(x), torch.tensor(y)),
        (torch.tensor(x, requires_grad=True), y),
        (torch.tensor(x).bfloat16(), y),
        (x, torch.tensor(y).bfloat16()),
        (x, [{}] * 8),
        (x, {1: 2}),
        (Broken(), y),
        (x, Broken()),
        Items({"x": x[0], "label": 1}),
        Items((x[0], 1)),
        Items((x[0],)),
        Items(3),
        Items((x[0], "a")),
        Items((x[0], None)),
        iter([]),
        lambda: x,
        (x, y.astype(complex)),
        (x, y > 0),
        (x[:1], y[:1]),
        (x, np.array(["1", "2"] * 4)),
        (np.array([x, x[:2]], dtype=object), y),
        type,
        ...,
    ]
    good = (x, y)
    for value in odd:
        yield [value, good]
        yield {"a": good, "b": value}
    yield from (
        [],
        {},
        (good for _ in range(3)),
        "20x",
        2.5,
        -1,
        True,
        [good] * 2,
        {1: good, "1": good},
        {3: good},
        set(),
        np.zeros((2, 8, 3)),
        {"\udcff": good, "b": good},
        Broken(),
        object,
        range(3),
    )


SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "device": "cpu", "way": "each", "model": "mlp", "method": "local"}


def outcome(call: Callable[[], object]) -> str:
    """ "fine", or the error's first words; anything but FedKin's own errors fails the test."""
    try:
        call()
    except FedKinError as error:
        said = str(error)
        assert said.strip(), "an error without a word"
        assert "Traceback" not in said
        return said
    return "fine"


def tried(cases: Iterator[bytes], suffix: str, folder: Path) -> tuple[int, int, list[Path]]:
    """Each as a client's file beside a good one, as a data set (.npz), and as samples to predict."""
    count, fine, files = 0, 0, []
    for number, content in enumerate(cases):
        place = folder / str(number)
        place.mkdir()
        (place / "good.csv").write_text(GOOD)
        (place / f"odd{suffix}").write_bytes(content)
        files.append(place)
        said = outcome(lambda place=place: load_data(make_config({"data": str(place)})))  # type: ignore[misc]
        assert said == "fine" or "odd" in said or "good" in said, said
        outcome(lambda place=place: read_samples(place / f"odd{suffix}"))  # type: ignore[misc]
        if suffix == ".npz":
            name = str(place / "odd.npz")
            outcome(lambda name=name: load_data(make_config({"data": name, "clients": 2, "partition": "iid"})))  # type: ignore[misc]
        count, fine = count + 1, fine + (said == "fine")
    return count, fine, files


@pytest.mark.parametrize(
    ("cases", "suffix", "least"), [(csv_texts, ".csv", 90), (npz_bytes, ".npz", 80), (parquet_bytes, ".parquet", 35)]
)
def test_files(cases: Any, suffix: str, least: int, tmp_path: Path) -> None:
    count, fine, files = tried(cases(random.Random(7)), suffix, tmp_path)
    assert count >= least
    assert 0 < fine < count
    runner = CliRunner()
    for place in files[::25]:
        done = runner.invoke(app, ["split", "--data", str(place)])
        assert done.exit_code in (0, 1, 2), done.output
        assert done.exception is None or isinstance(done.exception, SystemExit)
        if done.exit_code:
            assert done.stderr.startswith("Error: ")
            assert "Traceback" not in done.stderr


def test_toml(tmp_path: Path) -> None:
    texts = list(toml_texts(random.Random(3)))
    assert len(texts) >= 40
    runner = CliRunner()
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.toml"
        path.write_bytes(text)
        outcome(lambda path=path: make_config(read_toml(path)))  # type: ignore[misc]
        if number % 8 == 0:
            done = runner.invoke(app, ["run", str(path), "--runs-dir", str(tmp_path / "runs")])
            assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
            assert done.exit_code in (0, 1, 2)


def test_python_objects() -> None:
    cases = list(objects())
    assert len(cases) >= 100
    said = [outcome(lambda case=case: fk.run(clients=case, **SMALL)) for case in cases]  # type: ignore[misc]
    assert 0 < said.count("fine") < len(said)
    for value in (3, object(), (1, 2), [], Broken(), None):
        assert outcome(lambda value=value: fk.run(data=value, **SMALL)) != "fine"  # type: ignore[misc]
    for wrong in (
        {"method": 3},
        {"method": dict},
        {"model": dict},
        {"options": 3},
        {"partition": 3},
        {"rounds": "x"},
        {"nonsense": 1},
        {"data": "\udcff"},
        {"data": "x" * 5000},
        {"data": "a\0b"},
        {"runs_dir": "\0"},
    ):
        assert outcome(lambda wrong=wrong: fk.run(**{**SMALL, **wrong})) != "fine", wrong  # type: ignore[misc]


def test_places_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dir.toml").mkdir()
    runner = CliRunner()
    done = runner.invoke(app, ["run", str(tmp_path / "dir.toml")])
    assert done.exit_code == 2
    assert "dir.toml cannot be read (Is a directory)" in done.stderr.replace("\n", "")

    def read_only(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(30, "Read-only file system", str(self))

    pytest.importorskip("httpx")
    monkeypatch.setattr("pathlib.Path.mkdir", read_only)
    done = runner.invoke(app, ["local-cluster", "2", "--folder", str(tmp_path / "cluster")])
    assert done.exit_code == 2
    assert "cluster cannot be written (Read-only file system)" in done.stderr.replace("\n", "")
