"""A network that takes samples as people have them: what a personal model is once it is in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedkin.errors import DataError, UsageError
from fedkin.parts import Array, Part, pack, words_of
from fedkin.preparation import Column, Preparation, Texts

Kind = Literal["uint8", "float32", "int64"]
WORDS = {"uint8": "pixels (uint8)", "float32": "numbers (float32)", "int64": "token ids (int64)"}


@dataclass(frozen=True)
class Samples:
    """What the samples of a network are, how they become its input, and what its outputs stand for."""

    shape: tuple[int, ...]
    kind: Kind
    classes: int
    class_names: tuple[str, ...] = ()
    mean: float = 0.5
    std: float = 0.5
    vocabulary: int = 0
    parts: tuple[Part, ...] = ()
    targets: str = "classes"  # the kind of what the outputs stand for
    columns: tuple[str, ...] = ()  # what the features are called, where they came as a table
    preparations: tuple[Preparation, ...] = ()  # how a table's rows become them: for all clients, or for each
    texts: Texts | None = None  # how texts become them

    def of_client(self, client: int) -> Samples:
        """Those of one client."""
        return replace(self, preparations=(self.preparations[client],)) if len(self.preparations) > 1 else self

    @property
    def table(self) -> tuple[Column, ...]:
        """The columns of a table that such samples come in; none where they come in no table."""
        prepared = self.preparations[0].columns if self.preparations else ()
        return prepared or tuple(Column(name) for name in self.columns)

    def names(self) -> tuple[str, ...]:
        """What each output stands for."""
        return self.class_names or tuple(str(i) for i in range(self.classes))

    def packed(self, x: Mapping[str, Any]) -> Array:
        """Samples of several parts as one array."""
        if not self.parts:
            raise DataError("the model takes samples as one array, not as a dictionary")
        return pack(x, "the samples", self.parts)[0]

    def tokens(self, x: Any) -> Array:
        """Texts as one array."""
        if self.texts is None:
            raise DataError(f"the model takes a tensor, the samples are a {type(x).__name__}")
        return pack(self.texts(x, "the samples")[0], "the samples", self.parts)[0]

    def check(self, kind: str, shape: tuple[int, ...]) -> None:
        """DataError unless this is a batch of such samples; `kind`: a type's name."""
        if self.parts and tuple(shape[1:]) != self.shape:
            texts = "a list of texts, or " if self.texts is not None else ""
            raise DataError(f"the model takes {words_of(self.parts)}: give {texts}a dictionary with an array of each")
        if kind == self.kind and tuple(shape[1:]) == self.shape:
            return
        takes = f"the model takes {WORDS[self.kind]} of shape {self.shape} a sample"
        if tuple(shape) == self.shape:
            raise DataError(f"{takes}, and many at a time: make a batch of one of a single sample, x[None]")
        fix = ""
        if self.kind == "uint8" and tuple(shape[1:]) == self.shape:
            fix = "; give pixels as they are, 0 to 255: it normalises them itself (.network takes normalised ones)"
        raise DataError(f"{takes}, the data are {kind} of shape {tuple(shape[1:])}{fix}")


class Prepare(nn.Module):
    """A `Preparation` of rows as tensors."""

    source: Tensor
    code: Tensor
    mean: Tensor
    std: Tensor
    fill: Tensor

    def __init__(self, preparation: Preparation) -> None:
        super().__init__()
        self.width = len(preparation.columns)
        for name, values in preparation.tables().items():
            tensor = torch.from_numpy(values)
            self.register_buffer(name, tensor.to(torch.int64) if name == "source" else tensor, persistent=False)

    def forward(self, raw: Tensor) -> Tensor:
        if raw.dim() != 2 or raw.shape[1] != self.width:
            raise DataError(f"the model takes rows of {self.width} columns, the data are of shape {tuple(raw.shape)}")
        raw = raw.to(torch.float64)
        full = torch.where(raw.isnan(), self.fill, raw)[:, self.source]
        coded = (full == self.code).to(torch.float64)
        return torch.where(self.code.isnan(), (full - self.mean) / self.std, coded).to(torch.float32)


class Ready(nn.Module):
    """A personal model, ready for inference: samples as the data set had them in, class scores (logits) out.

    Pixels are uint8 [n, C, H, W] and are normalised here, (x / 255 - mean) / std, as they were in training; numbers and
    token ids go in as they are. A table's rows [n, columns] go in as numbers, categories as the numbers of their words
    and missing values as NaN, and are prepared here, as they were in training; so are texts, in a list. `network` is
    the network itself, `names` what its outputs stand for."""

    def __init__(self, network: nn.Module, samples: Samples) -> None:
        super().__init__()
        self.network, self.samples = network, samples
        if len(samples.preparations) > 1:
            raise UsageError(
                "each client prepares its table in its own way: say whose samples they are, of_client(...)"
            )
        self.prepare = Prepare(samples.preparations[0]) if samples.preparations else None
        self.scale, self.shift = 1.0 / (255.0 * samples.std), -samples.mean / samples.std

    @property
    def names(self) -> tuple[str, ...]:
        return self.samples.names()

    def forward(self, x: Tensor | Mapping[str, Any] | Sequence[str]) -> Tensor:
        if not isinstance(x, Tensor):
            x = torch.from_numpy(self.samples.packed(x) if isinstance(x, Mapping) else self.samples.tokens(x))
        if self.prepare is not None:
            prepared: Tensor = self.prepare(x)
            x = prepared
        if self.samples.kind == "float32" and x.is_floating_point():
            x = x.to(torch.float32)
        elif self.samples.kind == "int64" and not x.is_floating_point():
            x = x.to(torch.int64)
        self.samples.check(str(x.dtype).removeprefix("torch."), tuple(x.shape))
        if self.samples.kind == "uint8":
            x = x.to(torch.float32) * self.scale + self.shift
        logits: Tensor = self.network(x)
        return logits
