"""Networks that are none of the papers', for the benchmarks: as people write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkin.models import lora


class ViT(nn.Module):
    """A small vision transformer: patches, a class token, learnt positions, PyTorch's own encoder."""

    def __init__(self, classes: int = 10, image: int = 32, patch: int = 4, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        scores: Tensor = self.head(self.norm(self.encoder(x)[:, 0]))
        return scores


class LSTM(nn.Module):
    """Series to classes by the last state."""

    def __init__(self, classes: int = 10, features: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(features, hidden, batch_first=True), nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        _, (state, _) = self.lstm(x)
        scores: Tensor = self.head(state[-1])
        return scores


class Depthwise(nn.Module):
    """Four depthwise-separable blocks with BatchNorm."""

    def __init__(self, classes: int = 10, channels: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        self.blocks = nn.Sequential(*(self._block(channels) for _ in range(blocks)))
        self.pool, self.flat = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.head = nn.Linear(channels, classes)

    @staticmethod
    def _block(channels: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels, channels, 3, 1, 1, groups=channels, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.flat(self.pool(self.blocks(self.stem(x)))))
        return scores


class Block(nn.Module):
    """A layer of BERT: attention and a wide part, each with LayerNorm behind it."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down, self.last = nn.Linear(width, inner), nn.Linear(inner, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (of(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for of in (self.query, self.key, self.value))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm(x + self.out(seen))
        found: Tensor = self.last(x + self.down(F.gelu(self.up(x))))
        return found


class Bert(nn.Module):
    """BERT of MiniLM's size, and a classifier on the mean of all positions."""

    def __init__(
        self,
        classes: int = 10,
        words: int = 30522,
        length: int = 64,
        width: int = 384,
        layers: int = 6,
        heads: int = 12,
        inner: int = 1536,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width, heads, inner) for _ in range(layers)))
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]])
        scores: Tensor = self.head(self.blocks(x).mean(1))
        return scores


def minilm() -> nn.Module:
    """Its trunk frozen, updates of rank 8 beside all queries and values."""
    return lora(Bert(), 8, ["*.query", "*.value"], head="head")
