"""Personal models for use elsewhere: FedKin's own file (safetensors), or ONNX.

An ONNX file is complete: it takes samples as they are (pixels as bytes, token ids, features) and normalises them
itself; the rows of a table are double numbers, categories as the numbers of their words (they are in its metadata) and
missing values as NaN. Its outputs are `logits` and `probabilities`; what the classes are called is in its metadata.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedkin.errors import FedKinError, UsageError, unknown
from fedkin.models import MODELS, Ready, Samples
from fedkin.use.model_file import Card, Personal, load, save

if TYPE_CHECKING:
    from fedkin.config import Config
    from fedkin.rounds import Result

FORMATS = {"safetensors": ".safetensors", "onnx": ".onnx"}
TYPES = {"uint8": torch.uint8, "float32": torch.float32, "int64": torch.int64}


def formats(text: str) -> list[str]:
    """The formats in a list with commas."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    for part in found:
        if part not in FORMATS:
            raise unknown("format", part, FORMATS)
    if not found:
        raise UsageError(f"--format {text!r}: give {' or '.join(FORMATS)}, or both with a comma between")
    return list(dict.fromkeys(found))


def write(model: Personal, stem: str | Path, wanted: Sequence[str]) -> list[Path]:
    """One model in each format, as STEM.safetensors and STEM.onnx."""
    paths = {kind: Path(f"{stem}{FORMATS[kind]}") for kind in wanted}
    return [to_onnx(model, p) if kind == "onnx" else save(p, model.module, model.card) for kind, p in paths.items()]


def convert(path: str | Path, wanted: Sequence[str], to: str | Path | None = None) -> list[Path]:
    """A model file in other formats, beside it or in another folder."""
    path = Path(path).expanduser()
    folder = Path(to).expanduser() if to is not None else path.parent
    if "safetensors" in wanted and folder.resolve() == path.parent.resolve():
        raise UsageError(f"{path} is a safetensors file already; choose --format onnx, or another folder with --to")
    return write(load(path), folder / path.stem, wanted)


# ---------------------------------------------------------------- from a run


def export(
    run: str | Result,
    to: str | Path,
    *,
    clients: Sequence[int | str] | None = None,
    formats: Sequence[str] = ("safetensors",),
    runs_dir: str | Path | None = None,
) -> list[Path]:
    """Personal models as files in the folder `to`, CLIENT.safetensors or CLIENT.onnx; returns them.

    `run` is a result, or a run's name or folder. `clients`: which, by number or name (default: all). `formats`:
    "safetensors", "onnx" (needs the extra onnx), or both. `fk.load_model` reads a safetensors file; so does `fedkin
    predict`."""
    if isinstance(formats, str) or not formats:
        raise UsageError(f"formats={formats!r}: a list with {' or '.join(FORMATS)}, or both")
    for kind in formats:
        if kind not in FORMATS:
            raise unknown("format", kind, FORMATS)
    wanted = "all" if clients is None else ",".join(map(str, clients))
    if isinstance(run, str):
        return export_run(run, wanted, to, formats, runs_dir)
    card = card_of(run._samples, run.config, Path(run.run).name if run.run else "")
    chosen = range(len(run.per_client)) if clients is None else [run._number(client) for client in clients]
    return from_result(run, card, chosen, to, formats)


def export_run(
    run: str, client: str, to: str | Path, wanted: Sequence[str], runs_dir: str | Path | None = None
) -> list[Path]:
    """Models of a run as its newest checkpoint has them. The run is only read; it may still be going on."""
    from fedkin.runs.catalogue import Catalogue
    from fedkin.runs.restore import as_it_was

    folder = Catalogue(runs_dir).locate(run)
    clients = which(folder.info.names, client)
    job = as_it_was(folder)
    return from_result(job.result(), card_of(job.samples, job.config, folder.info.id), clients, to, wanted)


def card_of(samples: Samples, config: Config, run: str) -> Card:
    """What a run's models say about themselves."""
    return Card(
        config.model if config.model in MODELS else None,
        samples.shape,
        samples.classes,
        samples.kind,
        samples.vocabulary,
        config.head,
        samples.mean,
        samples.std,
        samples.class_names,
        samples.columns,
        config.method,
        run,
        seed=config.seed,
        parts=samples.parts,
        targets=samples.targets,
    )


def from_result(
    result: Result, card: Card, clients: Sequence[int], to: str | Path, wanted: Sequence[str]
) -> list[Path]:
    """The personal models of these clients, each under its client's name."""
    to, written, used = Path(to).expanduser(), list[Path](), set[str]()
    for client in clients:
        name = result.per_client[client].name
        ready = result.personal(client)
        prepared = next(iter(ready.samples.preparations), None)
        own = replace(card, site=name, round=result.kept.round, preparation=prepared)
        stem = file_name(name)
        stem = f"{stem}-{client}" if stem in used else stem
        used.add(stem)
        written += write(Personal(own, ready.network), to / stem, wanted)
    return written


def which(names: Sequence[str], wanted: str) -> list[int]:
    """Clients by name or number, with commas between, or all of them."""
    if wanted == "all":
        return list(range(len(names)))
    place = {**{str(i): i for i in range(len(names))}, **{name: i for i, name in enumerate(names)}}
    found = [part.strip() for part in wanted.split(",") if part.strip()]
    for part in found:
        if part not in place:
            raise unknown("client", part, [*names, "all"])
    if not found:
        raise UsageError(f"--client {wanted!r}: give a client's name or number, several with commas, or all")
    return list(dict.fromkeys(place[part] for part in found))


def file_name(name: str) -> str:
    """A client's name as a file name: anything but letters, digits, dots and dashes becomes a dash."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name).lstrip(".")[:100] or "client"


# ---------------------------------------------------------------- ONNX


class _Complete(nn.Module):
    """From samples as they are to logits and probabilities; for other targets than classes to the outputs alone."""

    def __init__(self, model: Personal) -> None:
        super().__init__()
        self.model = Ready(model.module, model.card.samples)

    def forward(self, samples: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        found: Tensor = self.model(samples)
        if self.model.samples.targets != "classes":
            return found
        logits = found[:, : self.model.samples.classes]
        return logits, torch.softmax(logits, 1)


def to_onnx(model: Personal, path: str | Path) -> Path:
    """Write an ONNX file; any number of samples at a time."""
    try:
        import onnx
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(f"ONNX needs the package {error.name}: pip install 'fedkin[onnx]'") from error
    path = Path(path).expanduser()
    prepared = model.card.preparation
    example = torch.zeros(2, *model.card.shape, dtype=TYPES[model.card.kind])
    if prepared is not None:
        example = torch.zeros(2, len(prepared.columns), dtype=torch.float64)
    whole = _Complete(model).eval()
    try:
        with _quiet():
            program = torch.onnx.export(
                whole,
                (example,),
                dynamo=True,
                verbose=False,
                input_names=["samples"],
                output_names=["logits", "probabilities"] if model.card.targets == "classes" else ["outputs"],
                dynamic_shapes={"samples": {0: torch.export.Dim("n")}},
            )
    except Exception as error:  # own networks can do what no exporter follows, and it fails in many ways
        raise FedKinError(f"this network cannot be written as ONNX: {error}") from error
    if program is None:
        raise FedKinError("this network cannot be written as ONNX")
    made = program.model_proto
    onnx.helper.set_model_props(made, {"fedkin": json.dumps(asdict(model.card))})
    path.parent.mkdir(parents=True, exist_ok=True)
    number, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with open(number, "wb") as file:
        file.write(made.SerializeToString())
    os.replace(partial, path)
    return path


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter reports on packages that nobody here needs."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
