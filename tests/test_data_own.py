"""Own data: arrays, folders and torch data sets become a data set and a split, or an error that names the client."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
import torch

from fedkin.data import from_arrays, from_folder, from_torch
from fedkin.errors import DataError, UsageError


def client(n, labels=(0, 1), width=3, start=0):
    x = np.arange(start, start + n * width, dtype=np.float64).reshape(n, width)
    return x, np.resize(np.array(labels), n)


def test_arrays_stay_with_their_client():
    dataset, split = from_arrays([client(8), client(4, start=100)], seed=1)
    assert split.names == ("client-0", "client-1")
    assert [len(t) for t in split.train] == [6, 3]
    assert [len(t) for t in split.test] == [2, 1]
    assert dataset.x[np.concatenate([split.train[1], split.test[1]])].min() >= 100
    assert dataset.x.dtype == np.float32
    assert split.hash == from_arrays([client(8), client(4, start=100)], seed=1)[1].hash
    assert split.hash != from_arrays([client(8), client(4, start=100)], seed=2)[1].hash


def test_a_client_that_brings_test_rows_keeps_them():
    x, y = client(6)
    dataset, split = from_arrays([(x, y, x + 1000, y), client(4)], validation_share=0.5, names=["a", "b"])
    assert (dataset.x[split.test[0]] >= 1000).all()
    assert len(split.test[0]) == 6
    assert len(split.train[0]) == len(split.validation[0]) == 3
    assert len(split.test[1]) == 1
    assert split.names == ("a", "b")


def test_labels_of_any_kind_become_numbers():
    dataset, _ = from_arrays([client(4, (7, -2)), client(4, (100, 7))])
    assert dataset.class_names == ("-2", "7", "100")
    assert dataset.y[:2].tolist() == [1, 0]
    dataset, _ = from_arrays([client(4, ("cat", "dog"))])
    assert dataset.class_names == ("cat", "dog")


def test_pictures_and_tokens():
    grey, _ = from_arrays([(np.zeros((4, 8, 8), np.uint8), np.zeros(4, int))])
    assert grey.shape == (1, 8, 8)
    colour, _ = from_arrays([(np.zeros((4, 8, 9, 3), np.uint8), np.zeros(4, int))])
    assert colour.shape == (3, 8, 9)
    assert colour.kind == "image"
    text, _ = from_arrays([(np.ones((4, 6), np.int32), np.zeros(4, int))], vocabulary=10)
    assert text.kind == "text"
    with pytest.raises(DataError, match="vocabulary has 1"):
        from_arrays([(np.ones((4, 6), int), np.zeros(4, int))], vocabulary=1)


@pytest.mark.parametrize(
    ("clients", "error", "message"),
    [
        ([], UsageError, "no clients"),
        (
            [client(3), client(3, width=2)],
            DataError,
            r"'client-0' has float32 samples of shape \(3,\).*'client-1'.*\(2,\)",
        ),
        ([client(3), (np.zeros((0, 3)), np.zeros(0, int))], DataError, "client 'client-1' has no samples"),
        ([(np.zeros((3, 2)), np.zeros(2, int))], DataError, "client 'client-0': 3 samples, but labels"),
        ([(np.zeros(3),)], UsageError, "has 1 arrays"),
        ([client(3), client(3, ("a",))], DataError, "numbers and with words"),
        ([client(3, (0.5, 1))], DataError, "label 0.5 is not a class"),
        ([(np.array([["a"]]), np.zeros(1, int))], DataError, "client 'client-0': samples of type"),
    ],
)
def test_what_is_wrong_is_said_with_the_client(clients, error, message):
    with pytest.raises(error, match=message):
        from_arrays(clients)


def test_a_folder_of_files(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    (tmp_path / "berlin.csv").write_text("a,label,b\n1,cat,2\n3,dog,4\n5,cat,6\n")
    pq.write_table(pa.table({"a": [1.5, 2.5], "b": [1, 2], "label": ["dog", "eel"]}), tmp_path / "aachen.parquet")
    x, y = np.full((3, 2), 9.0), np.array(["cat"] * 3)
    np.savez(tmp_path / "cologne.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    (tmp_path / "notes.txt").write_text("not a client")
    dataset, split = from_folder(tmp_path)
    assert split.names == ("aachen", "berlin", "cologne")
    assert dataset.class_names == ("cat", "dog", "eel")
    assert dataset.x[:3].tolist() == [[1.5, 1], [2.5, 2], [1, 2]]
    assert [len(t) for t in split.train] == [1, 2, 3]
    assert [len(t) for t in split.test] == [1, 1, 1]


def test_numbers_as_labels_in_csv_sort_as_numbers(tmp_path):
    (tmp_path / "a.csv").write_text("kind,f\n10,1\n9,2\n")
    dataset, _ = from_folder(tmp_path, label="kind")
    assert dataset.class_names == ("9", "10")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "expected a column 'label', found a, b"),
        ("a,label\n1\n", "expected 2 columns, found 1 in row 2"),
        ("a,label\nx,1\n3,1\n", "column 'a' is not numeric"),
        ("label\n1\n", "at least one column"),
        ("a,label\n", "client 'c' has no samples"),
        ("", "expected a column 'label', found nothing"),
    ],
)
def test_a_table_that_will_not_do(tmp_path, text, message):
    (tmp_path / "c.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        from_folder(tmp_path)


def test_a_folder_that_will_not_do(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        from_folder(tmp_path / "none")
    with pytest.raises(DataError, match="holds no"):
        from_folder(tmp_path)
    (tmp_path / "c.parquet").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="expected a parquet file"):
        from_folder(tmp_path)
    (tmp_path / "c.csv").write_text("a,label\n1,1\n")
    with pytest.raises(DataError, match="client 'c' has more than one file"):
        from_folder(tmp_path)


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    (tmp_path / "c.parquet").write_bytes(b"")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"pip install fedkin\[data\]"):
        from_folder(tmp_path)


def test_torch_data_sets():
    torch = pytest.importorskip("torch")
    from torch.utils.data import IterableDataset, TensorDataset

    one = TensorDataset(torch.arange(24.0).reshape(8, 3), torch.tensor([4, 5] * 4))
    two = TensorDataset(torch.zeros(4, 3), torch.tensor([5] * 4))
    dataset, split = from_torch([one, two])
    assert dataset.class_names == ("4", "5")
    assert [len(t) for t in split.train] == [6, 3]
    dataset, split = from_torch(one, clients=2, partition="pathological:1")
    assert split.class_table(dataset, "all").tolist() == [[4, 0], [0, 4]]
    with pytest.raises(UsageError, match="say how many"):
        from_torch(one)
    with pytest.raises(DataError, match="client 'b' has no samples"):
        from_torch([one, TensorDataset(torch.zeros(0, 3), torch.zeros(0))], names=["a", "b"])

    class Endless(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(UsageError, match="with a length"):
        from_torch([Endless()])


# ---------------------------------------------------------------- columns by name, labels and cells with their place


def test_columns_go_by_name(tmp_path):
    (tmp_path / "a.csv").write_text("f0,f1,label\n1,2,0\n3,4,1\n")
    (tmp_path / "b.csv").write_text("f1,label,f0\n20,0,10\n40,1,30\n")
    dataset, _ = from_folder(tmp_path)
    assert dataset.columns == ("f0", "f1")
    assert dataset.x.tolist() == [[1, 2], [3, 4], [10, 20], [30, 40]]


def test_frames_go_by_name_too():
    pd = pytest.importorskip("pandas")
    one = pd.DataFrame({"f0": [1, 3], "f1": [2, 4], "label": ["x", "y"]})
    two = pd.DataFrame({"label": ["y", "y"], "f1": [20, 40], "f0": [10, 30]})
    dataset, split = from_arrays({"oslo": one, "bern": two})
    assert split.names == ("oslo", "bern")
    assert dataset.x.tolist() == [[1, 2], [3, 4], [10, 20], [30, 40]]
    with pytest.raises(DataError, match="client 'bern': column 'f1' is missing, which client 'oslo' has"):
        from_arrays({"oslo": one, "bern": two.drop(columns="f1")})
    with pytest.raises(DataError, match="client 'bern': expected a column 'label'"):
        from_arrays({"oslo": one, "bern": two.drop(columns="label")})


GOOD = "f0,f1,label\n1,2,0\n3,4,1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("f0,f2,label\n1,2,0\n", "b.csv: column 'f1' is missing, which .*a.csv has"),
        ("f0,f1,f2,label\n1,2,3,0\n", "b.csv: column 'f2' is not in .*a.csv"),
        ("f0,f0,label\n1,2,0\n", "b.csv: two columns are called 'f0'"),
        (",f0,f1,label\n0,1,2,0\n", "b.csv: column 1 of 4 has no name"),
        ("f0,f1,label\n1,2,0\n\n3,4,0.5\n", "b.csv: label 0.5 is not a class \\(row 4\\)"),
        ("f0,f1,label\n1,2,0\n3,4,\n", "b.csv: no label in row 3 \\(''\\)"),
        ("f0,f1,label\n1,2,cat\n3,4,None\n", "b.csv: no label in row 3 \\('None'\\)"),
        ("f0,f1,label\n1,2,nan\n3,4,1\n", "b.csv: no label in row 2"),
        ("f0,f1,label\n1,2,0\n3,,1\n", "b.csv: column 'f1' has no value in row 3"),
        ("f0,f1,label\n1,nan,0\n3,4,1\n", "b.csv: column 'f1' has no value in row 2; impute='local'"),
        ("f0,f1,label\n1,2,0\n3,1e99,1\n", "b.csv: column 'f1' holds a value that is not finite in row 3"),
        ("f0,f1,label\n1,2,0\n3,red,1\n", "b.csv: column 'f1' is not numeric \\(row 3: 'red'\\)"),
    ],
)
def test_what_is_wrong_in_a_table_is_said_with_file_and_row(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(GOOD)
    (tmp_path / "b.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        from_folder(tmp_path)


def test_whole_numbers_with_a_point_are_numbers_in_every_format(tmp_path):
    (tmp_path / "a.csv").write_text("f0,label\n1,0.0\n2,1.0\n")
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 1)), y=np.array([1.0, 10.0]))
    np.savez(tmp_path / "c.npz", x=np.zeros((2, 1)), y=np.array([2, 1]))
    dataset, _ = from_folder(tmp_path)
    assert dataset.class_names == ("0", "1", "2", "10")
    np.savez(tmp_path / "b.npz", x=np.zeros((2, 1)), y=np.array([1.0, 0.5]))
    with pytest.raises(DataError, match=r"b.npz: client 'b': label 0.5 is not a class \(sample 1\)"):
        from_folder(tmp_path)


def test_values_that_are_not_finite_are_said_with_their_client(tmp_path):
    good, bad = client(4), (np.array([[1.0, 2, 3], [4, np.inf, 6]]), [0, 1])
    with pytest.raises(DataError, match="client 'client-1': sample 1 holds a value that is not finite"):
        from_arrays([good, bad])
    np.savez(tmp_path / "a.npz", x=good[0], y=good[1])
    np.savez(tmp_path / "b.npz", x=bad[0], y=bad[1])
    with pytest.raises(DataError, match=r"b.npz: client 'b': sample 1 holds a value that is not finite"):
        from_folder(tmp_path)


def test_names_tell_clients_apart():
    with pytest.raises(DataError, match="two clients are called 'a'"):
        from_arrays([client(3), client(3)], names=["a", "a"])
    with pytest.raises(DataError, match="not valid text"):
        from_arrays([client(3), client(3)], names=["a", "\udcff"])


def test_a_file_whose_name_is_no_text_is_refused(tmp_path):
    try:
        (tmp_path / "\udcff.csv").write_text(GOOD)
    except OSError:
        pytest.skip("this file system has no such names")
    with pytest.raises(DataError, match="not valid text"):
        from_folder(tmp_path)


def test_files_that_may_not_be_read_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text(GOOD)

    def denied(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr("pathlib.Path.open", denied)
    with pytest.raises(DataError, match=r"a\.csv.*Permission denied"):
        from_folder(tmp_path)
    monkeypatch.setattr("pathlib.Path.iterdir", denied)
    with pytest.raises(DataError, match=r"cannot be read .Permission denied"):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    ("clients", "message"),
    [
        ({1, 2}, "come as a set: give a list"),
        ({"x": [[1.0]], "y": [0]}, "which are one client's data: give a list with such a dictionary"),
        ([client(3), (c for c in [client(3)])], "client 'client-1' is a generator: give"),
        ([((row for row in [[1.0]]), [0])], "its samples come as a generator, which is read only once"),
        ([([[1.0]], (y for y in [0]))], "its labels come as a generator, which is read only once"),
        ([{"image": [1], "label": [0]}], "is a dictionary with 'image', 'label': give"),
        ([np.zeros((2, 5))], "is a single ndarray: give"),
        (
            [client(3), ([[1], [1], [1, 2]], [0, 1, 0])],
            "client 'client-1': sample 2 has shape .2,., sample 0 .1,.; all",
        ),
        ([([torch.zeros(4), torch.zeros(3)], [0, 1])], "sample 1 has shape .3,., sample 0 .4,."),
        ([(np.array([np.zeros(4), np.zeros(3)], object), [0, 1])], "sample 1 has shape .3,., sample 0 .4,."),
        ([([[[1], [1, 2]], [[1], [1]]], [0, 1])], "sample 0 has parts of different lengths"),
        ([([[1.0], [2.0]], [[0], [0, 1]])], "label 1 has shape .2,., label 0 .1,."),
        ([[(np.zeros(3), 0)] * 5], r"has 5 arrays: give .* of single samples, each an \(x, y\), zip"),
        ([[]], "has 0 arrays"),
    ],
)
def test_objects_that_will_not_do_say_what_would(clients, message):
    with pytest.raises((DataError, UsageError), match=message):
        from_arrays(clients)


def test_items_as_dictionaries_say_what_would_do():
    class Pictures:
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return {"image": np.zeros(3), "label": i}

    with pytest.raises(UsageError, match="client 'client-0': items are dictionaries with 'image', 'label'; give pairs"):
        from_torch([Pictures()])


def test_numbers_that_32_bits_cannot_tell_apart_are_told():
    """Seconds since 1970 are rounded to steps of 128."""
    times, noise = 1.7e9 + np.arange(30.0), np.random.default_rng(0).normal(size=30)
    two = np.stack([noise, times], 1)
    assert "feature 1 runs from 1700000000 to 1700000029" in from_arrays([(two, np.arange(30) % 2)])[0].note
    assert "feature runs" in from_arrays([(times.astype(np.int64), np.arange(30) % 2)])[0].note
    assert "'t' runs" in from_arrays([({"t": times}, np.arange(30) % 2)])[0].note
    assert "the target runs" in from_arrays([(noise, times)], targets="numbers")[0].note
    fine = (noise, noise * 1e9, 1e6 + np.arange(30.0), 1.7e9 + 86400 * np.arange(30.0), np.full(30, 1.7e9 + 1))
    for x in fine:
        assert not from_arrays([(x, np.arange(30) % 2)])[0].note
        assert not from_arrays([(noise, x)], targets="numbers")[0].note


def test_samples_that_are_turned_are_told():
    """Ten steps of seventeen joints with three numbers look like pictures of three colours."""
    steps = np.random.default_rng(0).normal(size=(8, 10, 17, 3))
    dataset, _ = from_arrays([(steps, np.arange(8) % 2)])
    assert dataset.shape == (3, 10, 17)
    assert "(10, 17, 3) are taken for images with their channels last" in dataset.note
    assert not from_arrays([(steps.transpose(0, 3, 1, 2), np.arange(8) % 2)])[0].note
    assert not from_arrays([((steps * 9).astype(np.uint8), np.arange(8) % 2)])[0].note
