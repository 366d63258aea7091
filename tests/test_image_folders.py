"""Images in folders, of each client or dealt: one size and mode, and whatever is wrong is said with the file."""

from __future__ import annotations

import io
import struct
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.cli.commands import main  # noqa: F401  registers the commands
from fedkin.config import make_config
from fedkin.data import Reading, Shown
from fedkin.data.own import read_site
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.rounds import load_data
from fedkin.use.model_file import Card, load, save
from fedkin.use.predict import read_pictures

Image = pytest.importorskip("PIL.Image")

SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "device": "cpu", "way": "each", "model": "mlp"}


def picture(file: Path, mode: str = "RGB", size: tuple[int, int] = (12, 10), colour: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(colour)
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = rng.integers(0, 256, (size[1], size[0], bands), np.uint8)
    Image.fromarray(pixels[..., 0] if bands == 1 else pixels, mode).save(file)


@pytest.fixture
def sites(tmp_path: Path) -> Path:
    places = product(("oslo", "rome"), ("cat", "dog"), range(6))
    for number, (site, kind, i) in enumerate(places):
        picture(tmp_path / "sites" / site / kind / f"{i}.png", colour=number)
    (tmp_path / "sites" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "sites" / "oslo" / "Thumbs.db").write_bytes(b"x")
    return tmp_path / "sites"


def read(path: Path, **settings: Any) -> Any:
    return load_data(make_config({"data": str(path), **settings}))


def test_a_folder_for_each_client(sites: Path) -> None:
    dataset, split = read(sites)
    assert split.names == ("oslo", "rome")
    assert split.partition == "natural"
    assert dataset.class_names == ("cat", "dog")
    assert dataset.x.shape == (24, 3, 10, 12)
    expected = np.moveaxis(np.asarray(Image.open(sites / "oslo" / "dog" / "0.png")), -1, 0)
    assert (dataset.x[6] == expected).all()
    assert fk.run("fedper", data=str(sites), **SMALL).config.clients == 2
    with pytest.raises(UsageError, match="partition='iid' would change nothing"):
        read(sites, partition="iid")


def test_a_folder_for_each_class_is_dealt(sites: Path) -> None:
    dataset, split = read(sites / "oslo", clients=3, partition="iid")
    assert (split.clients, len(dataset), dataset.classes) == (3, 12, 2)
    done = CliRunner().invoke(app, ["split", "--data", str(sites / "oslo"), "--clients", "2", "--partition", "iid"])
    assert done.exit_code == 0, done.output


def test_sizes_and_modes_are_brought_to_one(sites: Path) -> None:
    picture(sites / "rome" / "cat" / "9.jpg", size=(30, 20))
    picture(sites / "rome" / "cat" / "a.png", "LA")
    with pytest.raises(DataError, match=r"rome/cat/9.jpg is colour of 20x30 pixels, .*oslo/cat/0.png colour of 10x12"):
        read(sites)
    with pytest.raises(DataError, match=r"rome/cat/a.png is neither plain grey nor RGB but LA: image_mode='rgb'"):
        read(sites, image_size="8")
    dataset, _ = read(sites, image_size="8x16", image_mode="grey")
    assert dataset.x.shape == (26, 1, 8, 16)
    whole = Image.open(sites / "oslo" / "cat" / "1.png").convert("L").resize((16, 8), Image.Resampling.BILINEAR)
    assert (dataset.x[1, 0] == np.asarray(whole)).all()
    for size in ("x", "8x8x8", "0", "9999", "8x", "-3"):
        with pytest.raises(UsageError, match=r"image_size=.*write one number"):
            read(sites, image_size=size)


def test_a_turned_photograph_is_put_upright(tmp_path: Path) -> None:
    (tmp_path / "s" / "c").mkdir(parents=True)
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "s" / "c" / "a.png", exif=exif)
    x, _ = read_pictures(tmp_path / "s", _like((1, 4, 3)))
    assert (x[0, 0] == np.rot90(np.arange(12).reshape(3, 4), -1)).all()


def _like(shape: tuple[int, ...]) -> Any:
    from fedkin.models import Samples

    return Samples(shape, "uint8", 2)


def colours(width: int, height: int, bits: int, rows: bytes = b"") -> bytes:
    """A PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, bits, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def good_bytes(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.zeros((10, 12, 3), np.uint8)).save(stream, kind)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.png", b"", "bad.png cannot be read as an image"),
        ("bad.png", b"nonsense", "bad.png cannot be read as an image"),
        ("bad.png", good_bytes("PNG")[:-30], "bad.png cannot be read as an image"),
        ("bad.jpg", good_bytes("JPEG")[:300], "bad.jpg cannot be read as an image"),
        ("bad.png", good_bytes("GIF"), "bad.png cannot be read as an image"),
        (
            "bad.png",
            colours(100_000, 100_000, 8),
            "bad.png (has 100000x100000 pixels|cannot be read as an image .*decompression bomb)",
        ),
        ("bad.txt", b"hello", "bad.txt is no image"),
        ("bad.gif", good_bytes("GIF"), "bad.gif is no image"),
    ],
)
def test_a_file_that_is_no_image_is_named(sites: Path, name: str, content: bytes, message: str) -> None:
    (sites / "rome" / "dog" / name).write_bytes(content)
    with pytest.raises(DataError, match=f"rome/dog/{message}"):
        read(sites)


def test_places_that_are_wrong_are_named(sites: Path) -> None:
    (sites / "rome" / "emu").mkdir()
    with pytest.raises(DataError, match=r"rome/emu holds no image: put some there, or remove"):
        read(sites)
    (sites / "rome" / "emu" / "deep.png").mkdir()
    with pytest.raises(DataError, match=r"deep.png is no image"):
        read(sites)
    (sites / "rome" / "emu" / "deep.png").rmdir()
    (sites / "rome" / "emu").rmdir()
    (sites / "rome" / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"rome/notes.txt: expected a folder for each class in .*rome, found a file"):
        read(sites)
    (sites / "rome" / "notes.txt").unlink()
    (sites / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"notes.txt: expected a folder for each client"):
        read(sites)
    (sites / "notes.txt").unlink()
    for name in ("nobody", "zoe"):
        (sites / name).mkdir()
        with pytest.raises(DataError, match=f"{name} holds no folder: expected a folder for each class"):
            read(sites)
        (sites / name).rmdir()


def test_deep_images_are_refused(sites: Path) -> None:
    Image.fromarray(np.zeros((10, 12), np.uint16)).save(sites / "rome" / "cat" / "deep.png")
    with pytest.raises(DataError, match=r"deep.png has values of more than 8 bits"):
        read(sites, image_mode="grey")


def test_colours_of_16_bits_are_refused(sites: Path) -> None:
    """Pillow gives them as 8 bits and says nothing: what a PNG is stands in its header."""
    deep = sites / "rome" / "cat" / "deep.png"
    deep.write_bytes(colours(12, 10, 16, bytes(10 * (1 + 12 * 6))))
    assert Image.open(deep).mode == "RGB"
    with pytest.raises(DataError, match=r"deep.png has values of more than 8 bits .16.; save it with 8 bits"):
        read(sites, image_mode="rgb")


def test_a_png_that_does_not_begin_with_its_header_is_refused(sites: Path) -> None:
    """Its depth is not where one looks for it, and Pillow reads it nevertheless."""
    deep = sites / "rome" / "cat" / "deep.png"
    whole, note = colours(12, 10, 16, bytes(10 * (1 + 12 * 6))), b"tEXta\0" + b"\x08" * 40
    early = struct.pack(">I", len(note) - 4) + note + struct.pack(">I", zlib.crc32(note))
    deep.write_bytes(whole[:8] + early + whole[8:])
    assert Image.open(deep).mode == "RGB"
    with pytest.raises(DataError, match=r"deep.png does not begin with the header of a PNG; save it again"):
        read(sites, image_mode="rgb")


def test_damage_is_always_said_with_the_file(sites: Path) -> None:
    rng = np.random.default_rng(0)
    for kind, suffix in (("PNG", ".png"), ("JPEG", ".jpg")):
        for _ in range(25):
            damaged = bytearray(good_bytes(kind))
            for _ in range(4):
                damaged[rng.integers(len(damaged))] = rng.integers(256)
            file = sites / "rome" / "cat" / f"odd{suffix}"
            file.write_bytes(bytes(damaged))
            said = outcome(sites)
            assert said == "fine" or f"odd{suffix}" in said
            file.unlink()


def outcome(path: Path) -> str:
    try:
        read(path)
    except FedKinError as error:
        return str(error)
    return "fine"


def test_without_pillow_the_extra_is_named(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"images need Pillow: pip install 'fedkin\[images\]'"):
        read(sites)


def test_a_site_brings_a_folder(sites: Path) -> None:
    own = read_site(sites / "oslo", "oslo", Reading(shown=Shown((6, 6), "grey"))).parts[0]
    assert own.x.shape == (12, 1, 6, 6)
    assert set(own.y.tolist()) == {"cat", "dog"}


def test_new_images_are_predicted(sites: Path, tmp_path: Path) -> None:
    result = fk.run("fedper", data=str(sites), **SMALL)
    dataset, _ = read(sites)
    file = save(tmp_path / "m.safetensors", result.personal("rome"), Card.of(dataset, "mlp", site="rome"))
    like = load(file).card.samples
    x, labels = read_pictures(sites / "rome", like)
    assert labels is not None
    assert (x == dataset.x[12:]).all()
    done = CliRunner().invoke(app, ["predict", "--model", str(file), "--data", str(sites / "rome"), "--json"])
    assert done.exit_code == 0, done.output
    assert len(result.predict(x, "rome")) == 12
    picture(tmp_path / "new" / "big.jpg", size=(40, 40))
    with pytest.raises(DataError, match=r"images of shape \(3, 40, 40\), the model takes \(3, 10, 12\); --convert"):
        read_pictures(tmp_path / "new", like)
    for place in ("new", "new/big.jpg"):
        ask = ["predict", "--model", str(file), "--data", str(tmp_path / place), "--convert", "--json"]
        done = CliRunner().invoke(app, ask)
        assert done.exit_code == 0, done.output
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="none holds no image"):
        read_pictures(tmp_path / "none", like)
