"""Texts with a user's tokenizer: as pairs, arrays, tables, files and Hugging Face's data sets, and in `predict`."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedkin as fk
from fedkin.data import Reading, own_clients
from fedkin.errors import DataError, UsageError
from fedkin.preparation import Texts

QUICK: dict[str, Any] = {"rounds": 1, "epochs": 1, "device": "cpu", "way": "each"}
WORDS = ["the", "film", "was", "good", "bad", "very", "not"]
GOOD = [
    ("the film was very good", "good"),
    ("a good film", "good"),
    ("good", "good"),
    ("very very good it was", "good"),
]
BAD = [("the film was bad", "bad"), ("not a bad but a very bad film", "bad"), ("bad", "bad"), ("it was bad", "bad")]
LENGTH = 6


def words(text: str) -> list[int]:
    """A function from a text to its ids; 0 is padding, 1 any other word."""
    return [WORDS.index(word) + 2 if word in WORDS else 1 for word in text.split()]


class Transformers:
    """Called as those of transformers are: with a pair of special tokens, which stay when a text is cut."""

    pad_token_id = 9

    def __call__(self, text: str, truncation: bool = False, max_length: int = 10**6) -> UserDict[str, Any]:
        ids = words(text)[: max_length - 2] if truncation else words(text)
        ids = [20, *ids, 21]
        return UserDict({"input_ids": ids, "token_type_ids": [0] * len(ids), "attention_mask": [1] * len(ids)})


def library() -> Any:
    """Hugging Face's `tokenizers`, which pads and cuts in a way of its own that is not ours."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[PAD]": 0, "[UNK]": 1, **{w: i + 2 for i, w in enumerate(WORDS)}, "[CLS]": 20, "[SEP]": 21}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 20), ("[SEP]", 21)]
    )
    made.enable_padding(length=30)
    made.enable_truncation(4)
    return made


class Bag(nn.Module):
    """Takes the ids alone."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(30, 8, padding_idx=0), nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids).mean(1))


class Masked(Bag):
    """Takes the mask as well, by name."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weight = attention_mask.unsqueeze(-1).float()
        return self.head((self.words(input_ids) * weight).sum(1) / weight.sum(1))


def test_a_function_from_a_text_to_ids() -> None:
    found, cut = Texts(words, 4)(["good", "the film was very good"], "here")
    assert list(found) == ["input_ids"]
    assert found["input_ids"].tolist() == [[5, 0, 0, 0], [2, 3, 4, 7]]
    assert cut == 1


@pytest.mark.parametrize(("make", "pad"), [(Transformers, 9), (library, 0)])
def test_tokenizers_with_a_mask_cut_inside_their_special_tokens(make: Callable[[], Any], pad: int) -> None:
    tokenizer = make()
    found, cut = Texts(tokenizer, 5)(["bad", "the film was very good"], "here")
    assert found["input_ids"].tolist() == [[20, 6, 21, pad, pad], [20, 2, 3, 4, 21]]
    assert found["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert cut == 1
    if make is library:  # the user's own is as it was
        assert (tokenizer.padding["length"], tokenizer.truncation["max_length"]) == (30, 4)


def test_a_bound_method_that_gives_encodings() -> None:
    tokenizer = library()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    found, cut = Texts(tokenizer.encode, 4)(["the film was very good", "bad"], "here")
    assert found["input_ids"].tolist() == [[20, 2, 3, 4], [20, 6, 21, 0]]
    assert cut == 1
    only, _ = Texts(lambda text: tokenizer.encode(text).ids, 4)(["bad"], "here")
    assert list(only) == ["input_ids"]


def rows(pairs: list[tuple[str, str]]) -> dict[str, list[str]]:
    return {"text": [t for t, _ in pairs], "label": [y for _, y in pairs]}


def from_hf(pairs: list[tuple[str, str]]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(rows(pairs))


FORMS: dict[str, Callable[[list[tuple[str, str]]], Any]] = {
    "pairs": lambda pairs: pairs,
    "lists": lambda pairs: ([t for t, _ in pairs], [y for _, y in pairs]),
    "arrays": lambda pairs: {"x": np.array([t for t, _ in pairs]), "y": np.array([y for _, y in pairs])},
    "series": lambda pairs: (pd.DataFrame(rows(pairs)).text, pd.DataFrame(rows(pairs)).label),
    "frame": lambda pairs: pd.DataFrame(rows(pairs)),
    "items": lambda pairs: [{"text": t, "label": y} for t, y in pairs],
    "hf": from_hf,
    "torch": lambda pairs: _Items(pairs),
}


class _Items:
    def __init__(self, pairs: list[tuple[str, str]]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> tuple[str, str]:
        return self.pairs[i]


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_the_same_samples(form: str) -> None:
    clients = [FORMS[form](GOOD + BAD), FORMS[form](BAD + GOOD)]
    dataset, split = own_clients(clients, Reading(texts=Texts(words, LENGTH))).split()
    usual, same = own_clients([GOOD + BAD, BAD + GOOD], Reading(texts=Texts(words, LENGTH))).split()
    assert (dataset.x == usual.x).all()
    assert (dataset.y == usual.y).all()
    assert split.hash == same.hash
    assert dataset.class_names == ("bad", "good")
    assert dataset.note == "2 of 16 texts have more than 6 tokens and were cut"
    assert dataset.prepared == ("texts: 6 token ids each, padded with 0",)


@pytest.mark.parametrize(("tokenizer", "network"), [(words, Bag), (Transformers(), Masked)])
def test_models_take_texts_again(tokenizer: Any, network: type[Bag], caplog: pytest.LogCaptureFixture) -> None:
    how: dict[str, Any] = {**QUICK, "rounds": 12, "epochs": 5, "lr": 0.5, "batch": 4}
    result = fk.run("fedper", clients=[GOOD * 4 + BAD * 4, BAD * 4 + GOOD * 4], tokenizer=tokenizer, length=10,
                    model=network, **how)  # fmt: skip
    assert result.accuracy.macro == 100
    assert not any("were cut" in line for line in result.remarks)
    assert result.prepared.columns[0].startswith("texts: 10 token ids each")
    assert result.predict(["good film", "bad film"], 0).tolist() == ["good", "bad"]
    assert result.predict(pd.DataFrame({"text": ["bad"]}), 0).tolist() == ["bad"]
    assert result.predict(np.array(["bad"]), 0).tolist() == ["bad"]
    ready = result.personal(1)
    assert ready(["very good"]).shape == (1, 2)
    found, _ = Texts(tokenizer, 10)(["very good"], "here")
    assert torch.equal(ready(["very good"]), ready({name: torch.from_numpy(v) for name, v in found.items()}))
    late = fk.join(result, clients={"new": BAD * 2 + GOOD * 2})
    assert late.predict(["very good", "very bad"], "new").tolist() == ["good", "bad"]
    cut = fk.run("fedavg", clients=[GOOD + BAD], tokenizer=tokenizer, length=3, model=network, **QUICK)
    assert any("texts have more than 3 tokens and were cut" in line for line in cut.remarks)


@pytest.mark.parametrize("what", ["frame", "hf", "pairs", "file"])
def test_texts_that_are_dealt(what: str, tmp_path: Path) -> None:
    pairs = GOOD * 3 + BAD * 3
    data: Any = FORMS[what](pairs) if what != "file" else tmp_path / "all.csv"
    if what == "file":
        pd.DataFrame(rows(pairs)).to_csv(data, index=False)
    result = fk.run("fedavg", data=data, clients=3, partition="iid", tokenizer=words, length=5, model=Bag, **QUICK)
    assert sum(c.train_samples + c.test_samples for c in result.per_client) == 24
    assert any("of 24 texts" in line for line in result.remarks)


def test_texts_by_a_column_of_clients_and_in_a_folder(tmp_path: Path) -> None:
    frame = pd.DataFrame({**rows(GOOD * 2 + BAD * 2), "site": ["a", "b"] * 8}).rename(columns={"label": "mood"})
    told: dict[str, Any] = {"label": "mood", "tokenizer": words, "length": 5, "model": Bag, **QUICK}
    result = fk.run("fedavg", data=frame, client_column="site", runs_dir=str(tmp_path / "runs"), **told)
    assert [c.name for c in result.per_client] == ["a", "b"]
    texts = {"tokenizer": words, "length": 5}
    more = fk.resume(str(result.run), data=frame, model=Bag, rounds=2, **texts)
    assert len(more.history) == 2
    sites = tmp_path / "sites"
    sites.mkdir()
    for name in ("a", "b"):
        frame[frame.site == name].drop(columns="site").to_csv(sites / f"{name}.csv", index=False)
    again = fk.run("fedavg", data=sites, runs_dir=str(tmp_path / "runs"), **told)
    assert [c.name for c in again.per_client] == ["a", "b"]
    assert str(again.per_client) == str(result.per_client)
    assert str(fk.resume(str(again.run), model=Bag, **texts).per_client) == str(again.per_client)


def frame(**more: Any) -> pd.DataFrame:
    return pd.DataFrame({**rows(GOOD), **more})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([("good", 0), (3, 1)], r"client 'client-0': sample 1 is no text \('3'\)"),
        ([("good", 0), (" ", 1)], "client 'client-0': no text in sample 1"),
        ([("good", 0), ("...", 1)], "the tokenizer finds no token in sample 1"),
        ([("good", 0), ("fail", 1)], r"the tokenizer fails at sample 1 \(ValueError: what\)"),
        ([("good", 0), ("float", 1)], r"of sample 1 the tokenizer makes \[0.5\]; token ids are whole numbers"),
        ([("good", 0), ("minus", 1)], r"of sample 1 the tokenizer makes \[-1\]"),
        (("one text", [0]), "a single str; give a list of texts"),
        ((np.zeros((2, 3)), [0, 1]), "is no text"),
        (frame(text=["a", None, "b", "c"]), "column 'text' has no text in row 1"),
        (frame(stars=[1, 2, 3, 4]), "the columns text, stars, and a tokenizer takes one"),
        (frame().drop(columns="label"), "expected a column 'label', found text"),
    ],
)
def test_what_is_no_text_is_said(data: Any, said: str) -> None:
    def odd(text: str) -> list[Any]:
        if text == "fail":
            raise ValueError("what")
        return {"...": [], "float": [0.5], "minus": [-1]}.get(text, [5])

    with pytest.raises((DataError, UsageError), match=said):
        fk.run("fedavg", clients=[data, GOOD], tokenizer=odd, length=4, model=Bag, **QUICK)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"clients": [GOOD], "tokenizer": words}, "a tokenizer needs length=, the number of tokens"),
        ({"clients": [GOOD], "length": 4}, "length=4 would change nothing"),
        ({"clients": [GOOD], "tokenizer": words, "length": 0}, "length=0: give the number of tokens"),
        ({"clients": [GOOD], "tokenizer": "bert", "length": 4}, "tokenizer is a str: give a tokenizers.Tokenizer"),
        ({"tokenizer": words, "length": 4}, "a tokenizer needs texts"),
        ({"data": "digits", "tokenizer": words, "length": 4}, "data='digits' has no texts for a tokenizer"),
        ({"clients": [GOOD], "tokenizer": words, "length": 4, "label": "y"}, "label='y' would change nothing"),
        ({"clients": [GOOD], "tokenizer": words, "length": 4, "impute": "local"}, "impute='local' would change"),
        ({"clients": [GOOD]}, "samples of type"),
    ],
)
def test_what_does_not_go_together_is_said(settings: dict[str, Any], said: str) -> None:
    with pytest.raises((DataError, UsageError), match=said):
        fk.run("fedavg", model=Bag, **{**QUICK, **settings})


def test_methods_are_compared_on_the_same_texts() -> None:
    texts = {"tokenizer": words, "length": 4}
    results, table = fk.compare(["fedavg", "fedper"], clients=[GOOD + BAD] * 2, model=Bag, **texts, **QUICK)
    assert [row["method"] for row in table] == ["fedavg", "fedper"]
    assert all(r.predict(["good"], 0).shape == (1,) for r in results)


def test_a_length_that_the_special_tokens_fill() -> None:
    with pytest.raises(UsageError, match="length=1 is too short for the tokens that the tokenizer adds"):
        Texts(library(), 1)(["bad"], "here")


def test_models_say_what_they_take() -> None:
    result = fk.run("fedavg", clients=[GOOD + BAD], tokenizer=words, length=4, model=Bag, **QUICK)
    with pytest.raises(DataError, match="a single str; give a list of texts"):
        result.predict("good", 0)
    with pytest.raises(DataError, match="the samples: sample 0 is no text"):
        result.predict([3], 0)
    with pytest.raises(DataError, match="give a list of texts, or a dictionary with an array of each"):
        result.personal(0)(torch.zeros(2, 3))
    with pytest.raises(DataError, match="the samples have the columns text, label: give the texts alone"):
        result.predict(pd.DataFrame(rows(GOOD)), 0)


def test_a_column_of_many_words_points_to_the_tokenizer() -> None:
    many = pd.DataFrame({"text": [f"text {i}" for i in range(1200)], "label": [0, 1] * 600})
    with pytest.raises(DataError, match=r"1,200 different words.*Texts need a tokenizer, from Python"):
        fk.run("fedavg", clients=[many], **QUICK)
