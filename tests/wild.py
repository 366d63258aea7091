"""Networks as people write them: none was written for FedKin. `NETWORKS` says what each takes and how it is to run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fedkin.compute.program import Program
from fedkin.compute.vmapped import Vmapped
from fedkin.models.inputs import one_tensor
from fedkin.parts import pack

CLASSES = 3


class ViT(nn.Module):
    """nn.TransformerEncoderLayer, a class token and positions as free parameters."""

    def __init__(self, image: int = 8, patch: int = 4, width: int = 16, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, width))
        self.pos = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], dim=1) + self.pos
        return self.head(self.norm(self.encoder(x)[:, 0]))


class LengthFirst(nn.Module):
    """A transformer as it is by default: [length, batch, width], dropout 0.1, sinusoids in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        at = torch.arange(7).unsqueeze(1) * torch.exp(torch.arange(0, 8, 2) * (-math.log(100.0) / 8))
        self.register_buffer("pe", torch.stack([at.sin(), at.cos()], 2).flatten(1).unsqueeze(1))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, src: Tensor) -> Tensor:
        x = self.embed(src).permute(1, 0, 2) * math.sqrt(8) + self.pe
        return self.fc(self.encoder(x).mean(0))


class SelfAttention(nn.Module):
    """Attention by hand (nanoGPT's), with dropout on the attention and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, 8), nn.Embedding(7, 8)
        self.c_attn, self.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.ln, self.drop, self.lm = nn.LayerNorm(8), nn.Dropout(0.1), nn.Linear(8, CLASSES)

    def forward(self, idx: Tensor) -> Tensor:
        b, t = idx.size()
        x = self.wte(idx) + self.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device))
        q, k, v = self.c_attn(self.ln(x)).split(8, dim=2)
        q, k, v = (y.view(b, t, 2, 4).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True)
        x = x + self.drop(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, 8)))
        return self.lm(x[:, -1])


class Bert(nn.Module):
    """Token ids and a mask, padding told to nn.MultiheadAttention; gives an object with logits."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm, self.classifier = nn.LayerNorm(8, eps=1e-12), nn.Linear(8, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        x = self.words(input_ids)
        y, _ = self.attention(x, x, x, key_padding_mask=attention_mask == 0)
        x = self.norm(x + y) * attention_mask.unsqueeze(-1)
        pooled = x.sum(1) / attention_mask.sum(1, keepdim=True)
        return SimpleNamespace(logits=self.classifier(pooled), hidden_states=None)


class LSTMClassifier(nn.Module):
    """The last hidden state of two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(self.embedding(text))
        return self.fc(hidden[-1])


class GRUSeries(nn.Module):
    """A GRU over a series, length first, all results averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.fc = nn.GRU(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.gru(x.transpose(0, 1))
        return self.fc(out.mean(dim=0))


class BiLSTM(nn.Module):
    """Both directions, their last states joined, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, bidirectional=True, batch_first=True)
        self.dropout, self.fc = nn.Dropout(0.3), nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.lstm(x)
        return self.fc(self.dropout(torch.cat((h[-2], h[-1]), dim=1)))


class Elman(nn.Module):
    """A plain RNN whose first state is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.zeros(1, 1, 8))
        self.rnn, self.fc = nn.RNN(5, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x, self.h0.repeat(1, x.size(0), 1))
        return self.fc(out[:, -1, :])


class AttentionPooling(nn.Module):
    """A GRU whose steps are weighed by a learnt vector; gives scores and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.w = nn.GRU(5, 8, batch_first=True), nn.Parameter(torch.randn(8))
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, _ = self.gru(x)
        a = torch.softmax(torch.tanh(h) @ self.w, dim=1)
        return self.fc((h * a.unsqueeze(-1)).sum(1)), a


class SpeechNet(nn.Module):
    """M5 on waveforms: Conv1d, BatchNorm1d."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.pool1 = nn.Conv1d(1, 4, 9, stride=2), nn.BatchNorm1d(4), nn.MaxPool1d(2)
        self.conv2, self.bn2 = nn.Conv1d(4, 8, 3, padding="same"), nn.BatchNorm1d(8)
        self.fc1 = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(F.relu(self.bn1(self.conv1(x))))
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.avg_pool1d(x, x.shape[-1]).permute(0, 2, 1)
        return F.log_softmax(self.fc1(x), dim=2).squeeze(1)


class Video(nn.Module):
    """Conv3d on small clips."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv3d(1, 4, 3, padding=1), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool3d(F.relu(self.conv(x.unsqueeze(1))), 2)
        return self.fc(x.mean((2, 3, 4)))


class Autoencoder(nn.Module):
    """Down, up with ConvTranspose2d, and a classifier on the code; gives a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ELU())
        self.decoder = nn.ConvTranspose2d(6, 3, 3, stride=2, padding=1, output_padding=1)
        self.fc = nn.Linear(6 * 16 + 3, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        code = self.encoder(x)
        image = torch.sigmoid(self.decoder(code))
        return {"image": image, "logits": self.fc(torch.cat([code.flatten(1), image.mean((2, 3))], 1))}


class MobileNet(nn.Module):
    """Depthwise-separable blocks with BatchNorm and ReLU6, an inverted residual."""

    def __init__(self, channels: int = 8, blocks: int = 2, first: int = 3) -> None:
        super().__init__()

        def block() -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(channels, channels, 3, 1, 1, groups=channels, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU6(inplace=True),
                nn.Conv2d(channels, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
            )

        self.stem = nn.Sequential(nn.Conv2d(first, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU6())
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.classifier = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.classifier(F.adaptive_avg_pool2d(x, 1).reshape(x.shape[0], -1))


class GroupNormResNet(nn.Module):
    """A residual block with GroupNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.n1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8)
        self.conv2, self.n2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8)
        self.down, self.fc = nn.Conv2d(3, 8, 1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out = self.n2(self.conv2(F.relu(self.n1(self.conv1(x)))))
        out = F.relu(out + self.down(x))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(out, (1, 1)), 1))


class Style(nn.Module):
    """Reflection padding and InstanceNorm with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")
        self.norm, self.act = nn.InstanceNorm2d(6, affine=True), nn.LeakyReLU(0.2)
        self.fc = nn.Linear(6 * 64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.norm(self.conv(x))).view(x.size(0), -1))


class DropPath(nn.Module):
    """Stochastic depth as in timm."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        if self.drop == 0.0 or not self.training:
            return x
        keep = 1 - self.drop
        random_tensor = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        return x * random_tensor.div_(keep)


class ConvNeXt(nn.Module):
    """Depthwise 5x5, LayerNorm on permuted channels, GELU, a layer scale, stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.dw = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 5, padding=2, groups=8)
        self.norm, self.up, self.down = nn.LayerNorm(8, eps=1e-6), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gamma, self.path = nn.Parameter(0.5 * torch.ones(8)), DropPath(0.2)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        y = self.gamma * self.down(F.gelu(self.up(y)))
        x = x + self.path(y.permute(0, 3, 1, 2))
        return self.head(x.mean([-2, -1]))


class TiedHead(nn.Module):
    """The embedding is the output layer; RMSNorm by hand with a learnt gain."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mix = nn.Embedding(20, 6), nn.Linear(6, 6)
        self.gain, self.out = nn.Parameter(torch.ones(6)), nn.Linear(6, 20, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mix(self.emb(x))).mean(1)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        return self.out(h)[:, :CLASSES]


class TCN(nn.Module):
    """Dilated convolutions with weight norm, chomped, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = parametrizations.weight_norm(nn.Conv1d(5, 8, 2, padding=1))
        self.c2 = parametrizations.weight_norm(nn.Conv1d(8, 8, 2, padding=2, dilation=2))
        self.drop, self.fc = nn.Dropout(0.2), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        x = self.drop(F.relu(self.c1(x)[:, :, :-1].contiguous()))
        x = self.drop(F.relu(self.c2(x)[:, :, :-2].contiguous()))
        return self.fc(x[:, :, -1])


class DenseNet(nn.Module):
    """Every layer takes all before it, BatchNorm first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, 4, 3, padding=1)) for c in (3, 7, 11)
        )
        self.classifier = nn.Linear(15, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.classifier(torch.cat(features, 1).mean((2, 3)))


class UNet(nn.Module):
    """Down, up by interpolation, a skip, all over the image averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
        self.up, self.c = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 6, 3, padding=1)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        b = F.relu(self.b(F.max_pool2d(a, 2)))
        c = F.relu(self.c(torch.cat([a, self.up(b)], dim=1)))
        return self.fc(c.mean(dim=(2, 3)))


class SqueezeExcite(nn.Module):
    """Channels weighed by what the whole image holds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.se = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.SiLU(), nn.Conv2d(2, 8, 1), nn.Sigmoid()
        )
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.bn(self.conv(x)))
        return self.fc((x * self.se(x)).mean((2, 3)))


class Mixer(nn.Module):
    """MLP-Mixer: tokens and channels in turn, RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.n1, self.n2 = nn.Linear(12, 8), nn.RMSNorm(8), nn.RMSNorm(8)
        self.tokens = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 16))
        self.channels = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(F.unfold(x, 2, stride=2).transpose(1, 2))
        x = x + self.tokens(self.n1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.n2(x))
        return self.head(x.mean(1))


class Digits(nn.Module):
    """PyTorch's own MNIST example, with PReLU: Dropout2d, F.dropout, x.view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 8, 3)
        self.act, self.conv2_drop = nn.PReLU(6), nn.Dropout2d(0.2)
        self.fc1, self.fc2 = nn.Linear(32, 10), nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.conv1(x))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.view(-1, 32)))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


class Spectral(nn.Module):
    """Spectral norm: vectors that every training step moves; and an orthogonal layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.spectral_norm(nn.Linear(5, 8))
        self.b, self.c = parametrizations.orthogonal(nn.Linear(8, 8)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.selu(self.b(F.selu(self.a(x)))))


class Bag(nn.Module):
    """EmbeddingBag, as in fastText."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc = nn.EmbeddingBag(20, 8, mode="mean"), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bag(x))


class Table(nn.Module):
    """Numbers and categories: an embedding for each category column, BatchNorm1d, AlphaDropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(n, 3) for n in (4, 6))
        self.bn, self.fc = nn.BatchNorm1d(4), nn.Linear(10, 8)
        self.drop, self.out = nn.AlphaDropout(0.1), nn.Linear(8, CLASSES)

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        x = [self.bn(x_num), *(e(x_cat[:, i]) for i, e in enumerate(self.embeds))]
        return self.out(self.drop(F.selu(self.fc(torch.cat(x, 1)))))


class EarlyExit(nn.Module):
    """Stops early where the first answer is clear: control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b, self.out = nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.a(x)))
        if h.abs().mean() < 0.5:
            h = h + torch.relu(self.b(h))
        return self.out(h)


class Handmade(nn.Module):
    """Statistics over the batch by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.out(torch.tanh((h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()))


# ---------------------------------------------------------------- what they take


def images(count: int, size: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 3, size, size)).astype(np.uint8)


def numbers(*shape: int) -> Callable[[int], np.ndarray]:
    return lambda count: np.random.default_rng(0).standard_normal((count, *shape)).astype(np.float32)


def words(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 20, (count, 7))


def words_and_mask(count: int) -> dict[str, np.ndarray]:
    long = np.random.default_rng(1).integers(2, 8, count)
    mask = (np.arange(7) < long[:, None]).astype(np.int64)
    return {"attention_mask": mask, "input_ids": words(count) * mask}


def table(count: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    return {
        "x_num": rng.standard_normal((count, 4)).astype(np.float32),
        "x_cat": rng.integers(0, 4, (count, 2)),
    }


@dataclass(frozen=True)
class Wild:
    """`form` and `together`: how it runs; where rows cannot share a pass, `why` is the reason, and `said` part of what
    FedKin says of it."""

    make: Callable[[], nn.Module]
    data: Callable[[int], np.ndarray | dict[str, np.ndarray]]
    form: type = Vmapped
    together: bool = True
    said: str = ""
    why: str = ""
    lr: float = 0.05
    head: str | None = None

    def network(self) -> tuple[nn.Module, Callable[[int], np.ndarray]]:
        """The network as FedKin takes it, and its samples as one array."""
        one = self.data(1)
        if isinstance(one, dict):
            parts = pack(one, "samples")[1]
            return one_tensor(self.make(), parts), lambda count: pack(self.data(count), "samples")[0]
        return one_tensor(self.make()), self.data  # type: ignore[return-value]


NETWORKS: dict[str, Wild] = {
    "ViT": Wild(ViT, images),
    "transformer, length first": Wild(LengthFirst, words),
    "attention by hand": Wild(SelfAttention, words),
    "BERT with a mask": Wild(Bert, words_and_mask),
    "LSTM": Wild(LSTMClassifier, words),
    "GRU over a series": Wild(GRUSeries, numbers(6, 5)),
    "BiLSTM": Wild(BiLSTM, numbers(6, 5)),
    "RNN with a learnt state": Wild(Elman, numbers(6, 5)),
    "GRU with attention pooling": Wild(AttentionPooling, numbers(6, 5)),
    "Conv1d on speech": Wild(SpeechNet, numbers(1, 60), lr=0.01, head="fc1"),
    "Conv3d on clips": Wild(Video, numbers(4, 6, 6)),
    "autoencoder and classifier": Wild(Autoencoder, images),
    "MobileNet": Wild(MobileNet, images, Program, lr=0.005),
    "ResNet with GroupNorm": Wild(GroupNormResNet, images, Program),
    "InstanceNorm": Wild(Style, images),
    "ConvNeXt": Wild(ConvNeXt, images),
    "tied embedding": Wild(TiedHead, words, head=""),
    "TCN with weight norm": Wild(TCN, numbers(9, 5)),
    "DenseNet": Wild(DenseNet, images, Program, lr=0.005),
    "UNet": Wild(UNet, images),
    "squeeze and excite": Wild(SqueezeExcite, images, Program, lr=0.01),
    "MLP-Mixer": Wild(Mixer, images),
    "PyTorch's MNIST example": Wild(Digits, images),
    "spectral and orthogonal": Wild(Spectral, numbers(5), lr=0.01),
    "EmbeddingBag": Wild(Bag, words),
    "numbers and categories": Wild(Table, table, lr=0.01),
    "early exit": Wild(
        EarlyExit, numbers(5), together=False, said="if h.abs().mean() < 0.5", why="control flow depends on the data"
    ),
    "batch statistics by hand": Wild(
        Handmade, numbers(5), together=False, said="mixes the samples", why="its statistics mix padding in"
    ),
}
