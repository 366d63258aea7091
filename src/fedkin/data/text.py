"""Text: words as numbers by a small tokenizer, so that no further package is needed, AG News, and Shakespeare's roles
character by character."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from fedkin.data.dataset import Dataset
from fedkin.data.files import existing
from fedkin.data.sources import both, published
from fedkin.data.targets import IGNORED, Ints
from fedkin.errors import DataError

AG_CLASSES = ("World", "Sports", "Business", "Sci/Tech")
WORDS, LENGTH = 32_000, 200

PADDING, UNKNOWN = 0, 1
_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?|[0-9]+")
_ENTITY = re.compile(r"\s?#39;|\\?&?\b(?:quot|amp|lt|gt|nbsp);|\\")


def words(text: str) -> list[str]:
    """Lower-case words and numbers. AG News holds remains of HTML (``#39;``, ``quot;``): an apostrophe, or nothing."""
    return _WORD.findall(_ENTITY.sub(lambda m: "'" if "39" in m[0] else " ", text.lower()))


def build_vocabulary(texts: Iterable[Sequence[str]], size: int) -> dict[str, int]:
    """Ids for the most frequent words, ties in alphabetical order; 0 is padding, 1 any other word, ``size`` in all."""
    counts = Counter(word for text in texts for word in text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: i for i, word in enumerate(ranked[: size - 2], start=2)}


def encode(texts: Sequence[Sequence[str]], ids: dict[str, int], length: int) -> Ints:
    """Token ids [n, length], cut or padded at the end."""
    out = np.full((len(texts), length), PADDING, np.int64)
    for row, text in zip(out, texts, strict=True):
        tokens = [ids.get(word, UNKNOWN) for word in text[:length]]
        row[: len(tokens)] = tokens
    return out


@published("agnews")
def read_agnews(root: Path) -> Dataset:
    train, y_train = _news(root / "ag_news_csv" / "train.csv")
    test, y_test = _news(root / "ag_news_csv" / "test.csv")
    ids = build_vocabulary(train, WORDS)
    x, y, official = both((encode(train, ids, LENGTH), y_train), (encode(test, ids, LENGTH), y_test))
    return Dataset("agnews", x, y, 4, AG_CLASSES, official_test=official, vocabulary=len(ids) + 2)


def _news(path: Path) -> tuple[list[list[str]], Ints]:
    """Rows of class (1..4) and one or more columns of text."""
    texts: list[list[str]] = []
    labels: list[int] = []
    try:
        with existing(path).open(encoding="utf-8", newline="") as stream:
            for row in csv.reader(stream):
                if len(row) < 2 or row[0] not in ("1", "2", "3", "4"):
                    raise DataError(
                        f"{path}: expected rows of class 1..4 and text, found {row[:2]!r} in row {len(texts) + 1}"
                    )
                labels.append(int(row[0]) - 1)
                texts.append(words(" ".join(row[1:])))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: expected a CSV file in UTF-8, found: {error}") from error
    return texts, np.asarray(labels, np.int64)


# ------------------------------------------------------------ Shakespeare, by role

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80, as ids from 2 on."""
WINDOW = 80
TEST_SHARE = 0.2
_HEADING = re.compile(r"_SCENE_[IVX]+$")


@published("shakespeare")
def read_shakespeare(root: Path) -> Dataset:
    """Each role's text in windows of 80 characters that do not overlap, with the character that follows each of them;
    the last fifth of its windows is for testing, as in McMahan et al. A role needs two windows, 82 characters."""
    folder = existing(root / "shakespeare")
    files = sorted(folder.glob("*.txt"))
    spoken = [file for file in files if not _HEADING.search(file.stem)]
    parts, names, unknown = [], [], 0
    for file in spoken:
        text = _text(file)
        ids = character_ids(text)
        if len(ids) >= WINDOW + 2:
            parts.append(windows(ids))
            names.append(file.stem)
            unknown += int((ids == UNKNOWN).sum())
    if not parts:
        raise DataError(f"{folder}: expected a text of at least {WINDOW + 2} characters for each role, PLAY_ROLE.txt")
    x, y = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    sizes = [len(part[0]) for part in parts]
    kept_back = [np.arange(n) >= n - max(1, round(n * TEST_SHARE)) for n in sizes]
    vocabulary = len(CHARACTERS) + 2
    return Dataset(
        "shakespeare",
        x,
        y,
        vocabulary,
        user=np.repeat(np.arange(len(parts)), sizes),
        official_test=np.concatenate(kept_back),
        vocabulary=vocabulary,
        note=f"{len(parts)} roles; left out: {len(spoken) - len(parts)} that say fewer than {WINDOW + 2} characters, "
        f"{len(files) - len(spoken)} headings of scenes; {unknown} characters are not among the {len(CHARACTERS)}",
        targets="tokens",
        users=tuple(names),
        model="char-lstm",
    )


def character_ids(text: str) -> Ints:
    """A text's characters as ids: 1 for one that is not among `CHARACTERS`."""
    ids = {character: i for i, character in enumerate(CHARACTERS, start=2)}
    return np.array([ids.get(character, UNKNOWN) for character in text], np.int64)


def windows(ids: Ints) -> tuple[Ints, Ints]:
    """Ids as windows [n, 80] and what follows each of them; in the last one, positions past the end do not count."""
    count = -(-(len(ids) - 1) // WINDOW)
    x, y = np.full(count * WINDOW, PADDING, np.int64), np.full(count * WINDOW, IGNORED, np.int64)
    x[: len(ids) - 1], y[: len(ids) - 1] = ids[:-1], ids[1:]
    return x.reshape(count, WINDOW), y.reshape(count, WINDOW)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: expected a text in UTF-8, found: {error}") from error
