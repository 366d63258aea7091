"""What to run: one flat, checked description. Flags, TOML files and keyword arguments all end up here."""

from __future__ import annotations

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from fedkin.errors import UsageError
from fedkin.options import option, validated
from fedkin.version import VERSION

NOT_IDENTITY = ("runs_dir", "checkpoint_every", "device", "way", "chunk", "data_dir", "on_failure", "force")
"""Where and how a run is done, not what it is."""
LATER: dict[str, Any] = {
    **{"lr_schedule": "constant", "lr_factors": "same", "task": None, "metrics": None},
    **{"clip_grad": None, "accumulate": 1},
    **{"label": "label", "client_column": None, "categories": None, "impute": "none", "scale": "none"},
    **{"patience": None, "min_gain": 0.0, "keep": "last"},
    **{"image_size": None, "image_mode": None, "start_from": None},
}
"""Settings that older runs did not have, and the values that they were done with: these say nothing new."""
TEXTS = ("lr_factors", "lr-factors", "metrics", "categories")
"""Settings that are one text and may be given as a list or a table."""
SPLIT = (
    *("data", "data_dir", "clients", "partition", "samples_per_client", "quantity_skew"),
    *("test_share", "validation_share", "seed", "label", "client_column", "categories", "impute", "scale"),
    *("image_size", "image_mode"),
)
"""Settings that decide who holds which samples."""
ONLY_UNDER_ATTACK = ("malicious", "knowledge", "attackers")
"""Settings that change nothing where nobody attacks."""
DATA, MODEL, TRAINING, EVALUATION, CLIENTS, PLACE = GROUPS = (
    "Data",
    "Model and task",
    "Training",
    "Evaluation",
    "Hostile and failing clients",
    "Where and how it runs",
)
"""What settings are about; help is in this order. Each setting says at its field which one it belongs to."""
POINTS = {
    "received": "as received",
    "after_local": "after local training",
    "last_round": "as received, the last round's participants after training",
}
"""When a client's model is evaluated, in words."""
STATE_MARK = "@"
"""What stands, in `start_from`, between the name of a run and the hash of what there is to take from it."""
SAME_POINT = "received"
"""When a comparison evaluates all methods unless told otherwise: with the model that a method leaves its client."""


@dataclass(frozen=True)
class Config:
    """Every setting of a run, checked: what flags, TOML files and keyword arguments end up as.

    Made by `fk.run(...)` and kept as `result.config`. Each setting is a flag of `fedkin run`, too;
    `given` names those that somebody asked for."""

    method: str = option("fedavg", "the method; `fedkin methods` lists them", group=TRAINING)
    data: str = option(
        "digits",
        "a data set by name, an .npz, .csv or .parquet file, or a folder: with one file per client, or with images in "
        "CLIENT/CLASS or in CLASS",
        group=DATA,
    )
    clients: int | None = option(
        20, "number of clients (with a natural partition, default: all that it has)", low=1, group=DATA
    )
    partition: str = option(
        "pathological:2", "how samples are dealt to clients; `fedkin partitions` lists the ways", group=DATA
    )
    samples_per_client: int | None = option(None, "keep at most this many samples of each client", low=1, group=DATA)
    quantity_skew: float | None = option(
        None, "makes client sizes unequal: the sigma of a log-normal distribution", above=0, group=DATA
    )
    test_share: float = option(
        0.25, "share of each client's samples that is used for testing only", low=0, high=0.9, group=DATA
    )
    validation_share: float | None = option(
        None,
        "share of each client's training samples that is set aside for validation (default: what the method needs)",
        low=0,
        high=0.9,
        group=DATA,
    )
    shift: str | None = option(
        None, "corruptions of the images, by name with commas between, or all; each client gets one of them", group=DATA
    )
    severity: int = option(5, "strength of the corruptions", low=1, high=5, group=DATA)
    label: str = option("label", "the column of a table that holds the labels", group=DATA)
    client_column: str | None = option(
        None, "the column that says whose a row is, where one table holds the rows of all clients", group=DATA
    )
    categories: str | None = option(
        None, "columns of a table that are categories although they hold numbers, as in sex+thal", group=DATA
    )
    impute: str = option(
        "none",
        "how missing values of a table are filled: none (they are refused), local (from each client's own training "
        "samples) or federated (from sums that clients give away); options follow a colon: numbers=mean or median, "
        "words=category (of its own) or frequent, as in local:numbers=median",
        group=DATA,
    )
    scale: Literal["none", "local", "federated"] = option(
        "none",
        "how a table's numbers are standardised: none, local (by each client's own training samples) or federated (by "
        "sums that clients give away)",
        group=DATA,
    )
    image_size: str | None = option(
        None, "the size that images in folders are brought to: a number, or HEIGHTxWIDTH, as in 48x64", group=DATA
    )
    image_mode: Literal["rgb", "grey"] | None = option(
        None, "what images in folders are converted to (default: all are the same already)", group=DATA
    )
    data_dir: str | None = option(
        None, "the folder that holds data sets (default: FEDKIN_DATA, else the user's cache)", group=DATA
    )
    model: str | None = option(
        None, "the network; `fedkin models` lists them (default: one that suits the data)", group=MODEL
    )
    head: str | None = option(
        None,
        "the module of the network that is the head (default: the linear layer that makes the output)",
        group=MODEL,
    )
    start_from: str | None = option(
        None,
        "begin with what an earlier run learnt (its name, the beginning of it, its folder, or last): the shared model "
        "and, where they fit, what clients keep",
        group=MODEL,
    )
    init: Literal["seed", "given"] = option(
        "seed",
        "first weights of a network of your own (from Python): drawn from the seed, or those that it came with",
        group=MODEL,
    )
    buffers: Literal["average", "local"] = option(
        "average", "BatchNorm statistics: averaged with the body, or kept by each client", group=MODEL
    )
    task: str | None = option(
        None,
        "what is learnt; `fedkin tasks` lists the tasks; options follow a colon, as in regression:loss=mae (default: "
        "what the data are for)",
        group=MODEL,
    )
    metrics: str | None = option(
        None,
        "metrics beside the task's main one, as in auc+macro-f1, or all; `fedkin tasks NAME` lists them",
        group=MODEL,
    )
    rounds: int = option(20, "number of communication rounds", low=1, group=TRAINING)
    participation: float = option(
        1.0, "share of the clients that are drawn in each round", above=0, high=1, group=TRAINING
    )
    epochs: int = option(5, "local epochs in each round", low=1, group=TRAINING)
    batch: int = option(10, "mini-batch size", low=1, group=TRAINING)
    optimiser: Literal["sgd", "adam"] = option("sgd", "local optimiser", group=TRAINING)
    lr: float = option(0.01, "learning rate", above=0, group=TRAINING, search="0.001..1:log")
    lr_schedule: str = option(
        "constant",
        "how the learning rate changes from round to round; `fedkin schedules` lists the ways; options follow a "
        "colon, as in step:every=10,gamma=0.5",
        group=TRAINING,
    )
    lr_factors: str = option(
        "same",
        "the factor by which each client multiplies its learning rates: same, lognormal:SIGMA, one for each client as "
        "in 1+0.5+2, or some by name as in paris=0.1+lima=2",
        group=TRAINING,
    )
    momentum: float = option(0.0, "momentum of sgd", low=0, high=0.999, group=TRAINING)
    weight_decay: float = option(0.0, "weight decay", low=0, group=TRAINING)
    clip_grad: float | None = option(
        None,
        "the largest norm of a client's gradient: a longer one is shortened to it before the optimiser takes its step "
        "(default: no limit)",
        above=0,
        infinite=True,
        group=TRAINING,
    )
    accumulate: int = option(
        1,
        "mini-batches that go into one step of the optimiser: as one batch so many times as large",
        low=1,
        group=TRAINING,
    )
    augment: bool = option(False, "train on random crops (with a padding of 4) and flips of the images", group=TRAINING)
    order: Literal["shuffled", "fixed"] = option(
        "shuffled",
        "order of the samples in a local epoch; fixed: as stored, without the last batch if it is short",
        group=TRAINING,
    )
    seed: int = option(0, "the seed from which everything random follows", low=0, group=TRAINING)
    eval_point: Literal["auto", "received", "after_local", "last_round"] = option(
        "auto",
        "when a client's model is evaluated: as received from the server, after local training, or (last_round) after "
        "it for clients that trained in the last round and as received for the others; auto: the method's own point",
        group=EVALUATION,
    )
    eval_every: int = option(
        1, "evaluate after every so many rounds, and always after the last one", low=1, group=EVALUATION
    )
    patience: int | None = option(
        None,
        "stop early: after so many evaluations in a row without a better score on validation samples (default: never); "
        "needs validation_share",
        low=1,
        group=EVALUATION,
    )
    min_gain: float = option(
        0.0, "by how much more than this a score has to be better, for patience", low=0, group=EVALUATION
    )
    keep: Literal["last", "best"] = option(
        "last",
        "which personal models are the result: those after the last round, or those of the best round on validation "
        "samples; needs validation_share",
        group=EVALUATION,
    )
    drop: float = option(0.0, "probability that a client does not answer", low=0, high=0.99, group=CLIENTS)
    straggle: float = option(0.0, "probability that a client's reply comes too late", low=0, high=0.99, group=CLIENTS)
    attack: str = option(
        "none",
        "what malicious clients do; `fedkin attacks` lists the attacks; options follow a colon, as in lie:z=0.5",
        group=CLIENTS,
    )
    malicious: float = option(
        0.3, "share of the clients that are malicious; needs an attack", low=0, high=1, group=CLIENTS
    )
    knowledge: Literal["own", "full"] = option(
        "full", "which updates attackers see: their own, or those of all clients", group=CLIENTS
    )
    attackers: str = option(
        "fixed",
        "fixed: the same attackers in all rounds; redrawn: others in every round; or their numbers, as in 1+8+10",
        group=CLIENTS,
    )
    rule: str = option(
        "mean",
        "how the server averages; `fedkin rules` lists the rules; options follow a colon, as in krum:malicious=0.2",
        group=CLIENTS,
    )
    device: str = option("auto", "cpu, cuda, cuda:1, ...; auto: a GPU if there is one", group=PLACE)
    precision: Literal["auto", "fp32", "tf32", "bf16"] = option(
        "auto", "precision of training; auto: tf32 on a GPU, fp32 elsewhere", group=PLACE
    )
    way: str = option(
        "auto",
        "how the clients' models are trained side by side: each, threads, batched, graph; auto: the fastest",
        group=PLACE,
    )
    chunk: int | None = option(
        None,
        "work on at most this many clients at once, which bounds memory and does not change results",
        low=1,
        group=PLACE,
    )
    force: bool = option(False, "start even if memory or disk look too small for the run", group=PLACE)
    on_failure: Literal["drop", "stop"] = option(
        "drop", "what happens if a client fails: the run goes on without it, or stops", group=CLIENTS
    )
    runs_dir: str | None = option(
        None, "the folder in which the run gets a folder of its own (default: FEDKIN_RUNS, else ./runs)", group=PLACE
    )
    checkpoint_every: int = option(
        10,
        "save a checkpoint, from which a run can be resumed, after every so many rounds; 0: never",
        low=0,
        group=PLACE,
    )
    options: Mapping[str, Any] = field(default_factory=dict, metadata={"help": "the method's own options"})
    given: InitVar[Iterable[str]] = ()  # names of settings that somebody asked for; no part of what a run is

    def __post_init__(self, given: Iterable[str]) -> None:
        object.__setattr__(self, "given", frozenset(given))  # where `replace` finds it
        if self.clip_grad == math.inf:
            object.__setattr__(self, "clip_grad", None)

    @property
    def asked(self) -> frozenset[str]:
        """The settings that were given, whatever their value; the others have their defaults."""
        found: frozenset[str] = vars(self)["given"]
        return found

    def without(self, names: Iterable[str]) -> Config:
        """As if these had not been given."""
        usual: dict[str, Any] = {f.name: f.default for f in fields(Config) if f.name in set(names)}
        return replace(self, **usual, given=self.asked - usual.keys())

    def to_dict(self) -> dict[str, Any]:
        """All settings by name, as plain values: what a run's folder keeps of them."""
        return {**asdict(self), "options": dict(self.options)}

    def identity(self) -> str:
        """sha256 over this version and every setting that changes what comes out: the same means the same run."""
        kept = {k: v for k, v in self.to_dict().items() if k not in NOT_IDENTITY and (k, v) not in LATER.items()}
        if self.start_from is not None:  # by its hash: a run is the same wherever it lies
            kept["start_from"] = self.start_from.rpartition(STATE_MARK)[2]
        text = json.dumps([VERSION, kept], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def effective(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run's settings that change what comes out of it: all but where and how it is computed, and what
    attackers do where nobody attacks."""
    idle = ONLY_UNDER_ATTACK if settings.get("attack", "none") == "none" else ()
    skipped = {*NOT_IDENTITY, *idle}
    return {k: v for k, v in settings.items() if k not in skipped and (k, v) not in LATER.items()}


def make_config(values: Mapping[str, Any], given: Iterable[str] | None = None) -> Config:
    """A checked configuration; unknown keys and bad values are refused with what would be right.

    `given`: which of the values somebody asked for: all, unless said, but none where all settings are there (what
    `to_dict` made is a record, no request). A setting that was asked for and would change nothing is refused where the
    run is prepared."""
    if given is None:
        given = () if values.keys() >= {f.name for f in fields(Config)} - LATER.keys() else values.keys()
    values = {name: _in_one_text(value) if name in TEXTS else value for name, value in values.items()}
    options = values.pop("options", {})
    if not isinstance(options, Mapping):
        raise UsageError(f"options={options!r}: a table of the method's own options")
    config = validated(Config, values, "a run")
    asked = frozenset(name.replace("-", "_") for name in given)
    config = replace(config, options=dict(options), given=asked)
    if "partition" not in values and (is_folder(config.data) or config.client_column is not None):
        config = replace(config, partition="natural")
    return replace(config, clients=None) if config.partition == "natural" and "clients" not in values else config


def _in_one_text(value: Any) -> Any:
    """A list, as in 1+0.5+2, or a mapping, as in paris=0.1+lima=2."""
    words = [f"{k}={v}" for k, v in value.items()] if isinstance(value, Mapping) else value
    return "+".join(str(w).replace("e+", "e") for w in words) if isinstance(words, list | tuple) else value


def is_folder(data: str) -> bool:
    """Whether data are a folder with a file or a folder for each client, and not one with a folder for each class."""
    try:
        path = Path(data).expanduser()
        return path.is_dir() and not any(_is_class(part) for part in path.iterdir())
    except (OSError, RuntimeError, ValueError):  # a name that no file can have
        return False


def _is_class(path: Path) -> bool:
    """Whether a folder holds images itself."""
    if path.name.startswith(".") or not path.is_dir():
        return False
    return any(p.suffix.lower() in (".png", ".jpg", ".jpeg") for p in path.iterdir() if not p.name.startswith("."))


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table in a TOML file, for `make_config`."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # damaged TOML and bytes that are no text are ValueErrors
        said = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else f"is not valid TOML: {error}"
        raise UsageError(f"{path} {said}; give a TOML file with settings") from error
