"""The networks of the papers. Each has its classifier in `head`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedkin.errors import UsageError
from fedkin.models.registered import MODELS, ModelEntry, Shape


def default_model(shape: Shape, vocabulary: int) -> str:
    """The network a user most likely means for data of this shape."""
    if vocabulary:
        return "fasttext"
    if len(shape) == 3 and shape[1] > 1:
        return "cnn-512" if min(shape[1:]) >= 16 else "mlp"
    if len(shape) == 3:
        return "harcnn"
    return "mlp"


def _add(name: str, about: str, paper: str) -> Callable[[Callable[[Shape, int, int], nn.Module]], None]:
    def add(make: Callable[[Shape, int, int], nn.Module]) -> None:
        MODELS.register(name)(ModelEntry(make, about, paper))

    return add


def _need_image(name: str, shape: Shape, smallest: tuple[int, int]) -> None:
    if len(shape) != 3 or shape[1] < smallest[0] or shape[2] < smallest[1]:
        raise UsageError(
            f"model {name!r} needs samples of shape (channels, height >= {smallest[0]}, width >= {smallest[1]}), "
            f"got {shape}; 'mlp' takes any shape"
        )


class ConvNet(nn.Module):
    """conv, ReLU, pool, twice; one hidden layer; a linear head. No padding; pooling halves."""

    def __init__(self, shape: Shape, classes: int, channels: tuple[int, int], hidden: int, kernel: tuple[int, int]):
        super().__init__()
        pool = (2 if kernel[0] > 1 else 1, 2)
        first, second = channels
        sizes = [((size - k + 1) // p - k + 1) // p for size, k, p in zip(shape[1:], kernel, pool, strict=True)]
        self.body = nn.Sequential(
            nn.Conv2d(shape[0], first, kernel),
            nn.ReLU(),
            nn.MaxPool2d(pool),
            nn.Conv2d(first, second, kernel),
            nn.ReLU(),
            nn.MaxPool2d(pool),
            nn.Flatten(),
            nn.Linear(second * sizes[0] * sizes[1], hidden),
            nn.ReLU(),
        )
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


@_add("cnn-512", "two 5x5 convolutions (32, 64), 512 hidden units", "C-PFL, PFedCS, FedPKDA; PFLlib's FedAvgCNN")
def _cnn512(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    _need_image("cnn-512", shape, (16, 16))
    return ConvNet(shape, classes, (32, 64), 512, (5, 5))


@_add("fedcap-cifar", "cnn-512 with 64 hidden units", "FedCAP, CIFAR-10")
def _fedcap_cifar(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    _need_image("fedcap-cifar", shape, (16, 16))
    return ConvNet(shape, classes, (32, 64), 64, (5, 5))


@_add("fedcap-emnist", "two 5x5 convolutions (16, 32), 128 hidden units", "FedCAP, EMNIST")
def _fedcap_emnist(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    _need_image("fedcap-emnist", shape, (16, 16))
    return ConvNet(shape, classes, (16, 32), 128, (5, 5))


@_add("harcnn", "two (1,5) convolutions (32, 64) over time, 64 hidden units", "FedCAP, WISDM")
def _harcnn(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    _need_image("harcnn", shape, (1, 16))
    return ConvNet(shape, classes, (32, 64), 64, (1, 5))


class MLP(nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


@_add("mlp", "one hidden layer of 128 units, any input", "FedKin")
def _mlp(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    return MLP(torch.Size(shape).numel(), 128, classes)


class Linear(nn.Module):
    """One linear layer. Of two outputs the first starts at zero: the softmax of (0, z) is the sigmoid of z, and the
    difference of the two, which is all that counts, starts as one such unit does."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.flat, self.head = nn.Flatten(), nn.Linear(inputs, outputs)
        if outputs == 2:
            with torch.no_grad():
                self.head.weight[0], self.head.bias[0] = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.flat(x))
        return out


@_add("linear", "one linear layer: logistic regression, or Cox's linear model", "FLamby, Heart-Disease and TCGA-BRCA")
def _linear(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    return Linear(torch.Size(shape).numel(), classes)


class CharLSTM(nn.Module):
    """Characters as vectors of 8 numbers, LSTM layers, and a score for each character at every position."""

    def __init__(self, vocabulary: int, classes: int, hidden: int, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.lstm = nn.LSTM(8, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return out


def _need_tokens(name: str, vocabulary: int) -> None:
    if not vocabulary:
        raise UsageError(f"model {name!r} needs token ids: the data set has no vocabulary; try data 'shakespeare'")


@_add("char-lstm", "two LSTM layers of 256 units over characters", "McMahan et al. 2017; LEAF, Shakespeare")
def _char_lstm(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    _need_tokens("char-lstm", vocabulary)
    return CharLSTM(vocabulary, classes, 256, 2)


@_add("char-lstm-small", "one LSTM layer of 64 units over characters, for a CPU", "FedKin")
def _char_lstm_small(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    _need_tokens("char-lstm-small", vocabulary)
    return CharLSTM(vocabulary, classes, 64, 1)


class FastText(nn.Module):
    """Mean of word vectors over the words present (id 0 is padding), one hidden layer, a linear head."""

    def __init__(self, vocabulary: int, features: int, classes: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, features)
        self.hidden = nn.Linear(features, features)
        self.head = nn.Linear(features, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        present = (tokens != 0).unsqueeze(-1).float()
        total = (self.embedding(tokens) * present).sum(1)
        out: Tensor = self.head(self.hidden(total / present.sum(1).clamp(min=1.0)))
        return out


@_add("fasttext", "mean of word vectors (512), one hidden layer", "Joulin et al. 2017; C-PFL's text tasks")
def _fasttext(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    if not vocabulary:
        raise UsageError("model 'fasttext' needs text: the data set has no vocabulary; try data 'agnews'")
    return FastText(vocabulary, 512, classes)


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.downsample = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        out: Tensor = self.relu(self.bn2(self.conv2(y)) + self.downsample(x))
        return out


class ResNet18(nn.Module):
    """He et al. 2016. The ImageNet stem is a 7x7 stride-2 convolution and a pool; the CIFAR stem one 3x3."""

    def __init__(self, channels: int, classes: int, stem: str):
        super().__init__()
        if stem == "imagenet":
            first = [nn.Conv2d(channels, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
            self.stem = nn.Sequential(*first, nn.MaxPool2d(3, 2, 1))
        else:
            self.stem = nn.Sequential(nn.Conv2d(channels, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        widths = [64, 64, 128, 256, 512]
        blocks: list[nn.Module] = []
        for stage in range(4):
            stride = 1 if stage == 0 else 2
            blocks.append(BasicBlock(widths[stage], widths[stage + 1], stride))
            blocks.append(BasicBlock(widths[stage + 1], widths[stage + 1], 1))
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(512, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.pool(self.blocks(self.stem(x))))
        return out


@_add("resnet18", "ResNet-18, ImageNet stem, random weights", "CO-PFL; PFedCS on Tiny-ImageNet")
def _resnet18(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    _need_image("resnet18", shape, (16, 16))
    return ResNet18(shape[0], classes, "imagenet")


@_add("resnet18-cifar", "ResNet-18, 3x3 stem for small images, random weights", "He et al. 2016")
def _resnet18_cifar(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
    _need_image("resnet18-cifar", shape, (8, 8))
    return ResNet18(shape[0], classes, "cifar")
