"""What run.json and the split's file say of a run: its settings, its data, where it was done, what came of it."""

from __future__ import annotations

import functools
import hashlib
import io
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkin import plugins
from fedkin.config import Config
from fedkin.models import MODELS
from fedkin.rounds import Job, Result, RoundRecord
from fedkin.rounds.trained import fingerprint
from fedkin.runs.folder import FORMAT, PARTS
from fedkin.version import VERSION

IN_TABLES = ("per_client", "history", "failed", "detection_rounds", "gone")  # of a result; the tables tell these
OF_THE_RUN = ("method", "options", "seed", "config", "split", "eval_point", "device", "precision", "malicious", "run")
"""Of a result; run.json has these in other places."""


def now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def of_a_beginning(job: Job, config: Config, folder: Path, objects: Sequence[str]) -> dict[str, Any]:
    """What run.json says before the first round. `config` is what was asked for; the job's own is resolved."""
    return {
        "format": FORMAT,
        "id": folder.name,
        "created": now(),
        "updated": now(),
        "status": "running",
        **of_this_process(),
        "error": None,
        "config": job.config.to_dict(),
        "given": located(config),
        "asked": sorted(config.asked),
        "objects": list(objects),
        "plugins": plugins.facts(config),
        "options": job.options,
        "identity": identity_of(config, folder, objects),
        "environment": environment(job),
        "prepared": prepared_facts(job),
        "names": list(job.site.names),
        **({"start": dict(job.taken.facts)} if job.taken is not None else {}),
        "malicious": job.malicious,
        "rounds_done": 0,
        "progress": None,
        "result": None,
    }


def identity_of(config: Config, folder: Path, objects: Sequence[str]) -> str:
    """What says that two runs are the same. What a Python object is cannot be told from outside: a run that was given
    one equals no other."""
    identity = plugins.identity_of(config)
    return hashlib.sha256(f"{identity}{folder.name}".encode()).hexdigest() if objects else identity


def of_this_process() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": platform.node()}


def of_progress(record: RoundRecord) -> dict[str, Any]:
    """Of a run that goes on, after an evaluated round."""
    names = ("round", "final", "train_loss", "seconds", "wall", "removed", "judged", "judgeable")
    sent = {"down": record.bytes_down, "up": record.bytes_up}
    return {"accuracy": asdict(record.accuracy), "bytes": sent, **{name: getattr(record, name) for name in names}}


def of_a_result(result: Result) -> dict[str, Any]:
    """A result without what stands elsewhere in the folder."""
    last, skipped = result.history[-1], {*IN_TABLES, *OF_THE_RUN}
    return {
        **{k: v for k, v in result.to_dict().items() if k not in skipped},
        "failed": len(result.failures),
        "rounds_done": last.round,
        "judged": last.judged,
        "judgeable": last.judgeable,
        "partly_judged": sum(not r.covers_all for r in result.history),
    }


def located(config: Config) -> dict[str, Any]:
    """The configuration with paths that hold wherever one resumes from."""
    values = config.to_dict()
    if Path(config.data).exists():
        values["data"] = str(Path(config.data).resolve())
    if config.data_dir is not None:
        values["data_dir"] = str(Path(config.data_dir).resolve())
    return values


def split_bytes(job: Job) -> bytes:
    """Who has which samples and classes. An attacker's version of a sample (beyond the count) is that sample here."""
    count = job.site.source.count
    labels = job.site.source.y[:count].cpu().numpy()
    arrays: dict[str, Any] = {"names": np.array([str(n) for n in job.site.names])}
    for part in PARTS:
        rows = [np.asarray(r, np.int64) % count for r in job.site.parts[part]]  # type: ignore[index]
        arrays[part] = np.concatenate(rows)
        arrays[f"{part}_ends"] = np.cumsum([len(r) for r in rows])
        if part != "validation" and job.prepared.classes:
            held = [np.bincount(labels[r], minlength=job.prepared.classes) for r in rows]
            arrays["class_counts" if part == "train" else "class_counts_test"] = np.array(held, np.int64)
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def first_weights(job: Job) -> str:
    """Of the network that all clients start with, frozen parameters and all."""
    digest = hashlib.sha256()
    for name, value in job.model.state_dict().items():
        digest.update(f"{name} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def prepared_facts(job: Job) -> dict[str, Any]:
    told = ("clients", "classes", "split_hash", "parameters", "eval_point", "device", "precision")
    own = {} if job.config.model in MODELS else {"model_hash": first_weights(job)}
    needed = job.prepared.needed.to_dict() if job.prepared.needed is not None else None
    metric = job.prepared.metric
    what = {"name": metric.name, "unit": metric.unit, "higher": metric.higher}
    return {
        **{k: getattr(job.prepared, k) for k in told},
        "task": job.prepared.task,
        "metric": what,
        **({"columns": list(job.prepared.columns)} if job.prepared.columns else {}),
        "data_hash": fingerprint(job.site.source),
        **own,
        "needed": needed,
    }


def environment(job: Job) -> dict[str, Any]:
    device = job.prepared.device
    return {
        "fedkin": VERSION,
        "source": source_hash(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": device,
        "gpu": torch.cuda.get_device_name(device) if device.startswith("cuda") else None,
        "precision": job.prepared.precision,
        "threads": torch.get_num_threads(),
        "git": git_state(os.getcwd()),
    }


@functools.cache
def source_hash() -> str:
    """sha256 over FedKin's own modules: which code ran, whether or not it lies in a repository."""
    home, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(home.rglob("*.py")):
        digest.update(f"{path.relative_to(home).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def git_state(folder: str) -> dict[str, Any] | None:
    """The revision of the repository one works in, and whether it has changes; None outside of one."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision = ask("rev-parse", "HEAD")
    if revision is None:
        return None
    changes = ask("status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}
