"""Readers on tiny files in the published formats, and files that are not what they should be."""

from __future__ import annotations

import gzip
import os
import pickle
import struct

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedkin.data import SOURCES, Dataset, data_home, load, make_split, pictures
from fedkin.data.files import read_plain_pickle
from fedkin.data.text import build_vocabulary, encode, words
from fedkin.errors import DataError, UsageError

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def no_system_data(monkeypatch, tmp_path):
    """No test may see data that happen to be on the machine."""
    monkeypatch.setattr(pictures, "DEBIAN_FASHION", tmp_path / "debian")
    monkeypatch.delenv("FEDKIN_DATA", raising=False)


def write_idx(path, array, zipped=False):
    head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = head + array.astype(np.uint8).tobytes()
    path.with_name(path.name + ".gz" * zipped).write_bytes(gzip.compress(raw) if zipped else raw)


def write_mnist(folder, zipped=False, prefix="", parts=("train", "t10k"), shift=0):
    x = {part: RNG.integers(0, 256, (n, 28, 28)).astype(np.uint8) for part, n in zip(parts, (6, 4), strict=True)}
    for part, images in x.items():
        write_idx(folder / f"{prefix}{part}-images-idx3-ubyte", images, zipped)
        write_idx(folder / f"{prefix}{part}-labels-idx1-ubyte", np.arange(len(images)) + shift, zipped)
    return np.concatenate(list(x.values()))


def test_every_source_can_be_listed_without_loading():
    assert {
        "digits",
        "mnist",
        "fashion-mnist",
        "emnist",
        "cifar10",
        "cifar100",
        "wisdm",
        "wisdm51",
        "ucihar",
        "agnews",
        "chars74k",
    } <= set(SOURCES)
    for name, entry in SOURCES.items():
        assert entry.name == name
        assert entry.about
        assert entry.citation
        assert "\n" not in entry.about


def test_digits_are_always_there(tmp_path):
    data = load("digits", tmp_path, download=False)
    assert data.x.shape == (1797, 1, 8, 8)
    assert data.x.dtype == np.uint8
    assert data.x.max() == 255
    assert data.kind == "image"
    assert (data.shape, data.classes) == (SOURCES["digits"].shape, 10)
    theirs = load_digits()
    assert (data.x[:, 0] == np.round(theirs.images * (255 / 16))).all()
    assert (data.y == theirs.target).all()


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw"), ("fashion-mnist", "debian")]
)
def test_idx_files(tmp_path, name, folder, zipped):
    x = write_mnist(tmp_path / folder, zipped)
    data = load(name, tmp_path, download=False)
    assert (data.x[:, 0] == x).all()
    assert data.y.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3]
    assert data.official_test.tolist() == [False] * 6 + [True] * 4
    assert data.user is None


def test_writers_beside_mnist_make_it_a_natural_federation(tmp_path):
    write_mnist(tmp_path / "MNIST/raw")
    np.savez(tmp_path / "MNIST/writers.npz", train=np.array([3, 3, 3, 5, 5, 5], np.uint16), test=np.array([9] * 4))
    data = load("mnist", tmp_path)
    assert make_split(data, None, "natural", 0).names == ("user-3", "user-5", "user-9")
    np.savez(tmp_path / "MNIST/writers.npz", train=np.zeros(5), test=np.zeros(4))
    with pytest.raises(DataError, match="expected 10 writers, one per image, found 9"):
        load("mnist", tmp_path)


def test_emnist_is_turned_upright(tmp_path):
    x = write_mnist(tmp_path / "EMNIST/raw", True, "emnist-byclass-", ("train", "test"))
    data = load("emnist", tmp_path, download=False)
    assert (data.x[:, 0] == x.transpose(0, 2, 1)).all()
    assert data.classes == 62
    assert "".join(data.class_names[9:12]) == "9AB"
    assert data.class_names[61] == "z"


def test_emnist_letters_start_at_one(tmp_path):
    write_mnist(tmp_path / "EMNIST/raw", False, "emnist-letters-", ("train", "test"), shift=1)
    data = load("emnist-letters", tmp_path, download=False)
    assert data.y[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert data.class_names[0] == "a"


def damage_truncate(raw):
    return raw[:-10]


def damage_magic(raw):
    return b"\x1f\x8b" + raw[2:]


def damage_longer(raw):
    return raw + b"0"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, "expected 4720 bytes for shape \\(6, 28, 28\\), found 4710"),
        (damage_longer, "expected 4720 bytes"),
        (damage_magic, "expected an idx file"),
        (lambda raw: b"", "expected an idx file"),
        (lambda raw: raw[:9], "found 9"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, damage, message):
    write_mnist(tmp_path / "MNIST/raw")
    file = tmp_path / "MNIST/raw/train-images-idx3-ubyte"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        load("mnist", tmp_path)
    assert str(file) in str(caught.value)


def test_damaged_gzip_and_swapped_files(tmp_path):
    write_mnist(tmp_path / "MNIST/raw", zipped=True)
    file = tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    with pytest.raises(DataError, match="cannot be read"):
        load("mnist", tmp_path)
    file.write_bytes((tmp_path / "MNIST/raw/train-labels-idx1-ubyte.gz").read_bytes())
    with pytest.raises(DataError, match=r"expected uint8 images \[n, H, W\]"):
        load("mnist", tmp_path)
    file.write_bytes((tmp_path / "MNIST/raw/t10k-images-idx3-ubyte.gz").read_bytes())
    with pytest.raises(DataError, match="expected 4 labels"):
        load("mnist", tmp_path)


def cifar_batches(folder, names, write):
    rows = []
    for i, name in enumerate(names):
        x = RNG.integers(0, 256, (2, 3072)).astype(np.uint8)
        write(folder / name, x, [i, (i + 1) % 10])
        rows.append(x)
    return np.concatenate(rows).reshape(-1, 3, 32, 32)


def write_binary(path, x, labels, coarse=False):
    path.parent.mkdir(exist_ok=True)
    columns = [np.array([[7], [7]])] * coarse + [np.array(labels)[:, None], x]
    path.write_bytes(np.concatenate(columns, axis=1).astype(np.uint8).tobytes())


def write_python(path, x, labels, key=b"labels", protocol=2):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(pickle.dumps({b"data": x, key: labels, b"batch_label": b"batch"}, protocol=protocol))


CIFAR10 = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]


def test_cifar10_binary_and_python_are_the_same(tmp_path):
    x = cifar_batches(tmp_path / "cifar-10-batches-bin", [n + ".bin" for n in CIFAR10], write_binary)
    data = load("cifar10", tmp_path)
    assert (data.x == x).all()
    assert data.y.tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert data.official_test.sum() == 2
    x = cifar_batches(tmp_path / "py" / "cifar-10-batches-py", CIFAR10, write_python_mkdir)
    other = load("cifar10", tmp_path / "py")
    assert (other.x == x).all()
    assert (other.y == data.y).all()


def write_python_mkdir(path, x, labels):
    path.parent.parent.mkdir(exist_ok=True)
    write_python(path, x, labels, protocol=4)


def test_python2_pickles_as_published_can_be_read(tmp_path):
    """Opcodes as Python 2's cPickle wrote them: byte strings, numpy.core.multiarray, no encode call."""
    x = np.arange(3072, dtype=np.uint8)[None]
    raw = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        b"U\x01b\x87Rq\x05(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNN"
        b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T\x00\x0c\x00\x00"
        + x.tobytes()
        + b"tbU\x06labelsq\x08]q\tK\x03au."
    )
    for name in CIFAR10:
        (tmp_path / "cifar-10-batches-py").mkdir(exist_ok=True)
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(raw)
    data = load("cifar10", tmp_path)
    assert (data.x[0].ravel() == x[0]).all()
    assert data.y.tolist() == [3] * 6


def test_cifar100_uses_fine_labels(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    x = cifar_batches(folder, ["train.bin", "test.bin"], lambda p, x, y: write_binary(p, x, y, coarse=True))
    (folder / "fine_label_names.txt").write_text("\n".join(f"thing_{i}" for i in range(100)) + "\n")
    data = load("cifar100", tmp_path)
    assert (data.x == x).all()
    assert data.y.tolist() == [0, 1, 1, 2]
    assert data.class_names[99] == "thing_99"
    folder = tmp_path / "cifar-100-python"
    (tmp_path / "cifar-100-binary").rename(tmp_path / "elsewhere")
    cifar_batches(folder, ["train", "test"], lambda p, x, y: write_python(p, x, y, b"fine_labels"))
    (folder / "meta").write_bytes(pickle.dumps({b"fine_label_names": [b"t%d" % i for i in range(100)]}, protocol=2))
    data = load("cifar100", tmp_path)
    assert data.y.tolist() == [0, 1, 1, 2]
    assert data.class_names[5] == "t5"


def test_damaged_cifar(tmp_path):
    cifar_batches(tmp_path / "cifar-10-batches-bin", [n + ".bin" for n in CIFAR10], write_binary)
    file = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"data_batch_3.bin: expected a multiple of 3073 bytes .* found 6145"):
        load("cifar10", tmp_path)
    file.write_bytes(bytes([77]) + bytes(3072))
    with pytest.raises(DataError, match=r"label 77 is outside 0\.\.9"):
        load("cifar10", tmp_path)
    file.unlink()
    with pytest.raises(DataError, match=r"data_batch_3\.bin does not exist"):
        load("cifar10", tmp_path, download=False)


class Attack:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, protocol):
    mark = tmp_path / "owned"
    attacks = (
        Attack(os.system, f"touch {mark}"),
        Attack(eval, f"open({str(mark)!r}, 'w')"),
        Attack(open, str(mark), "w"),
        Attack(getattr, "a", "__class__"),
    )
    for attack in attacks:
        file = tmp_path / "batch"
        file.write_bytes(pickle.dumps({b"data": attack}, protocol=protocol))
        with pytest.raises(DataError, match="refused, nothing was run"):
            read_plain_pickle(file)
        assert not mark.exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"cbuiltins\nexec\n(S'1'\ntR.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
        b"(iposix\nsystem\n.",
        b"cnumpy\nndarray.__class__\n.",
        b"c_codecs\nencode\n(Vabc\nVzip\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(K\x01tS'b'\ntR.",
        b"\x80\x02Pid\n.",
        b"\x80\x02\x82\x01.",
        b"not a pickle",
        b"",
    ],
)
def test_other_tricks_and_damage_end_in_a_data_error(tmp_path, raw):
    (tmp_path / "batch").write_bytes(raw)
    with pytest.raises(DataError):
        read_plain_pickle(tmp_path / "batch")


def test_cifar_pickle_with_wrong_content(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    cifar_batches(folder, CIFAR10, write_python)
    write_python(folder / "data_batch_1", np.zeros((2, 10), np.uint8), [0, 1])
    with pytest.raises(DataError, match=r"expected 'data' as uint8 \[n, 3072\], found uint8 of shape \(2, 10\)"):
        load("cifar10", tmp_path)
    write_python(folder / "data_batch_1", np.zeros((2, 3072), np.uint8), [0])
    with pytest.raises(DataError, match="list of 2 whole numbers"):
        load("cifar10", tmp_path)


def test_wisdm_features_are_imputed_and_standardised(tmp_path):
    x = RNG.normal(5, 3, (40, 43)).astype(np.float32)
    x[0, 0], x[1, 0] = np.nan, np.nan
    x[:, 7] = 2
    np.savez(
        tmp_path / "wisdm11.npz", x=x, y=np.arange(40) % 6, user=np.arange(40) % 4, classes=np.array(list("abcdef"))
    )
    data = load("wisdm", tmp_path)
    assert data.kind == "features"
    assert data.x[0, 0] == data.x[1, 0]
    assert np.abs(data.x.mean(axis=0)).max() < 1e-5
    assert data.x.std(axis=0)[[0, 1, 7]] == pytest.approx([1, 1, 0], abs=1e-5)
    assert data.note.startswith("2 missing values imputed")


@pytest.mark.parametrize(("name", "shape"), [("wisdm51", (3, 200)), ("ucihar", (9, 128))])
def test_series_get_a_height_of_one(tmp_path, name, shape):
    classes = SOURCES[name].classes
    np.savez(
        tmp_path / f"{name}.npz",
        x=np.zeros((5, *shape), np.float32),
        y=np.arange(5, dtype=np.uint8),
        user=np.arange(1, 6, dtype=np.uint16),
        classes=np.array([f"c{i}" for i in range(classes)]),
    )
    data = load(name, tmp_path)
    assert data.shape == (shape[0], 1, shape[1]) == SOURCES[name].shape
    assert data.kind == "series"
    assert data.classes == classes
    if name == "ucihar":  # published test subjects: 2, 4, 9, ...
        assert data.official_test.tolist() == [False, True, False, True, False]


def test_wisdm_as_published_features(tmp_path):
    (tmp_path / "WISDM_ar_v1.1").mkdir()
    file = tmp_path / "WISDM_ar_v1.1" / "WISDM_ar_v1.1_transformed.arff"
    head = '@relation r\n@attribute "UNIQUE_ID" numeric\n@attribute "user" {1, 2}\n@attribute "X0" numeric\n'
    head += '@attribute "class" { "Walking", "Jogging" }\n@data\n'
    file.write_text(head + '1,33,0.5,"Walking"\n2,33,?,"Jogging"\n3,4,1.5,"Walking"\n')
    data = load("wisdm", tmp_path)
    assert data.class_names == ("Jogging", "Walking")
    assert data.user.tolist() == [33, 33, 4]
    assert data.x[:, 0] == pytest.approx([-np.sqrt(1.5), 0, np.sqrt(1.5)], abs=1e-5)
    file.write_text(head + "1,33,0.5\n")
    with pytest.raises(DataError, match="expected 4 values in a row, found 3"):
        load("wisdm", tmp_path)


def test_wisdm_as_published_series(tmp_path):
    (tmp_path / "WISDM_ar_v1.1").mkdir()
    file = tmp_path / "WISDM_ar_v1.1" / "WISDM_ar_v1.1_raw.txt"
    runs = ((33, "Jogging", 450), (33, "Walking", 200), (4, "Walking", 250))
    lines = [f"{user},{what},{i},{i},{-i},0.5;" for user, what, n in runs for i in range(n)]
    lines[10] += "\n33,Jogging,1,2,3;"  # a value is missing: left out
    file.write_text("\n".join(lines))
    data = load("wisdm-raw", tmp_path)
    assert data.shape == (3, 1, 200)
    assert data.user.tolist() == [33, 33, 33, 4]
    assert data.y.tolist() == [0, 0, 1, 1]
    assert data.x[1, 0, 0, 0] == 200
    assert data.note == "1 damaged records left out"
    file.write_text("33,Jogging,1,2,3,4;")
    with pytest.raises(DataError, match="at least 200 in a run, found 1 records"):
        load("wisdm-raw", tmp_path)


def test_ucihar_as_published(tmp_path):
    for part, n, user in (("train", 3, 1), ("test", 2, 2)):
        folder = tmp_path / "UCI HAR Dataset" / part
        (folder / "Inertial Signals").mkdir(parents=True)
        (folder / f"subject_{part}.txt").write_text(f"{user}\n" * n)
        (folder / f"y_{part}.txt").write_text("6\n" * n)
        for i, name in enumerate(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"):
            rows = (" ".join([f" {i}.5e+000"] * 128) + "\n") * n
            (folder / "Inertial Signals" / f"{name}_{part}.txt").write_text(rows)
    data = load("ucihar", tmp_path)
    assert data.x.shape == (5, 9, 1, 128)
    assert (data.x == np.arange(0.5, 9)[:, None, None]).all()
    assert data.official_test.tolist() == [False] * 3 + [True] * 2
    assert data.class_names[data.y[0]] == "laying"
    (tmp_path / "UCI HAR Dataset/test/y_test.txt").write_text("6\n")
    with pytest.raises(DataError, match="expected as many windows in body_acc_x"):
        load("ucihar", tmp_path)


def test_chars74k_says_what_it_stands_for(tmp_path):
    np.savez(
        tmp_path / "chars74k.npz",
        x=np.zeros((3, 28, 28), np.uint8),
        y=np.arange(3),
        writer=np.arange(3),
        classes=np.array(list(pictures.CHARACTERS)),
    )
    data = load("chars74k", tmp_path)
    assert data.shape == (1, 28, 28)
    assert data.note == "stands in for EMNIST"
    assert data.user.tolist() == [0, 1, 2]


def test_words_and_vocabulary():
    assert words("Messier #39;s \\$1.35 &lt;b&gt; quot;Hello, World quot;") == [
        "messier's",
        "1",
        "35",
        "b",
        "hello",
        "world",
    ]
    ids = build_vocabulary([["b", "a", "a"], ["c", "b"]], 4)
    assert ids == {"a": 2, "b": 3}
    assert encode([["a", "c", "b"], []], ids, 2).tolist() == [[2, 1], [0, 0]]


def test_agnews_learns_its_words_from_the_training_rows(tmp_path):
    folder = tmp_path / "ag_news_csv"
    folder.mkdir()
    (folder / "train.csv").write_text('"3","Oil up","Oil is up, ""again"""\n"1","Peace"\n', encoding="utf-8")
    (folder / "test.csv").write_text('"4","Oil, chips"\n', encoding="utf-8")
    data = load("agnews", tmp_path)
    assert data.kind == "text"
    assert data.shape == (200,)
    assert data.y.tolist() == [2, 0, 3]
    assert data.x[2, :3].tolist() == [2, 1, 0]  # "oil" first of the ties by count, "chips" unknown, padding
    assert data.vocabulary == 2 + 5
    (folder / "test.csv").write_text('"5","Oil"\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"expected rows of class 1\.\.4 and text"):
        load("agnews", tmp_path)


@pytest.mark.parametrize("prefix", ["npz:", ""])
def test_any_npz_file(tmp_path, prefix):
    path = tmp_path / "mine.npz"
    np.savez(path, x=np.zeros((4, 5, 5), np.uint8), y=np.array([10, 20, 10, 20]), user=np.array(["b", "a", "b", "a"]))
    data = load(f"{prefix}{path}")
    assert data.name == "mine"
    assert data.shape == (1, 5, 5)
    assert data.y.tolist() == [0, 1, 0, 1]
    assert data.class_names == ("10", "20")
    assert data.user.tolist() == [1, 0, 1, 0]


def test_npz_that_will_not_do(tmp_path):
    path = tmp_path / "mine.npz"
    with pytest.raises(UsageError, match="does not exist"):
        load(str(path))
    np.savez(path, x=np.zeros((4, 5)))
    with pytest.raises(DataError, match="expected an array 'y', found x"):
        load(str(path))
    np.savez(path, x=np.array([Attack(os.getcwd)], dtype=object), y=np.zeros(1))
    with pytest.raises(DataError, match="plain arrays"):
        load(str(path))
    path.write_bytes(b"PK\x03\x04 nonsense")
    with pytest.raises(DataError, match=r"expected an \.npz archive"):
        load(str(path))
    np.savez(path, x=np.full((2, 2), np.inf), y=np.zeros(2, int))
    with pytest.raises(DataError, match="sample 0 holds a value that is not finite"):
        load(str(path))


def test_missing_data_name_three_ways(tmp_path):
    with pytest.raises(DataError) as caught:
        load("fashion-mnist", tmp_path, download=False)
    message = str(caught.value)
    for part in (str(tmp_path), "FashionMNIST/raw", "FEDKIN_DATA", "--data-dir", "dataset-fashion-mnist", "http://"):
        assert part in message
    with pytest.raises(DataError, match="no public address is known"):
        load("wisdm51", tmp_path)
    with pytest.raises(UsageError, match="did you mean 'mnist'"):
        load("mnsit", tmp_path)


def test_where_data_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_home() == tmp_path / "cache" / "fedkin" / "data"
    monkeypatch.setenv("FEDKIN_DATA", str(tmp_path / "env"))
    assert data_home() == tmp_path / "env"
    assert data_home(tmp_path / "argument") == tmp_path / "argument"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 3))}, "x is float64"),
        ({"x": np.zeros((2, 3), np.uint8)}, "does not fit uint8"),
        ({"x": np.zeros((0, 3), np.float32), "y": np.zeros(0, np.int64)}, "no samples"),
        ({"x": np.full((2, 3), np.nan, np.float32)}, "not finite"),
        ({"x": np.full((2, 3), 9)}, "vocabulary has 0"),
        ({"y": np.zeros(3, np.int64)}, "2 samples need as many"),
        ({"y": np.zeros(2)}, "found float64"),
        ({"y": np.array([0, 5])}, r"label 5 is outside 0\.\.1"),
        ({"y": np.array([-1, 0])}, "label -1 is outside"),
        ({"class_names": ("a",)}, "1 class names"),
        ({"user": np.zeros(5, np.int64)}, "column user"),
        ({"std": 0.0}, "std is 0"),
    ],
)
def test_a_dataset_checks_itself(change, message):
    good = {"name": "toy", "x": np.zeros((2, 3), np.float32), "y": np.array([0, 1]), "classes": 2}
    assert len(Dataset(**good)) == 2
    with pytest.raises(DataError, match=message):
        Dataset(**{**good, **change})
