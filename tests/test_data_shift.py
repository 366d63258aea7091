"""Corruptions: pure, bounded, stronger with severity, and one per client."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import ndimage

from fedkin.data import CORRUPTIONS, Dataset, apply_shift, make_split
from fedkin.errors import DataError, UsageError

NOT_MONOTONE = {"elastic_transform", "glass_blur", "frost"}
"""By the published constants: a weaker affine map, more blur after the shuffle, a darker picture under ice."""


@pytest.fixture(scope="module")
def pictures():
    rng = np.random.default_rng(0)
    smooth = ndimage.gaussian_filter(rng.random((24, 3, 32, 32)), (0, 0, 2, 2))
    low, high = smooth.min(axis=(1, 2, 3), keepdims=True), smooth.max(axis=(1, 2, 3), keepdims=True)
    return (20 + 180 * (smooth - low) / (high - low)).astype(np.uint8)


def change(kind, pictures, severity):
    out = CORRUPTIONS[kind](pictures, severity, np.random.default_rng(0))
    return np.abs(out.astype(float) - pictures).mean()


def test_there_are_the_fifteen_of_cifar10_c():
    assert len(CORRUPTIONS) == 15


@pytest.mark.parametrize("kind", list(CORRUPTIONS))
def test_a_corruption_changes_pixels_only_and_repeats_itself(kind, pictures):
    before = pictures.copy()
    one, two = (CORRUPTIONS[kind](pictures, 3, np.random.default_rng(5)) for _ in range(2))
    assert one.shape == pictures.shape
    assert one.dtype == np.uint8
    assert (one == two).all()
    assert (pictures == before).all()
    assert (one != pictures).any()


@pytest.mark.parametrize("kind", list(CORRUPTIONS))
@pytest.mark.parametrize("shape", [(1, 28, 28), (1, 8, 8), (3, 20, 30)])
def test_other_shapes_work_too(kind, shape):
    x = np.random.default_rng(0).integers(0, 256, (3, *shape)).astype(np.uint8)
    assert CORRUPTIONS[kind](x, 5, np.random.default_rng(0)).shape == x.shape


@pytest.mark.parametrize("kind", sorted(set(CORRUPTIONS) - NOT_MONOTONE))
def test_more_severe_changes_more(kind, pictures):
    changes = [change(kind, pictures, severity) for severity in range(1, 6)]
    assert all(b >= a * 0.99 for a, b in pairwise(changes)), changes
    assert changes[4] > 1.2 * changes[0]


@pytest.mark.parametrize("kind", sorted(NOT_MONOTONE))
def test_the_others_change_something_at_every_severity(kind, pictures):
    assert min(change(kind, pictures, severity) for severity in range(1, 6)) > 0.5


def test_published_constants_on_flat_pictures():
    grey = np.full((2, 3, 32, 32), 100, np.uint8)
    rng = np.random.default_rng(0)
    assert (CORRUPTIONS["brightness"](grey, 4, rng) == 151).all()  # 100 + 0.2 * 255
    assert (CORRUPTIONS["contrast"](grey, 5, rng) == 100).all()
    for blur in ("defocus_blur", "motion_blur", "zoom_blur", "glass_blur", "pixelate", "elastic_transform"):
        assert np.abs(CORRUPTIONS[blur](grey, 5, rng).astype(int) - 100).max() <= 1, blur
    assert np.abs(CORRUPTIONS["jpeg_compression"](grey, 5, rng).astype(int) - 100).max() <= 3
    many = np.full((50, 3, 32, 32), 128, np.uint8)
    assert CORRUPTIONS["gaussian_noise"](many, 5, rng).std() == pytest.approx(25.5, rel=0.02)
    assert (CORRUPTIONS["impulse_noise"](many, 5, rng) != 128).mean() == pytest.approx(0.07, rel=0.05)
    assert CORRUPTIONS["shot_noise"](many, 5, rng).std() == pytest.approx(255 * np.sqrt(128 / 255 / 50), rel=0.02)


def test_colour_survives_jpeg_and_brightness():
    red = np.zeros((1, 3, 16, 16), np.uint8)
    red[:, 0] = 200
    for kind in ("jpeg_compression", "brightness"):
        out = CORRUPTIONS[kind](red, 1, np.random.default_rng(0)).astype(int).mean(axis=(0, 2, 3))
        assert out[0] > 180
        assert out[1:].max() < 20


@pytest.mark.parametrize("severity", [0, 6])
def test_severity_out_of_range(severity, pictures):
    with pytest.raises(UsageError, match=f"severity {severity}: give 1 to 5"):
        CORRUPTIONS["fog"](pictures, severity, np.random.default_rng(0))


def test_each_client_has_its_own_corruption(pictures):
    data = Dataset("toy", pictures, np.arange(24) % 2, 2)
    split = make_split(data, 4, "iid", seed=0, samples_per_client=5)
    shifted = apply_shift(data, split, ["contrast", "fog"], 5, seed=1)
    mine = np.concatenate([split.train[2], split.validation[2], split.test[2]])
    expected = CORRUPTIONS["contrast"](pictures[mine], 5, np.random.default_rng(0))
    assert (shifted.x[mine] == expected).all()
    nobody = np.setdiff1d(np.arange(24), np.concatenate([*split.train, *split.test]))
    assert (shifted.x[nobody] == pictures[nobody]).all()
    assert "generated" in shifted.note
    assert (shifted.x == apply_shift(data, split, ["contrast", "fog"], 5, seed=1).x).all()
    assert (shifted.x != apply_shift(data, split, ["contrast", "fog"], 5, seed=2).x).any()
    assert apply_shift(data, split, "all", 1).x.shape == data.x.shape


def test_clients_do_not_share_their_noise():
    data = Dataset("toy", np.full((8, 1, 8, 8), 128, np.uint8), np.zeros(8, np.int64), 1)
    split = make_split(data, 2, "iid", seed=0, samples_per_client=4)
    noisy = apply_shift(data, split, "gaussian_noise", 5).x
    assert (noisy[split.train[0][0]] != noisy[split.train[1][0]]).any()


def test_shift_needs_pictures_and_known_names(pictures):
    series = Dataset("toy", np.zeros((4, 2), np.float32), np.zeros(4, np.int64), 1)
    with pytest.raises(DataError, match="uint8"):
        apply_shift(series, make_split(series, 2, "iid", 0), "all", 1)
    data = Dataset("toy", pictures, np.zeros(24, np.int64), 1)
    with pytest.raises(UsageError, match="did you mean 'fog'"):
        apply_shift(data, make_split(data, 2, "iid", 0), "fogg", 1)
