"""A federation of real sites: the same rounds as a simulation, its run folder included, over TLS."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from fedkin.compute.batches import Source
from fedkin.config import Config
from fedkin.core.cohort import Site
from fedkin.data import Dataset, Preparing
from fedkin.data.clients import split_sizes
from fedkin.deploy import certificates as key_files
from fedkin.deploy.greeting import USUAL_CLASSES, Facts, digest, like, together
from fedkin.deploy.joining import TASK, TRAVELS
from fedkin.deploy.link import Link
from fedkin.deploy.site_columns import plain, united
from fedkin.deploy.sites import Say, Sites
from fedkin.deploy.trunk import as_values, frozen_of, trunk_hash
from fedkin.deploy.wire import Transport
from fedkin.engines.measurement import Judge
from fedkin.engines.rehearsal import Rehearsal
from fedkin.engines.remote import Remote, Terms
from fedkin.errors import DataError, UsageError
from fedkin.methods import METHODS, Method, options_of
from fedkin.rounds import Job, Listener, Result, average_of
from fedkin.rounds.assemble import Parts, check_task, make_job, make_site
from fedkin.rounds.choices import metrics_of, network_of, targets_of
from fedkin.rounds.settings import idle, refuse
from fedkin.runs import checkpoint
from fedkin.runs.folder import CHECKPOINTS, SITES, RunFolder
from fedkin.runs.recorder import Recorder
from fedkin.runs.restore import restore
from fedkin.runs.start import begin, follow
from fedkin.tasks import Task, make_task

OF_THE_SITES = (
    "data",
    "data_dir",
    "label",
    "client_column",
    "image_size",
    "image_mode",
    "categories",
    "partition",
    "samples_per_client",
    "quantity_skew",
)
WHAT_SITES_TELL = "sites tell how their models do on test samples, not on validation samples"
ONLY_SIMULATED = {"attack": "none", "drop": 0.0, "straggle": 0.0, "shift": None, "init": "seed"}
OfSites = TypeVar("OfSites", bound=Sites)
TRUNK = "trunk.sha256"  # in a run's folder: the frozen weights it began with


@dataclass(frozen=True)
class Serving:
    """Where and how a server serves. `keys`: the folder that `fedkin keys new` made; None: no TLS, no keys."""

    host: str = "127.0.0.1"
    port: int = 9092
    keys: Path | None = None
    wait: float = 600.0
    terms: Terms = field(default_factory=Terms)
    transport: Transport = "fp32"
    largest: int | None = None  # bytes of a reply; None: eight times the model, and at least 64 MiB
    least: int | None = None  # sites to start with, if the others do not come or do not fit; None: all
    most_classes: int = USUAL_CLASSES


def run_server(
    config: Config,
    serving: Serving,
    *,
    clients: int | None = None,
    on_event: Listener | None = None,
    say: Say = print,
    signals: bool = False,
) -> Result:
    """Serve one new run to its end. `clients`: how many sites; None: all whose keys are signed."""
    _check(config)
    with OpenLink(serving, say) as link:
        count = clients if clients is not None else len(link.signed)
        if not count:
            raise UsageError("how many sites take part? Say --clients N, or sign their keys with `fedkin keys sign`")
        sites = link.sites(serving, config, Sites)
        facts = sites.gather(count, serving.wait, serving.least)
        engine = Remote(sites, [f.name for f in facts], serving.terms, link.checkpoints)
        job = prepare_deployed(config, facts, engine)
        bound(link.link, job.site.layout.width, serving)
        with begin(job, job.config) as recorder:
            link.folder = recorder.folder
            link.folder.chmod(0o700)  # what the sites sent is nobody else's business
            (recorder.folder / SITES).write_text(json.dumps([f.plain() for f in facts]))
            (recorder.folder / TRUNK).write_text(trunk_hash(frozen_of(job.model)))
            least = min(len(facts), serving.least or count)
            return _serve(job, engine, sites, facts, recorder, serving, least, on_event, say, signals)


def resume_server(
    run: RunFolder, serving: Serving, *, on_event: Listener | None = None, say: Say = print, signals: bool = False
) -> Result:
    """Go on with a run from its last checkpoint, with the sites that come back."""
    info = run.info
    if info.status == "finished":
        raise UsageError(f"run {info.id!r} is finished: there is nothing to resume")
    facts = known_sites(run)
    config = info.configuration(runs_dir=str(info.path.parent))
    with Recorder(info.path, dict(info.raw), config.checkpoint_every) as recorder, OpenLink(serving, say) as link:
        link.folder = info.path
        sites = link.sites(serving, config, Sites)
        engine = Remote(sites, [f.name for f in facts], serving.terms, link.checkpoints)
        job = prepared_again(run, facts, engine)
        restore(job, run, recorder, say)
        bound(link.link, job.site.layout.width, serving)
        least = serving.least or max(1, -(-len(facts) // 2))
        return _serve(job, engine, sites, facts, recorder, serving, least, on_event, say, signals)


def _serve(
    job: Job,
    engine: Remote,
    sites: Sites,
    facts: Sequence[Facts],
    recorder: Recorder,
    serving: Serving,
    least: int,
    on_event: Listener | None,
    say: Say,
    signals: bool,
) -> Result:
    def log(text: str) -> None:
        recorder.log(text)
        say(text)

    sites.report_to(log)
    engine.say = log
    attempt = int(time.time() * 1000)
    shared = terms_of(job.config, facts, job.model, serving)

    def invitation(place: int) -> tuple[dict[str, Any], dict[str, Any]]:
        return {**shared, "round": job.fed.round}, {"initial": job.site.initial}

    sites.fix_clients(facts, recorder.folder.name, attempt, invitation, lambda: as_values(job.model))
    sites.assemble(serving.wait, least)
    result = follow(job, recorder, on_event, signals, say, None, None)
    sites.dismiss()
    return result


def terms_of(config: Config, facts: Sequence[Facts], network: nn.Module, serving: Serving) -> dict[str, Any]:
    """What every invitation says."""
    settings = {k: v for k, v in config.to_dict().items() if k in TRAVELS} | {"task": config.task or TASK}
    return {
        "config": settings,
        "labels": together(facts)[2],
        **({"columns": plain(united([f.columns for f in facts]))} if facts[0].columns else {}),
        "transport": serving.transport,
        "frozen": trunk_hash(frozen_of(network)),
    }


class OpenLink:
    """The link while it serves, with what its sites and its run folder have to know of each other."""

    def __init__(self, serving: Serving, say: Say) -> None:
        self.signed: list[str] = []
        if serving.keys is not None:
            self.signed = list(key_files.sites(serving.keys))
            if not self.signed:
                raise UsageError(f"no site's key is signed in {serving.keys}: fedkin keys sign {serving.keys} NAME.csr")
            for warning in key_files.check_server(serving.keys):
                say(warning)
        self.link = Link(serving.host, serving.port, keys=serving.keys)
        self.folder: Path | None = None
        self._say = say

    def __enter__(self) -> OpenLink:
        where = self.link.start()
        how = "TLS and signed keys" if self.signed else "NO encryption and NO proof of who is who (--insecure)"
        self._say(f"serving on {where} with {how}")
        return self

    def __exit__(self, *_: object) -> None:
        self.link.stop()

    def sites(self, serving: Serving, config: Config, kind: type[OfSites]) -> OfSites:
        task = config.task or TASK
        return kind(
            self.link,
            self._say,
            transport=serving.transport,
            most_classes=serving.most_classes,
            targets=targets_of(config, make_task(task)),
            task=task,
        )

    def checkpoints(self) -> list[int]:
        """Rounds that the server could go back to."""
        names = checkpoint.names(self.folder / CHECKPOINTS) if self.folder is not None else []
        return [int(n.removeprefix("round-")) for n in names if n.startswith("round-")]


def _check(config: Config) -> None:
    for name, usual in ONLY_SIMULATED.items():
        if getattr(config, name) != usual:
            raise UsageError(f"{name}={getattr(config, name)!r} is for simulations: real sites bring their own trouble")
    if config.start_from is not None:
        raise UsageError(
            f"start_from={config.start_from!r} is for simulations: a server of real sites begins with a model of its "
            "own, and does not know what its sites kept; leave it out"
        )
    wish = Preparing.of(config.impute, config.scale)
    if "federated" in (wish.impute, wish.scale):
        name = "impute" if wish.impute == "federated" else "scale"
        raise UsageError(
            f"{name}={getattr(config, name)!r}: real sites prepare their tables each alone, and give no sums away for "
            f"that; take {name}='local'"
        )
    task, method_class = make_task(config.task or TASK), METHODS[config.method]
    metrics_of(config, task)  # refused before anybody comes
    check_task(config, task, method_class, options_of(method_class, config.options, config.method))
    refuse(
        config,
        {
            **dict.fromkeys(("patience", "min_gain", "keep"), WHAT_SITES_TELL),
            **({} if method_class.holdout else {"validation_share": WHAT_SITES_TELL}),
            **idle(config, method_class, options_of(method_class, config.options, config.method), None),
            **dict.fromkeys(OF_THE_SITES, "the sites bring their own data; leave it out"),
        },
    )


def bound(link: Link, width: int, serving: Serving) -> None:
    """How many bytes a reply may have, where a model is so many numbers."""
    link.limit = serving.largest or max(64 << 20, 8 * 4 * width)


def prepare_deployed(config: Config, facts: Sequence[Facts], engine: Remote) -> Job:
    """What `rounds.prepare` does, without any data: the network, the method's server half, the books."""
    method_class = METHODS[config.method]
    options = options_of(method_class, config.options, config.method)
    if config.validation_share is None:
        config = replace(config, validation_share=method_class.holdout)
    if not facts[0].columns:
        refuse(config, dict.fromkeys(("impute", "scale"), "the sites' data are no tables"))
    task, theirs = make_task(config.task or TASK), like(facts, Preparing.of(config.impute, config.scale))
    network, name, _ = network_of(config, theirs, None)
    site = elsewhere(config, method_class, network, theirs, [f.name for f in facts], task)
    shares = (config.test_share, config.validation_share or 0.0)
    sizes = [(train, test) for train, _, test in (split_sizes(f.samples, f.tests, *shares) for f in facts)]
    resolved = replace(config, clients=len(facts), model=name, data="sites", partition="natural")
    job = make_job(
        resolved, method_class(options), network, theirs, site, engine, sizes, digest(facts), average_of(config)
    )
    rehearsal = Rehearsal(site, method_class(options), theirs.x, theirs.y)
    rehearsal.try_objective()
    engine.rehearse, engine.judge = rehearsal, Judge(task, site.extra, [test for _, test in sizes])
    engine.alive = lambda: job.fed.alive.ids.tolist()
    engine.expel = lambda client, why: job.fed.remove([client], why)
    return job


def elsewhere(
    config: Config,
    method_class: type[Method],
    network: nn.Module,
    theirs: Dataset,
    names: Sequence[str],
    task: Task,
    initial: Tensor | None = None,
) -> Site:
    """Sites with these names as the server has them: which samples are whose, only they know."""
    nothing = Source(theirs.x[:0], theirs.y[:0], torch.device("cpu"))
    empty = [np.zeros(0, np.int64) for _ in names]
    parts: Parts = {"train": empty, "validation": empty, "test": empty}
    return make_site(config, method_class, network, theirs, nothing, parts, names, "fp32", task=task, initial=initial)


def prepared_again(run: RunFolder, facts: Sequence[Facts], engine: Remote) -> Job:
    """The job of a run that these sites began, as it was before the first round."""
    info = run.info
    config = info.configuration(runs_dir=str(info.path.parent))
    job, begun = prepare_deployed(config, facts, engine), info.path / TRUNK
    if info.prepared.get("split_hash") != job.prepared.split_hash:
        raise DataError(f"run {info.id!r}: its {SITES} is not the one it began with")
    if begun.exists() and begun.read_text() != trunk_hash(frozen_of(job.model)):
        raise DataError(f"run {info.id!r}: the frozen weights of {config.model!r} are not those it began with")
    return job


def known_sites(run: RunFolder, instead: str = "resume") -> list[Facts]:
    """What the sites of a run told before it. `instead`: the command for a simulation."""
    path = run.path / SITES
    try:
        entries = json.loads(path.read_text()) if path.stat().st_size < 1 << 26 else None
        if not isinstance(entries, list) or not entries:
            raise ValueError("no list of sites")
        facts = [Facts.of(entry) for entry in entries]
        if [f.name for f in facts] != sorted({f.name for f in facts}):
            raise ValueError("the names are not in order")
        return facts
    except FileNotFoundError:
        why = f"run {run.info.id!r} was a simulation: fedkin {instead} {run.info.id}"
        raise UsageError(why) from None
    except (OSError, ValueError, AttributeError, DataError) as error:
        raise DataError(f"{path} is damaged ({error})") from error
