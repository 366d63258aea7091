"""How a network would train here: which form it takes and why, how each layer runs, and how fast each way is."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedkin.bench.speed import Case, loop, site_of
from fedkin.bench.stopwatch import timed
from fedkin.compute import graphs
from fedkin.compute.backends import cores
from fedkin.compute.batches import plan
from fedkin.compute.layers import RULES
from fedkin.compute.layout import inside
from fedkin.compute.over_rows import KINDS
from fedkin.compute.program import Program
from fedkin.compute.vmapped import Vmapped
from fedkin.core.cohort import Cohort
from fedkin.data import Dataset
from fedkin.data.dataset import as_samples
from fedkin.errors import UsageError, unknown
from fedkin.models import Given, first_network
from fedkin.parts import pack
from fedkin.rounds import pick_device, pick_precision
from fedkin.rounds.choices import example_of

PROGRAM, VMAP, ALONE = "program over rows", "own code under vmap", "row by row"
RULE, PLAIN, MAPPED, FROZEN = "a rule over rows", "rows as more samples", "vmap", "once for all rows (frozen)"


@dataclass(frozen=True)
class LayerCheck:
    """One layer: its name, what it is, how it runs."""

    name: str
    kind: str
    way: str


@dataclass(frozen=True)
class NetworkCheck:
    """What `fk.check` found; `print` it for the whole story.

    `network` is the class, `form` how its rows are trained, `reasons` say why in no faster form, and `layers` how each
    layer runs. `head` names the module that is the head, and `columns` has how many numbers are body, head, buffers and
    frozen. `noise` says whether it draws noise (dropout), `batch_norm` whether it has BatchNorm. On `device`, a step of
    a client takes `loop_ms` milliseconds in the plain loop and `ways_ms` in each way that is possible here."""

    network: str
    form: str
    reasons: tuple[str, ...]
    layers: tuple[LayerCheck, ...]
    head: str
    columns: Mapping[str, int]
    noise: bool
    batch_norm: bool
    device: str
    loop_ms: float
    ways_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def best(self) -> str:
        """The way that is fastest here."""
        return min(self.ways_ms, key=lambda way: self.ways_ms[way])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `--json` prints them."""
        return {**asdict(self), "best": self.best}

    def __str__(self) -> str:
        wide = max(len(layer.name) for layer in self.layers)
        lines = [f"{self.network} runs as: {self.form}", *(f"  {reason}" for reason in self.reasons)]
        lines += [f"  {layer.name:<{wide}}  {layer.kind:<24}  {layer.way}" for layer in self.layers]
        sizes = ", ".join(f"{name} {count:,}" for name, count in self.columns.items() if count)
        lines.append(f"head: {self.head or 'none, all is body'}; numbers: {sizes}")
        lines.append(f"noise: {'drawn from the seed' if self.noise else 'none'}")
        lines.append(f"on {self.device}, a step of a client takes {self.loop_ms:.2f} ms in the plain loop")
        for way, ms in sorted(self.ways_ms.items(), key=lambda pair: pair[1]):
            lines.append(f"  {ms:8.2f} ms as {way}, {self.loop_ms / ms:.1f} times as fast")
        return "\n".join(lines)


def check(
    model: Given,
    example: Any,
    *,
    head: str | None = None,
    batch: int = 10,
    clients: int = 8,
    steps: int = 3,
    device: str = "auto",
    init: Literal["seed", "given"] = "seed",
) -> NetworkCheck:
    """How this network would train on samples like `example` (an array or tensor with one row a sample, or a dictionary
    of them for several inputs), measured with `clients` clients that take `steps` steps of `batch` samples each.
    `init`: its first weights, as in `fk.run`; a part that begins at zero is drawn anew unless they are "given"."""
    for name, value in (("batch", batch), ("clients", clients), ("steps", steps)):
        if value < 1:
            raise UsageError(f"{name}={value}: must be at least 1")
    if init not in ("seed", "given"):
        raise unknown("init", init, ("seed", "given"))
    place = pick_device(device)
    precision = pick_precision("auto", place)
    data = _samples(example, clients * steps * batch)
    network, _ = first_network(model, 0, init, data.parts, example_of(data))
    case = Case("check", lambda: copy.deepcopy(network), data.shape, 1, clients, batch, steps * batch, 1)
    try:
        site, parts = site_of(case, network, data, place, precision, "auto", head)
        order = plan(parts, np.arange(clients), 1, batch, (0, 0, "bench", 1), site.has_batch_norm)

        def fitted(way: str) -> float:
            site.chooser.forced = way
            return timed(lambda: Cohort(site, np.arange(clients), 0, "bench").fit(site.initial), place)[1]

        ways = _possible(place, site.forward.together, clients)
        count = int(order.steps.sum())
        ways_ms = {}
        for way in ways:
            fitted(way)  # the first time is always slow
            ways_ms[way] = 1e3 * statistics.median(fitted(way) for _ in range(3)) / count
        plain = [timed(lambda: loop(copy.deepcopy(network), site, order, precision), place)[1] for _ in range(3)]
    finally:
        graphs.forget()
    layout, form = site.layout, site.forward
    frozen = sum(shape.numel() for shape in layout.frozen.values())
    buffers = layout.size("buffers")
    body = layout.parameters - layout.size("head")
    return NetworkCheck(
        type(network).__name__,
        PROGRAM if isinstance(form, Program) else VMAP if form.together else ALONE,
        _reasons(form),
        tuple(_layers(network, form, set(layout.frozen))),
        layout.head_name,
        {"body": body, "head": layout.size("head"), "buffers": buffers, "frozen": frozen},
        form.has_dropout,
        form.has_batch_norm,
        torch.cuda.get_device_name(place) if place.type == "cuda" else "the CPU",
        1e3 * statistics.median(plain) / count,
        ways_ms,
    )


def _possible(device: torch.device, together: bool, clients: int) -> list[str]:
    if device.type == "cuda":
        return ["graph", "each"] if together else ["each"]
    several = ["threads"] if cores() > 1 and clients > 1 else []
    return ["each", *several, *(["batched"] if together else [])]


def _samples(example: Any, count: int) -> Dataset:
    """As many samples as are needed, by repeating those given."""

    def enough(values: Any) -> Any:
        values = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
        if not values.ndim or not len(values):
            raise UsageError("example: give an array or tensor with one row a sample, torch.randn(4, 3, 32, 32)")
        return values[np.arange(count) % len(values)]

    y = np.zeros(count, np.int64)
    if isinstance(example, Mapping):
        x, parts = pack({name: enough(values) for name, values in example.items()}, "example")
        return Dataset("example", x, y, 1, parts=parts)
    x = enough(example)
    vocabulary = int(x.max()) + 1 if x.dtype.kind in "iu" and x.dtype != np.uint8 else 0
    return Dataset("example", as_samples(x, vocabulary), y, 1, vocabulary=vocabulary)


def _reasons(form: Any) -> tuple[str, ...]:
    if not isinstance(form, Vmapped):
        return ()
    found = [f"no program over rows: {form.no_program}"]
    return (*found, f"not under vmap: {form.why_not}") if not form.together else tuple(found)


def _layers(network: nn.Module, form: Any, frozen: set[str]) -> list[LayerCheck]:
    """Those with tensors of their own, and those without any inside."""
    found: list[LayerCheck] = []
    for name, module in network.named_modules():
        own = [n for n, _ in module.named_parameters(recurse=False)]
        inner = any(True for _ in module.children())
        if (inner and not own) or any(inside(name, layer.name) for layer in found if layer.kind in WHOLE):
            continue
        names = [f"{name}.{n}" if name else n for n in own]
        if names and all(n in frozen for n in names) and form.together:
            way = FROZEN
        elif not form.together:
            way = ALONE
        elif isinstance(form, Program):
            way = RULE if type(module) in RULES else PLAIN
        else:
            way = RULE if isinstance(module, KINDS) else MAPPED
        found.append(LayerCheck(name or "(the network)", type(module).__name__, way))
    return found


WHOLE = ("MultiheadAttention",)
