"""The zoo has the papers' sizes, gives as many outputs as there are classes, and is drawn from the seed alone."""

from __future__ import annotations

import pytest
import torch

from fedkin.compute.layout import Layout
from fedkin.errors import UsageError
from fedkin.models import MODELS, build, default_model

TEXT = ("fasttext", "char-lstm", "char-lstm-small")


@pytest.mark.parametrize(
    ("name", "shape", "classes", "body", "head"),
    [
        ("cnn-512", (1, 28, 28), 10, 576_896, 5_130),
        ("cnn-512", (3, 32, 32), 100, 873_408, 51_300),
        ("cnn-512", (3, 64, 64), 102, 5_592_000, 52_326),
        ("fedcap-cifar", (3, 32, 32), 10, 156_160, 650),
        ("fedcap-emnist", (1, 28, 28), 62, 78_912, 7_998),
        ("harcnn", (3, 1, 200), 6, 203_392, 390),
        ("mlp", (1, 8, 8), 10, 64 * 128 + 128, 1_290),
    ],
)
def test_networks_have_the_papers_sizes(name: str, shape: tuple[int, ...], classes: int, body: int, head: int) -> None:
    layout = Layout.of(build(name, shape, classes), "head")
    assert (layout.size("body"), layout.size("head")) == (body, head)


def test_resnet18_has_eleven_million_parameters() -> None:
    layout = Layout.of(build("resnet18", (3, 224, 224), 10), "head")
    assert layout.parameters == 11_181_642
    assert layout.size("head") == 5_130
    assert layout.size("buffers") == 9_600  # a mean and a variance for each of 4,800 channels


@pytest.mark.parametrize("name", list(MODELS))
def test_a_network_depends_on_its_seed_alone(name: str) -> None:
    shape, vocabulary = ((5,), 20) if name in TEXT else ((3, 32, 32), 0)
    state = torch.get_rng_state()
    layout = Layout.of(build(name, shape, 3, vocabulary), "head")
    first, again, other = (layout.row(build(name, shape, 3, vocabulary, seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_padding_does_not_count_in_the_mean_of_words() -> None:
    model = build("fasttext", (5,), 3, 20)
    short, padded = torch.tensor([[3, 7]]), torch.tensor([[3, 0, 7, 0, 0]])
    assert torch.allclose(model(short), model(padded), atol=1e-6)
    assert torch.isfinite(model(torch.zeros(1, 5, dtype=torch.int64))).all()  # a text without words


@pytest.mark.parametrize(
    ("shape", "vocabulary", "name"),
    [
        ((1, 28, 28), 0, "cnn-512"),
        ((1, 8, 8), 0, "mlp"),
        ((3, 1, 200), 0, "harcnn"),
        ((30,), 0, "mlp"),
        ((20,), 100, "fasttext"),
    ],
)
def test_the_default_network_fits_the_data(shape: tuple[int, ...], vocabulary: int, name: str) -> None:
    assert default_model(shape, vocabulary) == name
    build(name, shape, 2, vocabulary)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: build("cnn-521", (1, 28, 28), 10), "did you mean 'cnn-512'"),
        (lambda: build("cnn-512", (1, 8, 8), 10), "height >= 16"),
        (lambda: build("cnn-512", (30,), 10), "'mlp' takes any shape"),
        (lambda: build("fasttext", (20,), 4), "no vocabulary"),
    ],
)
def test_mistakes_are_named(make, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()
