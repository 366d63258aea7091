"""What every method is: a server half that asks, and a client half that answers.

    class MyMethod(Method):
        def round(self, fed, cohort):                       # server
            replies = fed.ask(cohort, self.train, model=self.model)
            self.model = replies.mean("model", otherwise=self.model)

        def train(self, client, model):                     # where the data are
            return {"model": client.model(client.fit(client.rows(model=model)))}

The two halves are different instances of the class: what `train` may use is its options, the message and what the
client keeps. Names in `keeps` live with the client between rounds as `client["name"]`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from fedkin.compute.layout import Layout
from fedkin.core.cohort import Cohort
from fedkin.core.federation import VALIDATION, Clients, Federation, Reply
from fedkin.core.store import Keep
from fedkin.errors import unknown
from fedkin.options import option, validated
from fedkin.registry import Registry
from fedkin.tasks import Task

if TYPE_CHECKING:
    from fedkin.robust import Detector

METHODS: Registry[type[Method]] = Registry("method")
"""All methods by name; `@fk.METHODS.register("name")` adds one."""

SharedPart = Literal["model", "body", "head"]
EvalPoint = Literal["received", "after_local", "last_round"]
REPORTS: dict[str, str] = {"received": "report", "after_local": "report_after_local", "last_round": "report_last_round"}
EVALUATED: dict[str, str] = {"received": "personal", "after_local": "after_local", "last_round": "last_round"}
"""What clients answer when they are evaluated at a point, and which models that is about."""


FROM_SCRATCH = 20
"""Epochs for which a client trains that comes late and has nothing to begin with for a part of its model."""


@dataclass(frozen=True)
class NoOptions:
    """This method has no options of its own."""


@dataclass(frozen=True)
class Needs:
    """What a method needs memory for, as far as its `keeps` do not say; an estimate, in models where not said."""

    asked: int  # clients asked to train at once, if nothing bounds it
    writers: int  # clients that have something to keep in the end
    trained: int = 1  # by a client at once
    server: float = 2  # that the server remembers
    working: float = 0  # that it works with in a round, on top of the replies


class Method:
    """Base of all methods: shares one model, or its body or head alone, and evaluates what clients make of it as they
    receive it (FedAvg's shape).

    A subclass says what it is by attributes. `Options` is a frozen dataclass of `fk.option` fields, and `profiles`
    names sets of values for them. `about`, `paper`, `shares` (what travels, in words) and `private` (what never does)
    are shown to users; `departs` says where the defaults are not what the paper prints, and which option is. The
    `shared_part` is what the server keeps under this name, as `model`, `body` or `head`, and delivers; None: nothing.
    `keeps` names what stays with each client between rounds (`fk.Keep`), `holdout` is the share of each client's
    training samples that the method sets aside, `eval_point` says when its clients' models are evaluated, and with
    `frozen_head` bodies learn under the common first head. Methods without `uses_head` share whole models, whichever
    layer is their head. `needs_classes` says what a method does that takes one class for each sample ("makes a
    prototype of each class"); empty: it does for any task. `trained_at_once` is how many models a client trains on the
    same mini-batches. `outputs` names options that only choose on which of its models a client is evaluated; a method
    that has some keeps no memory that `__init__` makes, since what is there from the start is taken to follow from the
    options."""

    Options: ClassVar[type[Any]] = NoOptions
    about: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    departs: ClassVar[tuple[str, ...]] = ()
    shares: ClassVar[str] = "model"
    shared_part: ClassVar[SharedPart | None] = "model"
    private: ClassVar[str] = "nothing"
    eval_point: ClassVar[EvalPoint] = "received"
    profiles: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {}}
    holdout: ClassVar[float] = 0.0
    keeps: ClassVar[Mapping[str, Keep]] = {}
    outputs: ClassVar[tuple[str, ...]] = ()
    frozen_head: ClassVar[bool] = False
    uses_head: ClassVar[bool] = True
    needs_classes: ClassVar[str] = ""
    trained_at_once: ClassVar[int] = 1

    model: Tensor
    body: Tensor
    head: Tensor

    def __init__(self, options: Any = None) -> None:
        self.options = options if options is not None else self.Options()

    @classmethod
    def unfit(cls, options: Any, task: Task) -> str | None:
        """Why the method cannot learn such a task under these options; None: it can."""
        if cls.needs_classes and task.targets != "classes":
            return f"it {cls.needs_classes}, which takes one class for each sample"
        return None

    @classmethod
    def looks_at_validation(cls, options: Any) -> str:
        """What the method itself does with validation samples ("its committee judges models on them"): a score on
        them is not independent of it then; empty: nothing."""
        return ""

    @classmethod
    def unused(cls, options: Any) -> Mapping[str, str]:
        """Settings of a run that change nothing under these options, each with the reason: given ones are refused."""
        without = {"head": "the method shares whole models and has no use for a head; leave it out"}
        return {} if cls.uses_head else without

    # ------------------------------------------------------------ server half

    def start(self, fed: Federation, layout: Layout, row: Tensor) -> None:
        """Before the first round: `row` is the common first model."""
        if self.shared_part is not None:
            if self.shared_part != "model":
                layout.require("body", "head")
            setattr(self, self.shared_part, row[layout.columns(self.shared_part)].clone())

    def round(self, fed: Federation, cohort: Clients) -> None:
        """One round: `fed.ask` the clients of `cohort`, and make something of what they answer."""
        raise NotImplementedError

    def shared(self) -> dict[str, Tensor]:
        """What the server has for everybody, as parts of a row: a whole model, or the part that is shared."""
        return {} if self.shared_part is None else {self.shared_part: getattr(self, self.shared_part)}

    def deliver(self) -> dict[str, Any]:
        """What a client receives when it wants its personal model: the message of `personal`."""
        return self.shared()

    def deliver_to(self, fed: Federation, clients: Clients) -> dict[str, Any]:
        """`deliver` for these clients; methods with a message of its own for each client override it (`each`)."""
        return self.deliver()

    def deliver_to_all(self, fed: Federation) -> dict[str, Any]:
        """`deliver_to` for every client at once, where clients are few or far away."""
        return self.deliver_to(fed, fed.all)

    def common(self) -> dict[str, Tensor]:
        """The one model that the server has for everybody, as parts of a row; empty: there is none."""
        if hasattr(self, "model") and self.shares not in ("head", "nothing"):
            return {"model": self.model}
        return {"body": self.body} if self.frozen_head else {}

    def needs(self, cohort: int, seen: int, everybody: int) -> Needs:
        """Memory for `cohort` clients a round, `seen` in all rounds, of `everybody`."""
        return Needs(asked=cohort, writers=seen, trained=self.trained_at_once)

    def detector(self) -> Detector | None:
        """The method's own check for hostile replies, for attacks that adapt to it; None: it has none."""
        return None

    def finish(self, fed: Federation) -> None:
        """After the last round (fine-tuning, if the method has it)."""

    def welcome(self, fed: Federation, newcomers: Clients) -> Clients:
        """Clients that come when the others have trained get models of their own; returns those that have one.

        What they keep begins with what is `shared`. They do what `settle` says with what `deliver_to` gives them; where
        a method has no `settle`, each does a round alone, of which the server keeps nothing."""
        if type(self).settle is not Method.settle:
            fed.ask(newcomers, self.settle, **self.deliver_to(fed, newcomers))
            return newcomers
        away = dict(fed.removed)
        for one in newcomers:
            fed.removed = {**away, **dict.fromkeys(newcomers - [one], fed.round)}
            copy.deepcopy(self).round(fed, fed.all[[one]])
        fed.removed = away
        return newcomers

    def settle_epochs(self, usual: int) -> int:
        """For how many epochs such a client trains, unless it is told; `usual`: as many as the others in a round."""
        return usual if self.common() else max(usual, FROM_SCRATCH)

    # ------------------------------------------------------------ client half

    def settle(self, client: Cohort, *args: Any, **delivered: Any) -> None:
        """What clients do that come when the others have trained (`welcome`): they make what the method keeps."""
        raise NotImplementedError

    def personal(self, client: Cohort, *args: Any, **delivered: Any) -> Tensor:
        """The model each client would use now, [K, D]."""
        return client.rows(**delivered)

    def after_local(self, client: Cohort, *args: Any, **delivered: Any) -> Tensor:
        """The model each client holds after its local training: its last trained one, else the received."""
        trained = client["trained"].bool()
        return self.personal(client, **delivered).where(~trained, client["held"])

    def last_round(self, client: Cohort, **delivered: Any) -> Tensor:
        """Where a server sends to everybody and evaluates before it sends again: of those who trained in the round just
        ended, what came of it, and of the others, what they received."""
        just_now = client["trained"] == client.round
        trained = self.after_local(client, **delivered)
        return self.personal(client, **delivered).where(~just_now, trained)

    def report(self, client: Cohort, **delivered: Any) -> Reply:
        """How the personal models do on the clients' test data (and the models themselves, which stay there)."""
        return _scored(client, self.personal(client, **delivered))

    def report_after_local(self, client: Cohort, **delivered: Any) -> Reply:
        """`report`, of the models that `after_local` gives."""
        return _scored(client, self.after_local(client, **delivered))

    def report_last_round(self, client: Cohort, **delivered: Any) -> Reply:
        """`report`, of the models that `last_round` gives."""
        return _scored(client, self.last_round(client, **delivered))

    # ------------------------------------------------------------ what a checkpoint holds

    def state(self) -> dict[str, Any]:
        """The server half's memory: every attribute but the options."""
        return {k: v for k, v in vars(self).items() if k != "options"}


def options_of(method_class: type[Method], given: Mapping[str, Any], name: str) -> Any:
    """A method's checked options: those of the profile (`profile=paper` unless said), then what was given."""
    values = dict(given)
    profile = str(values.pop("profile", "paper"))
    if profile not in method_class.profiles:
        raise unknown(f"profile of method {name!r}", profile, method_class.profiles)
    return validated(method_class.Options, {**method_class.profiles[profile], **values}, f"method {name!r}")


def given_options(method_class: type[Method], given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What was given, checked, in its right types: the same however it was written."""
    resolved = asdict(options_of(method_class, given, name))
    return {key: resolved.get(key.replace("-", "_"), value) for key, value in given.items()}


def _scored(client: Cohort, rows: Tensor) -> Reply:
    told = vars(client.evaluate(rows, extra=True))
    aside = vars(client.evaluate(rows, "validation", extra=True)) if client.validates else {}
    return {**told, **{f"{VALIDATION}{name}": value for name, value in aside.items()}, "rows": rows}


__all__ = ["METHODS", "EvalPoint", "Keep", "Method", "Needs", "NoOptions", "given_options", "option", "options_of"]
