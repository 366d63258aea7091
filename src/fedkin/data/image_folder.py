"""Images in folders: a folder for each class, of one client or of all, in the order of their names.

    DIR/client/class/*.png    each client brings its own
    DIR/class/*.jpg           one data set, dealt to clients by a partition

Files whose names begin with a dot, and those that desktops leave (Thumbs.db, desktop.ini), are passed over; any other
that is no image is refused. All images need one size and one mode; settings bring them to one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from fedkin.data.dataset import Array, Dataset, encode_labels
from fedkin.errors import DataError, UsageError

SUFFIXES = (".png", ".jpg", ".jpeg")
LEFT_BY_DESKTOPS = ("Thumbs.db", "desktop.ini")
MOST_PIXELS = 50_000_000  # of one image, before it is unpacked
DEEP = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")  # more than a byte for each value
MODES = {"rgb": "RGB", "grey": "L"}
Mode = Literal["rgb", "grey"]
Where = TypeVar("Where")


@dataclass(frozen=True)
class Shown:
    """What all images are brought to; None: they are all alike, whatever that is."""

    size: tuple[int, int] | None = None  # height and width
    mode: Mode | None = None

    @classmethod
    def of(cls, size: str | None, mode: Mode | None) -> Shown:
        """From settings: 32, or 48x64 (height x width)."""
        if size is None:
            return cls(None, mode)
        parts = size.split("x")
        if len(parts) > 2 or not all(p.isdecimal() and 1 <= int(p) <= 4096 for p in parts):
            raise UsageError(f"image_size={size!r}: write one number, or HEIGHTxWIDTH, as in 32 or 48x64 (1 to 4096)")
        return cls((int(parts[0]), int(parts[-1])), mode)


AS_THEY_ARE = Shown()


def class_folders(path: Path) -> list[Path]:
    """The folders in a folder."""
    return sorted((p for p in _entries(path) if p.is_dir()), key=lambda p: p.name)


def holds_images(path: Path) -> bool:
    return any(p.suffix.lower() in SUFFIXES for p in _entries(path))


def _entries(path: Path) -> Iterator[Path]:
    try:
        found = list(path.iterdir())
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}): see who may open it") from error
    return (p for p in found if not p.name.startswith(".") and p.name not in LEFT_BY_DESKTOPS)


def images_of_clients(path: Path, shown: Shown) -> list[tuple[str, str, tuple[Array, Array]]]:
    """The clients of DIR/client/class/*: name, how errors speak of it, images and classes."""
    _only_folders(path, "a folder for each client")
    made, first = [], None
    for client in class_folders(path):
        x, y, first = read_classes(client, shown, first)
        made.append((client.name, f"{client}: client {client.name!r}", (x, y)))
    return made


def image_set(path: Path, shown: Shown) -> Dataset:
    """DIR/class/* as one data set."""
    x, labels, _ = read_classes(path, shown)
    y, names = encode_labels(labels)
    return Dataset(path.name, x, y, len(names), names)


def read_classes(path: Path, shown: Shown, first: Path | None = None) -> tuple[Array, Array, Path]:
    """Images and the names of their classes from DIR/class/*; and the file that says what all images are like."""
    _only_folders(path, "a folder for each class")
    images: list[Array] = []
    labels: list[str] = []
    for folder in class_folders(path):
        files = sorted(_entries(folder), key=lambda p: p.name)
        if not files:
            raise DataError(f"{folder} holds no image: put some there, or remove the folder")
        found, first = read_images(files, shown, first)
        images += found
        labels += [folder.name] * len(found)
    if first is None or not images:
        raise DataError(f"{path} holds no folder: expected a folder for each class with images in it")
    return np.stack(images), np.array(labels), first


def _only_folders(path: Path, what: str) -> None:
    stray = next((p for p in sorted(_entries(path)) if not p.is_dir()), None)
    if stray is not None:
        raise DataError(f"{stray}: expected {what} in {path}, found a file; move it elsewhere")


def read_images(files: Sequence[Path], shown: Shown, first: Path | None = None) -> tuple[list[Array], Path]:
    """Images [C, H, W] of one shape; `first`: whose shape that is, if not the first of these."""
    like = None if first is None else (first, read_image(first, shown))
    return alike(((file, read_image(file, shown)) for file in files), like)


def alike(named: Iterable[tuple[Where, Array]], like: tuple[Where, Array] | None = None) -> tuple[list[Array], Where]:
    """Images that come with where they are, if all have one shape, and the first of them; `like`: whose shape that is,
    if not the first one's."""
    made = []
    for where, image in named:
        like = (where, image) if like is None else like
        if image.shape != like[1].shape:
            raise DataError(
                f"{where} is {_said(image)}, {like[0]} {_said(like[1])}: image_size='32' (or '48x64') and "
                "image_mode='rgb' (or 'grey') bring all to one"
            )
        made.append(image)
    assert like is not None
    return made, like[0]


def _said(image: Array) -> str:
    return f"{'grey' if len(image) == 1 else 'colour'} of {image.shape[1]}x{image.shape[2]} pixels"


def read_image(file: Path, shown: Shown) -> Array:
    """One image as bytes [C, H, W]."""
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise UsageError(f"{file}: images need Pillow: pip install 'fedkin[images]'") from error
    if not file.is_file() or file.suffix.lower() not in SUFFIXES:
        raise DataError(f"{file} is no image (.png, .jpg or .jpeg); move it elsewhere")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large images are refused here, by their own bound
            with Image.open(file, formats=("PNG", "JPEG")) as opened:
                if opened.size[0] * opened.size[1] > MOST_PIXELS:
                    raise DataError(f"{file} has {opened.size[0]}x{opened.size[1]} pixels, more than {MOST_PIXELS:,}")
                if opened.format == "PNG" and _bits(file) > 8:  # Pillow would cut colours to 8
                    raise DataError(f"{file} has values of more than 8 bits ({_bits(file)}); save it with 8 bits")
                image = ImageOps.exif_transpose(opened)
                image.load()
    except DataError:
        raise
    except Exception as error:  # a damaged file can make a decoder fail in any way
        raise DataError(f"{file} cannot be read as an image ({error}); mend or remove it") from error
    return pixels(file, image, shown)


def _bits(file: Path) -> int:
    """Of each value, as the header of a PNG says."""
    with file.open("rb") as opened:
        begin = opened.read(25)
    if begin[12:16] != b"IHDR":  # decoders read on until they find it
        raise DataError(f"{file} does not begin with the header of a PNG; save it again")
    return begin[24]


def pixels(file: object, image: Any, shown: Shown) -> Array:
    """One of Pillow's images as bytes [C, H, W]; `file` is where it is, for errors."""
    if image.mode in DEEP:
        raise DataError(f"{file} has values of more than 8 bits ({image.mode}); save it with 8 bits")
    if shown.mode is not None:
        image = image.convert(MODES[shown.mode])
    elif image.mode not in MODES.values():
        raise DataError(
            f"{file} is neither plain grey nor RGB but {image.mode}: image_mode='rgb' (or 'grey') converts all images"
        )
    if shown.size is not None and image.size != shown.size[::-1]:
        image = image.resize(shown.size[::-1], 2)  # bilinear, over all pixels that become one
    found = np.asarray(image, np.uint8)
    return found[None] if found.ndim == 2 else np.ascontiguousarray(np.moveaxis(found, -1, 0))
