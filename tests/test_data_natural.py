"""Fed-Heart-Disease, Fed-TCGA-BRCA and Shakespeare by role, read from small files in the published formats."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fedkin as fk
from fedkin.data import load, make_split
from fedkin.data.medical import HOSPITALS, REGIONS, held_out, standardised
from fedkin.data.targets import IGNORED
from fedkin.data.text import CHARACTERS, character_ids, windows
from fedkin.errors import DataError
from fedkin.models import build

RNG = np.random.default_rng(0)
REAL = Path(os.environ.get("FEDKIN_DATA", ""))


def write_hospitals(folder: Path, patients: int = 12) -> None:
    """As UCI publishes them: 14 values a patient; a question mark is a missing one, mostly in the three last columns
    before the diagnosis."""
    folder.mkdir(parents=True, exist_ok=True)
    for h, hospital in enumerate(HOSPITALS):
        lines = []
        for i in range(patients):
            values = [50 + i, i % 2, 1 + i % 4, 120 + h, 200 + i, 0, i % 3, 150, 1, 0.5 * i, 2]
            lines.append(",".join(map(str, [*values, "?", "?", 0 if i % 3 else 1 + i % 4])))
        lines.append("40,1,2,?,220,0,0,150,0,0,?,?,?,1")  # blood pressure is missing: left out
        (folder / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")


def test_heart_as_uci_publishes_it(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "heart-disease")
    data = load("heart", tmp_path, download=False)
    assert (data.shape, data.classes, data.class_names) == ((13,), 2, ("no disease", "disease"))
    assert len(data) == 4 * 12
    assert data.note == "4 patients with a missing value left out"
    assert data.y[:6].tolist() == [1, 0, 0, 1, 0, 0]  # any diagnosis above 0 is a disease
    split = make_split(data, None, "natural", seed=0)
    assert split.names == HOSPITALS
    assert [len(t) for t in split.test] == [5] * 4  # a third, rounded up
    train = data.x[split.train[0]]
    assert np.allclose(train.mean(0), 0, atol=1e-5)
    spread = train.std(0, ddof=1)
    assert np.allclose(spread[[0, 1, 3, *range(8, 13)]], 1, atol=1e-4)
    assert (spread[[2, 4, 5, 6]] == 0).all()  # the same for everybody in this hospital
    # chest pain 1..4 and electrocardiogram 0..2 are the five last columns, one for each value but the first
    for column, value in zip(range(8, 13), [2, 3, 4, 1, 2], strict=True):
        source = 1 + np.arange(12) % 4 if column < 11 else np.arange(12) % 3
        assert ((data.x[:12, column] > 0) == (source == value)).all()


def test_heart_in_one_file_is_the_same(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "heart-disease")
    x, y, site, test, _ = fk.data.medical.read_hospitals(tmp_path / "heart-disease")
    (tmp_path / "packed").mkdir()
    np.savez(tmp_path / "packed" / "fed_heart_disease.npz", x=x, y=y, site=site, split=test.astype(np.uint8))
    one, other = load("heart", tmp_path), load("heart", tmp_path / "packed")
    assert (one.x == other.x).all()
    assert (one.y == other.y).all()
    assert (one.official_test == other.official_test).all()


def test_pooled_patients_are_standardised_together(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "heart-disease")
    data = load("heart-pooled", tmp_path, download=False)
    train = data.x[~data.official_test]
    assert np.allclose(train.mean(0), 0, atol=1e-5)
    assert np.allclose(train[:, 2].std(ddof=1), 1, atol=1e-4)  # blood pressure differs from hospital to hospital


def test_damaged_hospitals(tmp_path: Path) -> None:
    write_hospitals(tmp_path / "heart-disease")
    file = tmp_path / "heart-disease" / "processed.va.data"
    file.write_text("1,2,3\n")
    with pytest.raises(DataError, match=r"processed\.va\.data: expected rows of 14 values, found .* \(1, 3\)"):
        load("heart", tmp_path)
    file.write_text("a,2,3,4,5,6,7,8,9,10,11,12,13,0\n")
    with pytest.raises(DataError, match="expected 14 numbers or question marks"):
        load("heart", tmp_path)
    file.write_text("1,2,3,4,5,6,7,8,9,10,11,12,13,0\n")
    with pytest.raises(DataError, match="1 patients of a hospital cannot be split"):
        load("heart", tmp_path)


def test_test_patients_keep_the_mix_where_there_are_enough() -> None:
    y = np.array([0] * 20 + [1] * 10)
    test = held_out(y, Path())
    assert test.sum() == 11  # of 30 a third, rounded up
    assert y[test].sum() == 4
    assert held_out(np.array([0] * 20 + [1, 1]), Path()).sum() == 8  # too few of the second to keep the mix


def test_a_feature_that_never_changes_stays_finite() -> None:
    x = np.ones((4, 2), np.float32)
    x[:, 1] = np.arange(4)
    out = standardised(x, np.zeros(4, np.int64), np.array([False, False, False, True]))
    assert out[:, 0].tolist() == [0, 0, 0, 0]
    assert out[:3, 1].tolist() == pytest.approx([-1, 0, 1])


def write_regions(folder: Path, patients: int = 24) -> None:
    """As FLamby publishes them: one table of patients, one of who is where and for what."""
    folder.mkdir(parents=True)
    features = [f"f{i}" for i in range(39)]
    rows = [["pid", *features, "E", "T"], *([f"P{i}", i, *[0] * 38, i % 2, 100.0 + i] for i in range(patients))]
    (folder / "brca.csv").write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
    parts = [f"P{i},{'train'},{'test' if i % 4 == 3 else 'train'}_{i % 6}" for i in reversed(range(patients))]
    (folder / "train_test_split.csv").write_text("pid,fold,fold2\n" + "\n".join(parts) + "\n")


def test_tcga_as_flamby_publishes_it(tmp_path: Path) -> None:
    write_regions(tmp_path / "fed_tcga_brca")
    data = load("tcga-brca", tmp_path, download=False)
    assert (data.shape, data.classes, data.targets) == ((39,), 1, "survival")
    assert data.user.tolist() == np.repeat(np.arange(6), 4).tolist()
    assert data.x[:, 0].tolist()[:4] == [0, 6, 12, 18]  # region 0
    assert data.y[:2].tolist() == [[100, 0], [106, 0]]  # the time, then the event
    assert data.official_test.tolist() == [int(i) % 4 == 3 for i in data.x[:, 0]]
    np.savez(
        tmp_path / "fed_tcga_brca.npz",
        x=data.x,
        time=data.y[:, 0],
        event=data.y[:, 1].astype(np.uint8),
        site=data.user.astype(np.uint8),
        split=data.official_test.astype(np.uint8),
    )
    (tmp_path / "fed_tcga_brca" / "brca.csv").unlink()
    packed = load("tcga-brca", tmp_path)
    assert (packed.x == data.x).all()
    assert (packed.y == data.y).all()
    assert packed.users == REGIONS


def test_damaged_regions(tmp_path: Path) -> None:
    write_regions(tmp_path / "fed_tcga_brca")
    split = tmp_path / "fed_tcga_brca" / "train_test_split.csv"
    split.write_text(split.read_text().replace("P5,train,train_5", "P5,train,elsewhere_9"))
    with pytest.raises(DataError, match="expected a fold2 such as train_0 for patient 'P5'"):
        load("tcga-brca", tmp_path)
    split.write_text("patient\n1\n")
    with pytest.raises(DataError, match="expected a CSV file with a column pid, found"):
        load("tcga-brca", tmp_path)
    np.savez(tmp_path / "fed_tcga_brca.npz", x=np.zeros((3, 5)), site=np.zeros(3, int), split=np.zeros(3, int))
    (tmp_path / "fed_tcga_brca" / "brca.csv").unlink()
    with pytest.raises(DataError, match=r"expected x \[n, 39\], .* found x of shape \(3, 5\)"):
        load("tcga-brca", tmp_path)


def test_characters_are_leafs() -> None:
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 80
    assert character_ids("\n $}").tolist() == [2, 3, 1, 81]


def test_windows_lose_no_character() -> None:
    ids = np.arange(200)
    x, y = windows(ids)
    assert x.shape == y.shape == (3, 80)
    counts = y != IGNORED
    assert (y[counts] == np.arange(1, 200)).all()  # every character but the first is predicted, once
    assert (x[counts] + 1 == y[counts]).all()
    assert counts.sum(1).tolist() == [80, 80, 39]


def test_shakespeare_by_role(tmp_path: Path) -> None:
    folder = tmp_path / "shakespeare"
    folder.mkdir()
    (folder / "hamlet_HAMLET.txt").write_text("To be, or not to be: that is the question. " * 20)  # 860 characters
    (folder / "hamlet_GHOST.txt").write_text("x" * 82)
    (folder / "hamlet_LORD.txt").write_text("x" * 81)
    (folder / "hamlet_SCENE_IV.txt").write_text("The platform. " * 100)
    data = load("shakespeare", tmp_path)
    assert (data.kind, data.targets, data.shape, data.classes, data.vocabulary) == ("text", "tokens", (80,), 82, 82)
    assert data.users == ("hamlet_GHOST", "hamlet_HAMLET")
    assert data.note.startswith("2 roles; left out: 1 that say fewer than 82 characters, 1 headings of scenes; 0 char")
    split = make_split(data, None, "natural", seed=0)
    assert [t.tolist() for t in split.train] == [[0], list(range(2, 11))]
    assert [t.tolist() for t in split.test] == [[1], [11, 12]]  # the last fifth
    assert "test_share" in split.unused
    result = fk.run(
        "fedper", data="shakespeare", data_dir=str(tmp_path), partition="natural", model="char-lstm-small", rounds=1
    )
    assert result.score.metric == "accuracy"
    assert result.history[-1].metrics["perplexity"] > 1
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(DataError, match="expected a text of at least 82 characters for each role"):
        load("shakespeare", tmp_path)


@pytest.mark.parametrize(
    ("name", "word"), [("heart", "archive.ics.uci.edu"), ("tcga-brca", "owkin/FLamby"), ("shakespeare", "LEAF's")]
)
def test_missing_files_say_where_they_come_from(tmp_path: Path, name: str, word: str) -> None:
    with pytest.raises(DataError, match=word):
        load(name, tmp_path, download=False)


def test_a_published_split_within_users_is_kept() -> None:
    user, test = np.repeat([3, 5], 4), np.tile([False, False, False, True], 2)
    data = fk.data.Dataset("toy", np.zeros((8, 2), np.float32), np.zeros(8, np.int64), 1, user=user, official_test=test)
    split = make_split(data, None, "natural", seed=0)
    assert [t.tolist() for t in split.test] == [[3], [7]]
    assert split.names == ("user-3", "user-5")
    test[7] = False  # now one user has no test rows: everybody's are drawn
    drawn = make_split(data, None, "natural", seed=0, test_share=0.5)
    assert [len(t) for t in drawn.test] == [2, 2]


def test_names_of_users_must_fit() -> None:
    with pytest.raises(DataError, match="1 names of users do not fit"):
        fk.data.Dataset(
            "toy", np.zeros((2, 2), np.float32), np.zeros(2, np.int64), 1, user=np.array([0, 1]), users=("a",)
        )


# ------------------------------------------------------------ networks


def test_two_outputs_of_the_linear_model_are_a_sigmoid_at_half_the_rate() -> None:
    """A step on the softmax of two scores at rate lr moves their difference as one on a sigmoid at 2 lr does."""
    network = build("linear", (13,), 2, seed=3)
    assert not network.head.weight[0].any()
    x, y = torch.randn(8, 13), torch.randint(0, 2, (8,))
    sigmoid = torch.nn.Linear(13, 1)
    with torch.no_grad():
        sigmoid.weight.copy_(network.head.weight[1:] - network.head.weight[:1])
        sigmoid.bias.copy_(network.head.bias[1:] - network.head.bias[:1])
    pairs = [
        (network, torch.optim.SGD(network.parameters(), 0.05)),
        (sigmoid, torch.optim.SGD(sigmoid.parameters(), 0.1)),
    ]
    for _ in range(5):
        for module, optimiser in pairs:
            optimiser.zero_grad()
            out = module(x)
            loss = (
                F.cross_entropy(out, y) if module is network else F.binary_cross_entropy(out[:, 0].sigmoid(), y.float())
            )
            loss.backward()
            optimiser.step()
    scores = network(x)
    assert torch.allclose(scores[:, 1] - scores[:, 0], sigmoid(x)[:, 0], atol=1e-6)


def test_a_character_lstm_scores_every_position() -> None:
    network = build("char-lstm", (80,), 82, 82)
    assert network(torch.randint(0, 82, (3, 80))).shape == (3, 80, 82)
    # embedding; two LSTM layers with two biases each; a score for each character
    assert sum(p.numel() for p in network.parameters()) == 82 * 8 + 4 * 256 * (8 + 3 * 256 + 4) + 257 * 82


# ------------------------------------------------------------ the published data, where they are


@pytest.mark.skipif(not (REAL / "heart-disease").is_dir(), reason="FEDKIN_DATA has no heart-disease")
def test_heart_has_flambys_patients() -> None:
    data = load("heart", REAL)
    split = make_split(data, None, "natural", seed=0)
    sizes = [(len(a), len(b)) for a, b in zip(split.train, split.test, strict=True)]
    assert sizes == [(199, 104), (172, 89), (30, 16), (85, 45)]  # as FLamby's README has them
    if (REAL / "fed_heart_disease.npz").exists():
        packed = np.load(REAL / "fed_heart_disease.npz")
        x, y, site, test, _ = fk.data.medical.read_hospitals(REAL / "heart-disease")
        for ours, theirs in ((x, "x"), (y, "y"), (site, "site"), (test, "split")):
            assert (ours == packed[theirs]).all(), theirs


@pytest.mark.skipif(not (REAL / "fed_tcga_brca.npz").is_file(), reason="FEDKIN_DATA has no fed_tcga_brca.npz")
def test_tcga_has_flambys_patients() -> None:
    split = make_split(load("tcga-brca", REAL), None, "natural", seed=0)
    sizes = [(len(a), len(b)) for a, b in zip(split.train, split.test, strict=True)]
    assert sizes == [(248, 63), (156, 40), (164, 42), (129, 33), (129, 33), (40, 11)]
