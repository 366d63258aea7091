"""What a deployment costs beside the training: `python -m fedkin.bench.network` on one machine, over loopback.

For each number of clients: seconds from asking until all have answered, less the time the slowest site worked; and the
bytes that crossed the wire (bodies and headers of all requests and answers) against those that `ask` counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkin.config import make_config
from fedkin.deploy.authority import new_folder
from fedkin.deploy.cluster import client_words, free_port, start, stop
from fedkin.deploy.joining import TRAVELS
from fedkin.deploy.server import OpenLink, Serving, prepare_deployed
from fedkin.deploy.sites import Sites
from fedkin.engines.remote import Arrival, Bounds, Delivery, Remote, Terms


@dataclass
class Watched:
    """The post, with a stopwatch: `worked` holds what each site says it took."""

    carrier: Sites
    worked: dict[int, float] = field(default_factory=dict)

    def send(
        self, ids: Sequence[int], message: Mapping[str, object], fields: Mapping[str, Any], bounds: Bounds
    ) -> dict[int, str]:
        self.worked = {}
        return self.carrier.send(ids, message, fields, bounds)

    def collect(self) -> dict[int, Arrival]:
        came = self.carrier.collect()
        self.worked |= {c: float(d.fields["seconds"]) for c, d in came.items() if isinstance(d, Delivery)}
        return came

    def cancel(self, ids: Sequence[int]) -> None:
        self.carrier.cancel(ids)

    def present(self, client: int) -> bool:
        return self.carrier.present(client)


def measure(clients: int, side: int, model: str, phases: int, insecure: bool = False) -> dict[str, Any]:
    """FedAvg's exchange, `phases` times, on images of side x side pixels."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        (folder / "data").mkdir()
        names, rng = [f"site-{i:02d}" for i in range(clients)], np.random.default_rng(0)
        for name in names:
            x = rng.integers(0, 255, (20, 3, side, side), np.uint8)
            np.savez(folder / "data" / f"{name}.npz", x=x, y=np.arange(20) % 10)
        if not insecure:
            new_folder(folder / "keys", ["127.0.0.1"], names)
        port = free_port()
        serving = Serving(port=port, keys=None if insecure else folder / "keys", wait=300, terms=Terms(deadline=300))
        processes = [start(client_words(name, folder, port, insecure), folder / name / "log") for name in names]
        try:
            with OpenLink(serving, lambda text: None) as link:
                return _phases(link, serving, model, phases, clients)
        finally:
            stop(processes)


def _phases(link: OpenLink, serving: Serving, model: str, phases: int, clients: int) -> dict[str, Any]:
    config = make_config({"method": "fedavg", "model": model, "epochs": 1, "rounds": phases, "batch": 20})
    sites = link.sites(serving, config, Sites)
    facts = sites.gather(clients, 300)
    watched = Watched(sites)
    job = prepare_deployed(config, facts, Remote(watched, [f.name for f in facts], serving.terms))
    link.link.limit = 8 * 4 * job.site.layout.width
    settings = {k: v for k, v in job.config.to_dict().items() if k in TRAVELS}
    shared = {"config": settings, "labels": list(range(10)), "transport": "fp32", "round": 0}
    sites.fix_clients(facts, "measure", 1, lambda place: (shared, {"initial": job.site.initial}))
    sites.assemble(300, clients)
    spent, down, up = [], 0, 0
    for _ in range(phases):
        time.sleep(0.3)  # so that the last answers are through and counted
        before = (time.monotonic(), *link.link.traffic)
        job.method.round(job.fed, job.fed.all)
        spent.append(time.monotonic() - before[0] - max(watched.worked.values(), default=0.0))
        time.sleep(0.3)
        after = link.link.traffic
        down, up = down + after[0] - before[1], up + after[1] - before[2]
        job.fed.round += 1
    counted = [sum(getattr(e, k) for e in job.fed.exchanges) for k in ("bytes_down", "bytes_up")]
    sites.dismiss()
    return {
        "clients": clients,
        "model": model,
        "numbers": job.site.layout.size(),
        "phases": phases,
        "seconds_median": statistics.median(spent[1:]),
        "seconds_best": min(spent),
        "seconds_worst": max(spent[1:]),
        "ledger_bytes": counted,
        "wire_bytes": [down, up],
        "wire_over_ledger": [down / counted[0], up / counted[1]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--phases", type=int, default=10)
    parser.add_argument("--insecure", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for clients in given.clients:
        for model, side in (("mlp", 8), ("cnn-512", 32)):
            print(json.dumps(measure(clients, side, model, given.phases, given.insecure)), flush=True)


if __name__ == "__main__":
    main()
