"""What a site allows, whatever the server asks: a TOML file on the site, looked at before anything is computed.

    methods = ["fedcap", "fedpkda"]   # others are refused
    questions = 12                    # answered in one round, at most
    test_share = 0.25                 # which samples are for testing is drawn here, once, whatever the server says
    metrics = ["accuracy"]            # the main one and those beside it that are told; runs with others are refused
    evaluation = 0.1                  # shares of right answers in steps of a tenth; "exact"; "none"
    least_noise = 0.5                 # scale of the noise on what a method sends, against its bound on the features
    most_epsilon = 4.0                # where a method is told an epsilon instead

    [settings]                        # of those that a server tells its sites: a value, or bounds
    rounds = { most = 200 }
    optimiser = { among = ["sgd", "adam"] }

    [options.fedcap]                  # of a method, whether the server names them or they are its defaults
    lam = { least = 0.1, most = 2.0 }

What is not named is allowed. What is refused is refused in words, to the server and in the site's own log.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedkin.config import Config, read_toml
from fedkin.core.federation import Masked
from fedkin.errors import FedKinError, UsageError, unknown
from fedkin.methods import METHODS
from fedkin.tasks import Metric, Task

QUESTIONS = 64  # in one round, where no policy says otherwise; a method asks a handful
KEYS = (
    "methods",
    "questions",
    "test_share",
    "metrics",
    "evaluation",
    "least_noise",
    "most_epsilon",
    "settings",
    "options",
)


class Declined(FedKinError):
    """This site does not do that."""


@dataclass(frozen=True)
class Rule:
    """What one setting or option may be."""

    least: float | None = None
    most: float | None = None
    among: tuple[Any, ...] | None = None

    @classmethod
    def of(cls, name: str, given: Any) -> Rule:
        if not isinstance(given, dict):
            return cls(among=(given,))
        odd = [k for k in given if k not in ("least", "most", "among")]
        if odd:
            raise unknown(f"rule for {name}", odd[0], ("least", "most", "among"))
        for bound in ("least", "most"):
            if bound in given and not _number(given[bound]):
                raise UsageError(f"{name}: {bound} = {given[bound]!r} is no number")
        among = given.get("among")
        if among is not None and (not isinstance(among, list) or not among):
            raise UsageError(f"{name}: among = {among!r} is no list of values")
        if not given:
            raise UsageError(f"{name}: say least, most or among")
        return cls(given.get("least"), given.get("most"), None if among is None else tuple(among))

    def check(self, name: str, value: Any) -> None:
        if self.among is not None and not any(_same(value, one) for one in self.among):
            raise Declined(f"{name}={value!r}: this site's policy allows {', '.join(map(repr, self.among))}")
        if self.least is not None and not (_number(value) and value >= self.least):
            raise Declined(f"{name}={value!r}: this site's policy allows at least {self.least:g}")
        if self.most is not None and not (_number(value) and value <= self.most):
            raise Declined(f"{name}={value!r}: this site's policy allows at most {self.most:g}")


@dataclass(frozen=True)
class Policy:
    """`evaluation`: 0 exact, a step for shares of right answers, or None: no answer."""

    methods: tuple[str, ...] | None = None
    questions: int = QUESTIONS
    test_share: float | None = None
    metrics: tuple[str, ...] | None = None
    evaluation: float | None = 0.0
    least_noise: float | None = None
    most_epsilon: float | None = None
    settings: Mapping[str, Rule] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Rule]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path, told: Sequence[str]) -> Policy:
        """From a file; `told`: the settings that a server may tell. What cannot mean what it says is refused."""
        try:
            return cls.of(read_toml(Path(path).expanduser()), told)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error

    @classmethod
    def of(cls, given: Mapping[str, Any], told: Sequence[str]) -> Policy:
        for key in given:
            if key not in KEYS:
                raise unknown("key of a policy", key, KEYS)
        values: dict[str, Any] = {}
        if "methods" in given:
            values["methods"] = tuple(_method(name) for name in _listed("methods", given["methods"]))
        if "questions" in given:
            values["questions"] = _within("questions", given["questions"], 1, 10**6, whole=True)
        if "test_share" in given:
            values["test_share"] = _within("test_share", given["test_share"], 0.01, 0.99)
        if "metrics" in given:
            values["metrics"] = tuple(_listed("metrics", given["metrics"]))
        for name in ("least_noise", "most_epsilon"):
            if name in given:
                values[name] = _within(name, given[name], 0.0, math.inf)
        if "evaluation" in given:
            values["evaluation"] = _evaluation(given["evaluation"])
        values["settings"] = _rules("settings", given.get("settings", {}), told)
        options = given.get("options", {})
        if not isinstance(options, dict):
            raise UsageError("options: write [options.METHOD]")
        values["options"] = {
            _method(name): _rules(f"options.{name}", rules, [f.name for f in fields(METHODS[name].Options)])
            for name, rules in options.items()
        }
        return cls(**values)

    def check(self, config: Config, options: Any, metrics: Sequence[str] = ()) -> None:
        """Whether this site takes part in such a run, which tells these metrics."""
        for name in metrics if self.metrics is not None else ():
            if name not in (self.metrics or ()):
                raise Declined(f"metric {name!r}: this site's policy allows {', '.join(self.metrics or ())}")
        if self.methods is not None and config.method not in self.methods:
            raise Declined(f"method {config.method!r}: this site's policy allows {', '.join(self.methods)}")
        for name, rule in self.settings.items():
            rule.check(name, getattr(config, name))
        for name, rule in self.options.get(config.method, {}).items():
            rule.check(name, getattr(options, name))
        self._check_noise(options)

    def _check_noise(self, options: Any) -> None:
        """The noise that counts is that of the way the method was told to choose it, measured by what it covers."""
        noise, bound, target = (getattr(options, n, None) for n in ("noise", "clip", "target_epsilon"))
        if noise is None or bound is None:
            return
        if target is not None:
            if self.most_epsilon is None and self.least_noise is not None:
                raise Declined(f"target_epsilon={target!r}: this site's policy names the least noise and no epsilon")
            if self.most_epsilon is not None and not target <= self.most_epsilon:
                raise Declined(f"target_epsilon={target!r}: this site's policy allows at most {self.most_epsilon:g}")
        elif self.least_noise is not None and not noise >= self.least_noise * bound:
            raise Declined(
                f"noise={noise!r} for features within {bound!r}: this site's policy asks for at least "
                f"{self.least_noise:g} of that"
            )
        elif self.least_noise is None and self.most_epsilon is not None:
            raise Declined(
                f"noise={noise!r}: this site's policy asks for target_epsilon of at most {self.most_epsilon:g}"
            )

    def coarse(
        self, values: Mapping[str, Tensor | Masked], task: Task, extra: Sequence[Metric]
    ) -> dict[str, Tensor | Masked]:
        """A measurement of these metrics as this site tells it: no finer than its policy says."""
        if self.evaluation is None:
            raise Declined("this site's policy allows no evaluation: its own model is kept, the server is told nothing")
        right, count, loss, others = (values.get(n) for n in ("correct", "count", "loss", "extra"))
        if not self.evaluation or not isinstance(right, Tensor) or not isinstance(count, Tensor):
            return dict(values)
        value = self._step(right / count.clamp(min=1), task.metric, 1.0) * count
        told: dict[str, Tensor | Masked] = {"correct": value.round() if task.targets == "classes" else value}
        if isinstance(loss, Tensor):
            told["loss"] = _rounded(loss)
        if isinstance(others, Tensor):
            each = [self._step(others[:, i], m, m.scale) for i, m in enumerate(extra)]
            told["extra"] = torch.stack(each, 1).to(others.dtype)
        return {**values, **told}

    def _step(self, value: Tensor, metric: Metric, scale: float) -> Tensor:
        """A share in the policy's steps, any other number to two digits."""
        if metric.bounds != (0.0, 1.0):
            return _rounded(value)
        step = (self.evaluation or 0.0) * scale
        return ((value / step).round() * step).clamp(max=scale)


def _rounded(values: Tensor) -> Tensor:
    return torch.tensor([rounded(v) for v in values.reshape(-1).tolist()], dtype=values.dtype).view_as(values)


def rounded(value: float) -> float:
    """Two digits of a loss."""
    return float(f"{value:.2g}") if math.isfinite(value) else value


def _evaluation(given: Any) -> float | None:
    if given in ("exact", "none"):
        return 0.0 if given == "exact" else None
    if isinstance(given, str):
        raise UsageError(f'evaluation = {given!r}: write "exact", "none", or a step such as 0.1')
    return float(_within("evaluation", given, 0.001, 0.5))


def _rules(where: str, given: Any, known: Sequence[str]) -> dict[str, Rule]:
    if not isinstance(given, dict):
        raise UsageError(f"{where}: write [{where}]")
    for name in given:
        if name not in known:
            raise unknown(f"name in [{where}]", name, known)
    return {name: Rule.of(name, rule) for name, rule in given.items()}


def _listed(name: str, given: Any) -> list[str]:
    if not isinstance(given, list) or not given or not all(isinstance(v, str) for v in given):
        raise UsageError(f"{name} = {given!r} is no list of names")
    return given


def _method(name: str) -> str:
    METHODS[name]  # an unknown one is refused with the nearest
    return name


def _within(name: str, value: Any, low: float, high: float, whole: bool = False) -> Any:
    if not _number(value) or not low <= value <= high or (whole and not isinstance(value, int)):
        raise UsageError(f"{name} = {value!r}: expected a {'whole ' if whole else ''}number from {low:g} to {high:g}")
    return value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _same(a: Any, b: Any) -> bool:
    """1 and 1.0 are one value, 1 and true are not."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)
