"""Feature shift: clients that see the same classes through different lenses.

The fifteen corruptions of CIFAR-10-C (Hendrycks and Dietterich, ICLR 2019) with the constants published for CIFAR, as
pure functions on uint8 images [n, C, H, W], grey or colour, in numpy and scipy alone. What they make is named
"generated", because it is not the published set: another random stream, a plain JPEG round trip, frost without the
original photographs (see ``frost``), and results rounded rather than cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import scipy
from numpy.typing import NDArray

from fedkin.data.dataset import Dataset
from fedkin.data.sample_keys import row_keys
from fedkin.data.split import Split
from fedkin.errors import DataError, UsageError
from fedkin.registry import Registry

Images = NDArray[np.uint8]
Floats = NDArray[np.floating[Any]]
Rng = np.random.Generator
Corruption = Callable[[Images, int, Rng], Images]

CORRUPTIONS: Registry[Corruption] = Registry("corruption")
AT_ONCE = 1024
"""Images worked on at a time: bounds memory, and is part of how the random stream is used."""


def corruption(function: Callable[[Floats, int, Rng], Floats]) -> Corruption:
    """Registers a function on floats in [0, 1] (with the severity as 0..4) as one on uint8 images (severity 1..5)."""

    @wraps(function)
    def on_bytes(images: Images, severity: int, rng: Rng) -> Images:
        if severity not in range(1, 6):
            raise UsageError(f"severity {severity}: give 1 to 5")
        if images.dtype != np.uint8 or images.ndim != 4:
            raise DataError(f"corruptions need uint8 images [n, C, H, W], found {images.dtype} of {images.shape}")
        out = np.empty_like(images)
        for start in range(0, len(images), AT_ONCE):
            part = slice(start, start + AT_ONCE)
            result = function(images[part].astype(np.float32) / 255, severity - 1, rng)
            out[part] = np.rint(np.clip(result, 0, 1) * 255)
        return out

    CORRUPTIONS.register(function.__name__)(on_bytes)
    return on_bytes


def apply_shift(
    dataset: Dataset, split: Split, kinds: Sequence[str] | str = "all", severity: int = 3, seed: int = 0
) -> Dataset:
    """The same data with all rows of client i under corruption i mod the number of kinds, in their order.

    Each client has its own random stream, so a client's pictures do not depend on who else takes part.
    """
    names = list(CORRUPTIONS) if kinds == "all" else [kinds] if isinstance(kinds, str) else list(kinds)
    if not names:
        raise UsageError("no corruption is named: give some, or 'all'")
    functions = [CORRUPTIONS[name] for name in names]
    if dataset.x.dtype != np.uint8:
        raise DataError(f"feature shift needs images with uint8 pixels; {dataset.name} holds {dataset.x.dtype}")
    x = dataset.x.copy()
    for client in range(split.clients):
        rows = np.concatenate([split.train[client], split.validation[client], split.test[client]])
        rng = np.random.Generator(np.random.PCG64([seed, client]))
        x[rows] = functions[client % len(functions)](dataset.x[rows], severity, rng)
    note = f"generated: {', '.join(names) if len(names) <= 3 else f'{len(names)} corruptions'} at severity {severity}"
    keys = row_keys(dataset.x) if dataset.keys is None else dataset.keys
    return replace(dataset, x=x, keys=keys, note=f"{dataset.note}; {note}" if dataset.note else note)


@corruption
def gaussian_noise(x: Floats, level: int, rng: Rng) -> Floats:
    scale = (0.04, 0.06, 0.08, 0.09, 0.10)[level]
    return x + scale * rng.standard_normal(x.shape, dtype=np.float32)


@corruption
def shot_noise(x: Floats, level: int, rng: Rng) -> Floats:
    """Poisson noise: few photons."""
    photons = (500, 250, 100, 75, 50)[level]
    return (rng.poisson(x * photons) / photons).astype(np.float32)


@corruption
def impulse_noise(x: Floats, level: int, rng: Rng) -> Floats:
    """Salt and pepper."""
    amount = (0.01, 0.02, 0.03, 0.05, 0.07)[level]
    hit = rng.random(x.shape, dtype=np.float32) < amount
    salt = rng.random(x.shape, dtype=np.float32) < 0.5
    return np.where(hit, salt.astype(np.float32), x)


@corruption
def defocus_blur(x: Floats, level: int, rng: Rng) -> Floats:
    """A disk, smoothed at its edge by a 3 x 3 Gaussian."""
    radius, smooth = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))[level]
    reach = np.arange(-3, 4)
    disk = (reach[:, None] ** 2 + reach**2 <= radius**2).astype(np.float32)
    edge = np.exp(-(np.arange(-1, 2) ** 2) / (2 * smooth**2))
    edge /= edge.sum()
    kernel = scipy.ndimage.convolve(disk / disk.sum(), np.outer(edge, edge), mode="constant")
    blurred: Floats = scipy.ndimage.convolve(x, kernel[None, None].astype(np.float32), mode="mirror")
    return blurred


@corruption
def glass_blur(x: Floats, level: int, rng: Rng) -> Floats:
    """Each pixel becomes a random near one, between two slight blurs, as behind frosted glass.

    The published code means to swap pixels, but what it does is copy from up to one row above and one column to the
    left, sparing the first two of each; the published images come from that, so it is done here.
    """
    sigma, passes = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[level]
    x = _smooth(x, sigma)
    grid = np.mgrid[: x.shape[2], : x.shape[3]]
    movable = (grid >= 2).all(axis=0)
    images, channels = np.ogrid[: len(x), : x.shape[1]]
    for _ in range(passes):
        rows, cols = grid[:, None] + movable * rng.integers(-1, 1, (2, len(x), *x.shape[2:]))
        x = x[images[..., None, None], channels[..., None, None], rows[:, None], cols[:, None]]
    return _smooth(x, sigma)


@corruption
def motion_blur(x: Floats, level: int, rng: Rng) -> Floats:
    radius, sigma = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))[level]
    return _streak(x, radius, sigma, rng.uniform(-45, 45, len(x)))


@corruption
def zoom_blur(x: Floats, level: int, rng: Rng) -> Floats:
    steps = (6, 11, 16, 21, 26)[level]
    zoomed = sum((_zoom(x, 1 + i / 100) for i in range(steps)), np.zeros_like(x))
    return (x + zoomed) / (steps + 1)


@corruption
def snow(x: Floats, level: int, rng: Rng) -> Floats:
    """Flakes drawn out by the wind, once and turned by half a circle, over a whitened picture."""
    loc, scale, zoom, threshold, radius, sigma, keep = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[level]
    noise = loc + scale * rng.standard_normal((len(x), 1, *x.shape[2:]), dtype=np.float32)
    flakes = _zoom(noise, zoom)
    flakes = np.clip(np.where(flakes < threshold, 0, flakes), 0, 1).astype(np.float32)
    flakes = _streak(flakes, int(radius), sigma, rng.uniform(-135, -45, len(x)))
    white = np.maximum(x, _grey(x) * 1.5 + 0.5)
    snowed: Floats = keep * x + (1 - keep) * white + flakes + flakes[:, :, ::-1, ::-1]
    return snowed


@corruption
def frost(x: Floats, level: int, rng: Rng) -> Floats:
    """Ice over the picture, mixed with the published weights.

    The original lays one of six photographs of frost over the image; they may not be passed on, so the ice is
    generated: the ridges of two fractal surfaces at different scales, slightly blue. Numbers on this corruption are
    therefore not comparable with those on the published CIFAR-10-C.
    """
    keep, amount = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[level]
    coarse, fine = (1 - np.abs(2 * _plasma(len(x), x.shape[2:], decay, rng) - 1) for decay in (3.0, 1.5))
    ice = 0.35 + 0.65 * (0.6 * coarse**3 + 0.4 * fine**2)
    tint = np.array([0.85, 0.95, 1.0], np.float32) if x.shape[1] == 3 else np.ones(x.shape[1], np.float32)
    return keep * x + amount * ice * tint[:, None, None]


@corruption
def fog(x: Floats, level: int, rng: Rng) -> Floats:
    amount, decay = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))[level]
    brightest = x.max(axis=(1, 2, 3), keepdims=True)
    haze = amount * _plasma(len(x), x.shape[2:], decay, rng)
    foggy: Floats = (x + haze) * brightest / (brightest + amount)
    return foggy


@corruption
def brightness(x: Floats, level: int, rng: Rng) -> Floats:
    """Adds to the value of HSV: hue and saturation stay, so all channels grow by the same factor."""
    value = x.max(axis=1, keepdims=True)
    brighter = np.clip(value + (0.05, 0.1, 0.15, 0.2, 0.3)[level], 0, 1)
    factor = brighter / np.where(value > 0, value, 1)
    brightened: Floats = np.where(value > 0, x * factor, brighter)
    return brightened


@corruption
def contrast(x: Floats, level: int, rng: Rng) -> Floats:
    mean = x.mean(axis=(2, 3), keepdims=True)
    flatter: Floats = (x - mean) * (0.75, 0.5, 0.4, 0.3, 0.15)[level] + mean
    return flatter


@corruption
def elastic_transform(x: Floats, level: int, rng: Rng) -> Floats:
    """A random affine map, then smooth random displacements. The published constants trade the one for the other as
    severity grows, so the mean change of a pixel does not grow with it."""
    size = min(x.shape[2:])
    move, sigma, affine = (
        size * np.array(c)
        for c in ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))[level]
    )
    rows, cols = _affine_grid(len(x), x.shape[2:], affine, rng)
    warped = _sample(x, rows, cols)
    noise = rng.uniform(-1, 1, (2, len(x), *x.shape[2:]))
    shift = scipy.ndimage.gaussian_filter(noise, (0, 0, sigma, sigma), mode="reflect", truncate=3) * move
    grid = np.mgrid[: x.shape[2], : x.shape[3]]
    return _sample(warped, grid[0] + shift[0], grid[1] + shift[1])


@corruption
def pixelate(x: Floats, level: int, rng: Rng) -> Floats:
    factor = (0.95, 0.9, 0.85, 0.75, 0.65)[level]
    sizes = [(side, max(1, int(side * factor))) for side in x.shape[2:]]
    rows, cols = (_box(side, small) @ _box(small, side) for side, small in sizes)
    return rows.T @ x @ cols


@corruption
def jpeg_compression(x: Floats, level: int, rng: Rng) -> Floats:
    """The loss of a JPEG file: colour at half resolution, 8 x 8 cosine blocks rounded by the standard tables."""
    quality = (80, 65, 58, 50, 40)[level]
    if x.shape[1] != 3:
        return _quantise(x * 255 - 128, LUMA, quality) / 255 + 128 / 255
    planes = np.einsum("ij,njhw->nihw", TO_YCC, x * 255).astype(np.float32)
    luma = _quantise(planes[:, :1] - 128, LUMA, quality) + 128
    height, width = x.shape[2:]
    chroma = np.pad(planes[:, 1:], ((0, 0), (0, 0), (0, height % 2), (0, width % 2)), mode="edge")
    halved = chroma.reshape(len(x), 2, chroma.shape[2] // 2, 2, chroma.shape[3] // 2, 2).mean(axis=(3, 5))
    doubled = _quantise(halved, CHROMA, quality).repeat(2, axis=2).repeat(2, axis=3)[:, :, :height, :width]
    restored = np.concatenate([luma, doubled], axis=1)
    colours: Floats = np.einsum("ij,njhw->nihw", np.linalg.inv(TO_YCC), restored) / 255
    return colours


TO_YCC = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])
LUMA = np.array(
    [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ]
)
CHROMA = np.full((8, 8), 99)
CHROMA[:4, :4] = [[17, 18, 24, 47], [18, 21, 26, 66], [24, 26, 56, 99], [47, 66, 99, 99]]


def _quantise(planes: Floats, table: NDArray[np.int64], quality: int) -> Floats:
    """Planes [n, c, H, W] through 8 x 8 cosine blocks with the table of that quality (Annex K, libjpeg's scaling)."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = np.clip((table * scale + 50) // 100, 1, 255)
    n, c, height, width = planes.shape
    padded = np.pad(planes, ((0, 0), (0, 0), (0, -height % 8), (0, -width % 8)), mode="edge")
    blocks = padded.reshape(n, c, padded.shape[2] // 8, 8, padded.shape[3] // 8, 8)
    coefficients = scipy.fft.dctn(blocks, axes=(3, 5), norm="ortho") / steps[:, None, :]
    restored: Floats = scipy.fft.idctn(np.rint(coefficients) * steps[:, None, :], axes=(3, 5), norm="ortho")
    return restored.reshape(padded.shape)[:, :, :height, :width]


def _smooth(x: Floats, sigma: float) -> Floats:
    smooth: Floats = scipy.ndimage.gaussian_filter(x, (0, 0, sigma, sigma), mode="nearest")
    return smooth


def _grey(x: Floats) -> Floats:
    weights = TO_YCC[0].astype(np.float32) if x.shape[1] == 3 else np.full(x.shape[1], 1 / x.shape[1], np.float32)
    grey: Floats = np.einsum("c,nchw->nhw", weights, x)[:, None]
    return grey


def _streak(x: Floats, radius: int, sigma: float, degrees: NDArray[np.float64]) -> Floats:
    """ImageMagick's motion blur: half a Gaussian along one direction per image, edges repeated."""
    weights = np.exp(-(np.arange(2 * radius + 1) ** 2) / (2 * sigma**2))
    weights /= weights.sum()
    height, width = x.shape[2:]
    out = np.zeros_like(x)
    for step, weight in enumerate(weights):
        down = np.rint(step * np.sin(np.deg2rad(degrees))).astype(np.int64)
        right = np.rint(step * np.cos(np.deg2rad(degrees))).astype(np.int64)
        rows = np.clip(np.arange(height) + down[:, None], 0, height - 1)[:, None, :, None]
        cols = np.clip(np.arange(width) + right[:, None], 0, width - 1)[:, None, None, :]
        images, channels = np.ogrid[: len(x), : x.shape[1]]
        out += np.float32(weight) * x[images[..., None, None], channels[..., None, None], rows, cols]
    return out


def _zoom(x: Floats, factor: float) -> Floats:
    """The middle of the picture, enlarged to the full size by linear interpolation (as two matrix products)."""
    rows, cols = (_zoom_matrix(side, factor) for side in x.shape[2:])
    zoomed: Floats = rows @ x @ cols.T
    return zoomed


def _zoom_matrix(side: int, factor: float) -> Floats:
    crop = int(np.ceil(side / factor))
    enlarged = max(side, round(crop * factor))
    where = (np.arange(side) + (enlarged - side) // 2) * (crop - 1) / max(enlarged - 1, 1)
    low = np.minimum(where.astype(np.int64), max(crop - 2, 0))
    matrix = np.zeros((side, side), np.float32)
    start = (side - crop) // 2
    np.add.at(matrix, (np.arange(side), start + low), 1 - (where - low))
    np.add.at(matrix, (np.arange(side), start + np.minimum(low + 1, crop - 1)), where - low)
    return matrix


def _box(inside: int, outside: int) -> Floats:
    """The matrix [inside, outside] of PIL's box filter: mean of the pixels whose centres fall in, else the nearest."""
    scale = inside / outside
    width = max(scale, 1.0)
    centres = (np.arange(outside) + 0.5) * scale
    offset = (np.arange(inside)[:, None] + 0.5 - centres) / width
    weights = ((offset > -0.5) & (offset <= 0.5)).astype(np.float32)
    normalised: Floats = weights / weights.sum(axis=0)
    return normalised


def _plasma(n: int, shape: tuple[int, ...], decay: float, rng: Rng) -> Floats:
    """Fractal clouds in [0, 1], [n, 1, H, W]: midpoints are the mean of four neighbours plus noise that shrinks by
    ``decay`` at every halving (diamond-square on a torus)."""
    side = 1 << max(1, int(np.ceil(np.log2(max(shape)))))
    clouds = np.zeros((n, side, side))
    step, noise = side, 100.0
    while step >= 2:
        half = step // 2
        corners = clouds[:, ::step, ::step]
        rows = corners + np.roll(corners, -1, 1)
        clouds[:, half::step, half::step] = _wobble(rows + np.roll(rows, -1, 2), noise, rng)
        middle = clouds[:, half::step, half::step]
        across = middle + np.roll(middle, 1, 1) + corners + np.roll(corners, -1, 2)
        down = middle + np.roll(middle, 1, 2) + corners + np.roll(corners, -1, 1)
        clouds[:, ::step, half::step] = _wobble(across, noise, rng)
        clouds[:, half::step, ::step] = _wobble(down, noise, rng)
        step, noise = half, noise / decay
    clouds -= clouds.min(axis=(1, 2), keepdims=True)
    clouds /= clouds.max(axis=(1, 2), keepdims=True)
    return clouds[:, None, : shape[0], : shape[1]].astype(np.float32)


def _wobble(total: NDArray[np.float64], noise: float, rng: Rng) -> NDArray[np.float64]:
    return total / 4 + noise * rng.uniform(-noise, noise, total.shape)


def _affine_grid(
    n: int, shape: tuple[int, ...], reach: float, rng: Rng
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where each pixel comes from under an affine map that moves three points by up to ``reach``."""
    centre, third = np.array(shape) // 2, min(shape) // 3
    corners = np.array([centre + third, [centre[0] + third, centre[1] - third], centre - third], np.float64)
    moved = corners + rng.uniform(-reach, reach, (n, 3, 2))
    back = np.linalg.pinv(np.concatenate([moved, np.ones((n, 3, 1))], axis=2)) @ corners
    grid = np.mgrid[: shape[0], : shape[1]]
    targets = np.stack([grid[0], grid[1], np.ones(shape)], axis=-1)
    sources = np.einsum("hwk,nkc->cnhw", targets, back)
    return sources[0], sources[1]


def _sample(x: Floats, rows: NDArray[np.float64], cols: NDArray[np.float64]) -> Floats:
    """Linear interpolation at real positions [n, H, W], mirrored at the edges."""
    images, channels = np.ogrid[: len(x), : x.shape[1]]
    images, channels = images[..., None, None], channels[..., None, None]
    top, left = np.floor(rows).astype(np.int64), np.floor(cols).astype(np.int64)
    down, right = (rows - top).astype(np.float32)[:, None], (cols - left).astype(np.float32)[:, None]

    def at(row: NDArray[np.int64], col: NDArray[np.int64]) -> Floats:
        return x[images, channels, _mirror(row, x.shape[2])[:, None], _mirror(col, x.shape[3])[:, None]]

    upper = at(top, left) * (1 - right) + at(top, left + 1) * right
    lower = at(top + 1, left) * (1 - right) + at(top + 1, left + 1) * right
    return upper * (1 - down) + lower * down


def _mirror(index: NDArray[np.int64], side: int) -> NDArray[np.int64]:
    period = max(1, 2 * (side - 1))
    folded = np.mod(index, period)
    return np.minimum(folded, period - folded) if side > 1 else np.zeros_like(index)
