"""How much memory and disk a run will need, before it starts, and how much there is.

What is counted is what grows with clients and models: rows at work, rows kept, replies. It is an estimate, meant to
be right within a factor of two where rows matter (the tests hold it against measured peaks)."""

from __future__ import annotations

import copy
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedkin.compute.backends import cores
from fedkin.errors import UsageError

if TYPE_CHECKING:
    from fedkin.config import Config
    from fedkin.core.cohort import Site
    from fedkin.methods.base import Method

CHECKPOINTS = 2  # that a folder holds
ROUND_ROW, CLIENT_ROW = 90, 110  # bytes of a client in the tables of an exchange and of an evaluation
PASS = 512  # samples of a forward pass while models are evaluated
MODELS_AT_ONCE = 256 << 20  # bytes of personal models that a result holds; more are made when they are asked for
GRAPH = 2  # a row trained together with others has its working tensors and its gradient besides


@dataclass(frozen=True)
class Footprint:
    """Bytes: of the process in the end, of the accelerator, of the run's folder."""

    host: int
    device: int
    disk: int

    def to_dict(self) -> dict[str, int]:
        return asdict(self)


def expected(config: Config, site: Site, method: Method, at_once: int, activations: int) -> Footprint:
    """`at_once`: models evaluated together; `activations`: numbers that a sample becomes in the network.

    The data are in memory by now, so what the process has is measured and only the rest is reckoned."""
    clients, row = len(site.names), 4 * site.layout.width
    cohort = max(1, int(config.participation * clients + 0.5))
    seen = clients * (1 - (1 - cohort / clients) ** config.rounds)
    needs = method.needs(cohort, round(seen), clients)
    kept = kept_bytes(site)
    store = needs.writers * kept
    at_work = min(config.chunk or needs.asked, needs.asked)
    on_gpu, together = site.source.device.type == "cuda", config.way in ("batched", "graph")
    each = needs.trained * (2 + GRAPH * (on_gpu or together)) + 2 * (needs.trained - 1)
    training = at_work * (each * row + kept) + (cohort * row if at_work < cohort else 0)  # replies that are gathered
    threads = 1 if on_gpu else cores()
    evaluating = min(at_once, clients) * (3 * row + kept) + 4 * 3 * PASS * activations * threads
    if on_gpu:
        training += 4 * 3 * at_work * needs.trained * config.batch * activations
    server = round(needs.server * row)
    result = min(clients * row, MODELS_AT_ONCE)
    on_host = 0 if on_gpu else result
    kept_best = store + server if config.keep == "best" else 0
    work = store + server + kept_best + max(training + round(needs.working * row), evaluating + on_host)
    saved = store + server + kept_best + (row if config.checkpoint_every else 0)
    folder = 8 * sum(len(p) for parts in site.parts.values() for p in parts) // 2
    folder += config.rounds * cohort * ROUND_ROW + -(-config.rounds // config.eval_every) * clients * CLIENT_ROW
    if config.checkpoint_every:
        times = 1 + (config.rounds > config.checkpoint_every)
        folder += saved * min(times, CHECKPOINTS)
    now = resident()
    if on_gpu:
        data = site.source.x.numel() * site.source.x.element_size()
        return Footprint(now + result + (saved if config.checkpoint_every else 0), data + work, folder)
    return Footprint(now + work, 0, folder)


def kept_bytes(site: Site) -> int:
    """What one client keeps between rounds once it has taken part."""
    store, unused = site.store, set() if site.hold else {"held", "trained"}
    if site.layout.buffers_policy != "local":
        unused.add("buffers")
    values = [store.first(name) for name in store.keeps if name not in unused]
    return sum(v.numel() * v.element_size() for v in values)


def activations_of(network: torch.nn.Module, example: torch.Tensor) -> int:
    """Numbers that its layers give for one sample."""
    found = [0]

    def count(module: object, inputs: object, output: object) -> None:
        found[0] += output.numel() if isinstance(output, torch.Tensor) else 0

    twin = copy.deepcopy(network).eval()
    for module in twin.modules():
        if not list(module.children()):
            module.register_forward_hook(count)
    with torch.no_grad():
        twin(example[torch.arange(2) % len(example)])  # of one sample, some layers have no statistics
    return found[0] // 2


# ---------------------------------------------------------------- what there is


def resident() -> int:
    """Bytes this process has in memory now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return peak()


def peak() -> int:
    """The most bytes that this process has had in memory since it began; 0 where nobody knows."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def host_room() -> int | None:
    """Bytes that this process can still get: what the system has left, or its control group; None: nobody knows."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    except (OSError, ValueError, KeyError, IndexError):
        pass
    old = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")
    for most, used in (("memory.max", "memory.current"), old):
        try:
            limit, now = (Path("/sys/fs/cgroup", name).read_text().strip() for name in (most, used))
            found += [max(int(limit) - int(now), 0)] if limit != "max" else []
        except (OSError, ValueError):
            pass
    return min(found, default=None)


def check_memory(needed: Footprint, device: torch.device) -> None:
    """Refuses a run that cannot fit, with what would help."""
    helps = ["--chunk 10 (rows worked on at once)", "--participation 0.1 (replies of a round)", "fewer --clients"]
    room, more = host_room(), needed.host - resident()
    if room is not None and more > room:
        raise _too_large("memory", needed.host, room + resident(), helps)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        left = free + torch.cuda.memory_reserved(device)
        if needed.device > left:
            raise _too_large(f"memory of {device}", needed.device, left, helps)


def check_disk(needed: Footprint, folder: Path) -> None:
    place = next((p for p in (folder, *folder.absolute().parents) if p.exists()), None)
    free = shutil.disk_usage(place).free if place is not None else needed.disk
    if needed.disk > free:
        helps = ["--checkpoint-every 0 (nothing to resume from)", "--participation 0.1", f"more room than in {folder}"]
        raise _too_large("disk", needed.disk, free, helps)


def _too_large(what: str, needed: int, there: int, helps: list[str]) -> UsageError:
    return UsageError(
        f"this run needs about {in_words(needed)} of {what}, and there are {in_words(there)}; what helps: "
        f"{', '.join(helps)}; or --force to try, as the estimate can be off by a factor of two"
    )


def in_words(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def memory_facts(needed: Footprint | None, device: torch.device) -> Mapping[str, int | None]:
    """What was expected and what it came to, for those who read results."""
    return {
        "host_estimate": needed.host if needed else None,
        "host_peak": peak(),
        "device_estimate": needed.device if needed else None,
        "device_peak": device_peak(device),
        "disk_estimate": needed.disk if needed else None,
    }
