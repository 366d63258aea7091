"""One client's model as a file: `personal.safetensors`, its weights by name and what is needed to use them.

The description (which network, for which samples, how they are normalised, what the classes are called, where the
weights come from) is JSON in the file's own header. Reading trusts nothing: no code is in the file and none is run;
a network is rebuilt by its name in FedKin's list, or filled in where the caller brings one; names, shapes and types
must fit it exactly before any memory is set aside, and every number must be finite.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedkin.compute.layout import constants
from fedkin.data.dataset import Array, Dataset
from fedkin.data.targets import TARGETS
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.models import MODELS, Ready, Samples, begun, build
from fedkin.models.inputs import one_tensor
from fedkin.models.ready import WORDS, Kind
from fedkin.parts import Part
from fedkin.preparation import Preparation
from fedkin.rounds import inference

FORMAT = 1
KEY = "fedkin"
LONGEST = 1 << 20  # characters of the description
LARGEST_SAMPLE = 1 << 26  # numbers in a sample


@dataclass(frozen=True)
class Card:
    """What a model file says about itself. `model` None: the user's own network, which the file does not hold."""

    model: str | None
    shape: tuple[int, ...]
    classes: int
    kind: Kind = "float32"
    vocabulary: int = 0
    head: str | None = None
    mean: float = 0.5
    std: float = 0.5
    class_names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()  # what the features are called, where they came as a table
    method: str = ""
    run: str = ""
    site: str = ""
    round: int = 0
    seed: int = 0
    parts: tuple[Part, ...] = ()  # of a sample, where the network has several inputs
    targets: str = "classes"  # the kind of what its outputs stand for
    preparation: Preparation | None = None  # how the rows of a table become the features

    @classmethod
    def of(cls, dataset: Dataset, model: str | None, **facts: Any) -> Card:
        """For a model trained on data like these; `facts`: head, method, run, site, round, seed."""
        return cls(
            model,
            dataset.shape,
            dataset.classes,
            dataset.x.dtype.name,  # type: ignore[arg-type]
            dataset.vocabulary,
            mean=dataset.mean,
            std=dataset.std,
            class_names=tuple(dataset.class_names),
            columns=dataset.columns,
            parts=dataset.parts,
            targets=dataset.targets,
            preparation=dataset.preparations[0] if len(dataset.preparations) == 1 else None,
            **facts,
        )

    @property
    def samples(self) -> Samples:
        """What goes in, and what comes out."""
        normal = (self.mean, self.std, self.vocabulary, self.parts, self.targets, self.columns)
        prepared = () if self.preparation is None else (self.preparation,)
        return Samples(self.shape, self.kind, self.classes, self.class_names, *normal, prepared)

    def names(self) -> tuple[str, ...]:
        """What each output stands for."""
        return self.samples.names()


@dataclass(frozen=True, eq=False)
class Personal:
    """A model ready for use."""

    card: Card
    module: nn.Module

    def outputs(self, x: Any) -> Tensor:
        """What the model gives, [n, ...]. Samples as they came, not normalised."""
        return inference.outputs(Ready(self.module, self.card.samples), x)

    def probabilities(self, x: Any, batch: int = 256) -> Array:
        """What the model gives each class, [n, classes]; rows sum to 1. Samples as they came, not normalised."""
        return inference.probabilities(Ready(self.module, self.card.samples), x, batch)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The network's parameters and statistics by name; buffers that are the same for all come with the network."""
    own, fixed = {**dict(model.named_parameters()), **dict(model.named_buffers())}, constants(model)
    return {name: value.detach() for name, value in own.items() if value.is_floating_point() and name not in fixed}


def save(path: str | Path, model: nn.Module | Mapping[str, Tensor], card: Card) -> Path:
    """Write the file in one step: a reader sees the old one or the new one, never half of it.

    Only its owner may read it: weights tell something about the data they were trained on."""
    path = Path(path).expanduser()
    model = model.network if isinstance(model, Ready) else model
    given = tensors_of(model) if isinstance(model, nn.Module) else model
    tensors = {name: value.detach().to("cpu", torch.float32).contiguous().clone() for name, value in given.items()}
    for name, value in tensors.items():
        if not value.isfinite().all():
            raise FedKinError(f"{path}: {name!r} holds a value that is not finite; such a model is of no use")
    description = {"format": FORMAT, **asdict(card)}
    path.parent.mkdir(parents=True, exist_ok=True)
    number, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(number)
    try:
        save_file(tensors, partial, metadata={KEY: json.dumps(description, allow_nan=False)})
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
    return path


def load(path: str | Path, model: nn.Module | None = None) -> Personal:
    """The model in a file, in evaluation mode. A network that is not FedKin's own must be given as `model`."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UsageError(f"{path}: no such model file")
    try:
        with safe_open(str(path), framework="pt") as file:
            card = _card(path, file.metadata())
            network = _fitting(path, card, {n: file.get_slice(n) for n in file.keys()}, model)  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is no safetensors file, or a damaged one ({error})") from error
    own = tensors_of(network)
    with torch.no_grad():
        for name, value in tensors.items():
            if name not in own:
                continue  # a constant that an earlier FedKin wrote
            if not value.isfinite().all():
                raise DataError(f"{path}: {name!r} holds a value that is not finite; the file cannot be used")
            own[name].copy_(value)
    return Personal(card, network.eval())


def read_card(path: str | Path) -> Card:
    """What a file says about itself, without its weights."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise UsageError(f"{path}: no such model file")
    try:
        with safe_open(str(path), framework="np") as file:
            return _card(path, file.metadata())
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is no safetensors file, or a damaged one ({error})") from error


# ---------------------------------------------------------------- checks


def _fitting(path: Path, card: Card, slices: Mapping[str, Any], given: nn.Module | None) -> nn.Module:
    """The network the weights belong to. The shapes are compared before it takes any memory."""
    if given is not None:
        _compare(path, given, slices)
        return one_tensor(given, card.parts)
    if card.model is None:
        raise UsageError(
            f"{path} holds the weights of your own network: load it in Python with "
            "fedkin.load_model(path, model=YourNetwork())"
        )
    if card.model not in MODELS:
        raise DataError(
            f"{path}: the network {card.model!r} is not known here: run the file of yours that registers it "
            "with --plugin FILE.py, or name a network in it, --plugin FILE.py:NAME, or update FedKin"
        )
    entry = MODELS[card.model]
    try:
        if entry.given is not None:  # a user's own code, which may need real samples to find its sizes
            if math.prod(card.shape) > LARGEST_SAMPLE:
                raise ValueError(f"samples of shape {card.shape}")
            example = torch.zeros(2, *card.shape, dtype=torch.int64 if card.kind == "int64" else torch.float32)
            of_data = (card.shape, card.classes, card.vocabulary, card.seed)
            network = begun(entry, *of_data, parts=card.parts, example=example)[0]
            _compare(path, network, slices)
            return network
        with torch.device("meta"):
            _compare(path, build(card.model, card.shape, card.classes, card.vocabulary), slices)
        return build(card.model, card.shape, card.classes, card.vocabulary, card.seed)
    except (UsageError, RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path}: its description does not make a network ({error})") from error


def _compare(path: Path, network: nn.Module, slices: Mapping[str, Any]) -> None:
    wanted = tensors_of(network)
    missing, extra = sorted(set(wanted) - set(slices)), sorted(set(slices) - set(wanted) - constants(network))
    if missing or extra:
        what = f"lacks {missing[0]!r}" if missing else f"has {extra[0]!r}, which the network has not"
        raise DataError(f"{path} {what}: the weights belong to another network")
    for name, tensor in wanted.items():
        shape, kind = tuple(slices[name].get_shape()), slices[name].get_dtype()
        if shape != tuple(tensor.shape) or kind != "F32":
            raise DataError(
                f"{path}: {name!r} is {kind} of shape {shape}, the network wants F32 of shape {tuple(tensor.shape)}"
            )


def _card(path: Path, metadata: Mapping[str, str] | None) -> Card:
    text = (metadata or {}).get(KEY)
    if text is None:
        raise DataError(f"{path} holds weights, but not FedKin's description of them; it is no personal model")
    if len(text) > LONGEST:
        raise DataError(f"{path}: its description is longer than {LONGEST} characters")
    try:
        values = json.loads(text)
        version = values.pop("format")
        if version != FORMAT:
            raise DataError(f"{path}: format {version!r}, this FedKin reads {FORMAT}; use a matching version")
        values.setdefault("columns", [])  # files from before columns went by name
        values.setdefault("parts", [])  # and from before there were any
        values.setdefault("targets", "classes")  # and other targets
        values.setdefault("preparation", None)  # and tables that are prepared
        if set(values) != {f.name for f in fields(Card)}:
            raise ValueError(f"keys {', '.join(sorted(values))}")
        for key in ("shape", "class_names", "columns"):
            values[key] = tuple(values[key])
        values["parts"] = tuple(Part(p["name"], tuple(p["shape"]), p["dtype"]) for p in values["parts"])
        if values["preparation"] is not None:
            values["preparation"] = Preparation.of(values["preparation"])
        card = Card(**values)
        _check_card(card)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: its description is damaged ({error})") from error
    return card


def _check_card(card: Card) -> None:
    """ValueError for anything that no file written by `save` says."""
    texts = [card.method, card.run, card.site, *card.class_names, *card.columns, card.model or "", card.head or ""]
    whole = {"classes": (1, 10**6), "vocabulary": (0, 10**8), "round": (0, 10**9), "seed": (0, 2**63)}
    for name, (low, high) in whole.items():
        value = getattr(card, name)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{name}={value!r}")
    if not 1 <= len(card.shape) <= 4 or any(type(n) is not int or not 1 <= n <= 10**6 for n in card.shape):
        raise ValueError(f"shape={card.shape!r}")
    for part in card.parts:
        whole_shape = all(type(n) is int and 1 <= n <= 10**6 for n in part.shape)
        if part.dtype not in ("int64", "float32", "bool") or not whole_shape or not isinstance(part.name, str):
            raise ValueError(f"part={part!r}")
    if card.parts and card.shape != (sum(part.width for part in card.parts),):
        raise ValueError(f"shape {card.shape}, but parts of {sum(part.width for part in card.parts)} numbers")
    if card.targets not in TARGETS:
        raise ValueError(f"targets={card.targets!r}")
    if card.kind not in WORDS or (card.kind == "int64" and not card.parts) != bool(card.vocabulary):
        raise ValueError(f"kind={card.kind!r} with vocabulary={card.vocabulary!r}")
    if any(not isinstance(text, str) or len(text) > 1000 for text in texts):
        raise ValueError("a name that is no text, or longer than 1000 characters")
    if card.class_names and len(card.class_names) != card.classes:
        raise ValueError(f"{card.classes} classes, but {len(card.class_names)} class names")
    if card.columns and card.shape != (len(card.columns),):
        raise ValueError(f"shape {card.shape}, but {len(card.columns)} columns")
    if card.preparation is not None and card.columns != card.preparation.inputs():
        raise ValueError(f"columns {card.columns!r}, but the table's make {card.preparation.inputs()!r}")
    for name in ("mean", "std"):
        value = getattr(card, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r}")
    if card.std <= 0:
        raise ValueError(f"std={card.std!r}")
