"""Real federations under published protocols: `python examples/08_real_federations.py heart` (or tcga, shakespeare,
agnews).

The data are found in FEDKIN_DATA; what is missing there is downloaded, but for Shakespeare's roles and, here, AG News.
AG News needs the packages of 07_pretrained_texts.py. Prints the tables of docs/real-federations.md.
"""

import csv
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedkin as fk

SEEDS = range(42, 47)
UPDATES = 100  # FLamby counts a client's mini-batches in a round, not its epochs


class Updates(fk.Method):
    """FedAvg with as many mini-batches a round for every client."""

    uses_head = False

    def round(self, fed, cohort):
        replies = fed.ask(cohort, self.train, model=self.model)
        self.model = replies.mean("model", otherwise=self.model)

    def train(self, client, model):
        return {"model": client.model(client.fit(client.rows(model=model), steps=UPDATES))}


def each_client(result: fk.Result, metric: str) -> list[float]:
    """A metric of all clients on their own test samples."""
    return [client.metrics.get(metric, client.accuracy) for client in result.per_client]


def pooled(data, split: fk.Split, metric: str, **settings) -> list[float]:
    """One model for all samples together, on each client's test samples."""
    everything = np.concatenate(split.train)
    scores = []
    for rows in split.test:
        none = (np.zeros(0, np.int64),)
        one = fk.Split((everything,), none, (rows,), ("all",))
        scores += each_client(fk.run("local", data=(data, one), rounds=1, **settings), metric)
    return scores


def table(names: list[str], rows: dict[str, Callable[[int], list[float]]], decimals: int) -> None:
    """A row for each way of training: clients, then their mean and its deviation over seeds."""
    print(f"| | {' | '.join(names)} | mean of clients |\n| --- |{' ---: |' * (len(names) + 1)}")
    for name, score in rows.items():
        seeds = np.array([score(seed) for seed in SEEDS])
        means = seeds.mean(1)
        told = [f"{value:.{decimals}f}" for value in seeds.mean(0)]
        print(
            f"| {name} | {' | '.join(told)} | {means.mean():.{decimals}f} ± {means.std(ddof=1):.{decimals}f} |",
            flush=True,
        )


def heart() -> None:
    """FLamby's Fed-Heart-Disease: logistic regression with one output, so one label that is there or not."""

    def as_label(name: str):
        data = fk.load_data(name)
        y = data.y[:, None].astype(np.float32)
        data = replace(data, y=y, targets="labels", classes=1, class_names=())
        return data, fk.make_split(data, None, "natural")

    data, split = as_label("heart")
    scaled_together, _ = as_label("heart-pooled")
    # FLamby trains the pooled model on features that are scaled together, and tests it on features scaled by hospital
    both = replace(
        scaled_together,
        x=np.concatenate([scaled_together.x, data.x]),
        y=np.concatenate([data.y, data.y]),
        user=None,
        official_test=None,
        users=(),
    )
    as_flamby = replace(split, test=tuple(rows + len(data) for rows in split.test))
    metric = "label-accuracy"
    usual = {"model": "linear", "metrics": metric, "batch": 4, "device": "cpu"}
    adam = {**usual, "optimiser": "adam", "lr": 0.001, "epochs": 50}
    own = {"data": (data, split), **usual}
    perso = {**own, "lr": 0.00316227, "rounds": 15}
    rows = {
        "Pooled": lambda seed: pooled(both, as_flamby, metric, seed=seed, **adam),
        "Pooled, tested as it was trained": lambda seed: pooled(both, split, metric, seed=seed, **adam),
        "Local": lambda seed: each_client(fk.run("local", data=(data, split), rounds=1, seed=seed, **adam), metric),
        "FedAvg, lr 0.001": lambda seed: each_client(fk.run(Updates, lr=0.001, rounds=15, seed=seed, **own), metric),
        "FedAvg, lr 0.00316": lambda seed: each_client(fk.run(Updates, seed=seed, **perso), metric),
        # a 16th round of which each client keeps what it trains: 100 further mini-batches on its own
        "FedAvg, lr 0.00316, fine-tuned": lambda seed: each_client(
            fk.run(Updates, seed=seed, **{**perso, "rounds": 16, "eval_point": "after_local"}), metric
        ),
    }
    table(list(split.names), rows, 1)


def tcga() -> None:
    """FLamby's Fed-TCGA-BRCA: Cox's linear model, concordance."""
    data = fk.load_data("tcga-brca")
    split = fk.make_split(data, None, "natural")
    usual = {"batch": 8, "device": "cpu"}
    adam = {**usual, "optimiser": "adam", "lr": 0.1, "epochs": 30}
    own = {"data": (data, split), **usual, "lr": 0.1}
    rows = {
        "Pooled": lambda seed: pooled(data, split, "", seed=seed, **adam),
        "Local": lambda seed: each_client(fk.run("local", data=(data, split), rounds=1, seed=seed, **adam), ""),
        "FedAvg": lambda seed: each_client(fk.run(Updates, rounds=5, seed=seed, **own), ""),
    }
    table(list(split.names), rows, 3)


def compared(results: list[fk.Result]) -> None:
    """A row for each method: the mean of clients' accuracies, its deviation over seeds, and the worst tenth."""
    print("| | mean of clients | worst tenth | kB up, a client and round |\n| --- | ---: | ---: | ---: |")
    for method in dict.fromkeys(result.method for result in results):
        own = [result for result in results if result.method == method]
        macro = np.array([result.accuracy.macro for result in own])
        worst = np.mean([result.accuracy.worst_decile for result in own])
        sent = own[0].bytes["up"] / own[0].config.clients / own[0].config.rounds / 1e3
        spread = f" ± {macro.std(ddof=1):.1f}" if len(own) > 1 else ""
        print(f"| {method} | {macro.mean():.1f}{spread} | {worst:.1f} | {sent:.0f} |", flush=True)


def shakespeare() -> None:
    """The twenty roles that say the most, 100 windows of each: small enough for a CPU."""
    data = {"data": "shakespeare", "partition": "natural", "clients": 20, "samples_per_client": 100}
    how = {"model": "char-lstm-small", "rounds": 30, "epochs": 1, "batch": 10, "lr": 3.0, "device": "cpu"}
    how |= {"eval_every": 30, "eval_point": "received"}
    results, _ = fk.compare(["fedavg", "fedper"], seeds=3, **data, **how)
    # a step pulls Ditto's personal model lr * lam of the way to the shared one: with its usual lam=1 too far
    results += [fk.run("ditto", seed=seed, options={"lam": 0.1}, **data, **how) for seed in range(3)]
    compared(results)


class LastLayers(nn.Module):
    """The last layers of MiniLM and its head, on what the frozen ones below make of a text, computed once."""

    def __init__(self, whole: nn.Module, first: int) -> None:
        super().__init__()
        self.layers, self.head = whole.layers[first:], whole.head

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        counts = mask.unsqueeze(2)
        for layer in self.layers:
            x = layer(x, (1 - counts).transpose(1, 2).unsqueeze(1) * -1e4)
        mean = (x * counts).sum(1) / counts.sum(1)
        return self.head(nn.functional.normalize(mean, dim=1) * mean.shape[1] ** 0.5)


def agnews(seeds: int = 2, texts: int = 100, length: int = 32, below: int = 4) -> None:
    """20 clients, Dir(0.3), 100 texts each; MiniLM frozen, LoRA of rank 8 in its last two layers, and a head."""
    pretrained = runpy.run_path(str(Path(__file__).with_name("07_pretrained_texts.py")))["pretrained"]
    whole, tokenizer = pretrained(classes=4)
    network = fk.lora(LastLayers(whole, below), rank=8, targets=["*.query", "*.value"], head="head")
    with open(Path(os.environ["FEDKIN_DATA"], "ag_news_csv", "test.csv"), encoding="utf-8", newline="") as file:
        rows = [(" ".join(row[1:]), int(row[0]) - 1) for row in csv.reader(file)]
    labels = np.array([label for _, label in rows])
    data = fk.Dataset("ag news", np.zeros((len(rows), 1), np.float32), labels, 4)
    results = []
    for seed in range(seeds):
        split = fk.make_split(data, 20, "dirichlet:0.3", seed, samples_per_client=texts)
        clients = {}
        for name, train, test in zip(split.names, split.train, split.test, strict=True):
            clients[name] = [
                part
                for own in (train, test)
                for part in (below_of(whole, tokenizer, rows, own, length, below), labels[own])
            ]
        how = {"model": network, "init": "given", "rounds": 4, "epochs": 1, "batch": 8, "lr": 0.05, "device": "cpu"}
        for method in ("fedavg", "fedper", "ditto"):
            results.append(fk.run(method, clients=clients, seed=seed, eval_every=4, **how))
            print(f"seed {seed}, {method}: {results[-1].accuracy.macro:.1f}", file=sys.stderr, flush=True)
    compared(results)


def below_of(whole, tokenizer, rows, own, length: int, below: int) -> dict[str, np.ndarray]:
    """What the frozen layers make of these texts."""
    tokenizer.no_padding()
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    found = tokenizer.encode_batch([rows[i][0] for i in own])
    ids = torch.tensor([one.ids for one in found])
    mask = torch.tensor([one.attention_mask for one in found], dtype=torch.float32)
    with torch.no_grad():
        x = whole.norm(whole.words(ids) + whole.places.weight[:length] + whole.kinds.weight[0])
        for layer in whole.layers[:below]:
            x = layer(x, (1 - mask)[:, None, None] * -1e4)
    return {"x": x.numpy(), "mask": mask.numpy()}


if __name__ == "__main__":
    for name in sys.argv[1:] or ["heart", "tcga", "shakespeare", "agnews"]:
        {"heart": heart, "tcga": tcga, "shakespeare": shakespeare, "agnews": agnews}[name]()
