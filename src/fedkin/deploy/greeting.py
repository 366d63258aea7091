"""What a site tells about its data before a run, untrusted and checked here, and whether sites fit together."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedkin.data import Dataset, Preparing
from fedkin.data.fitting import AS_IT_IS, shaped
from fedkin.data.targets import TARGETS, WORDS, Targets, made_up
from fedkin.deploy.certificates import NAME
from fedkin.deploy.site_columns import Told, kinds, told, too_many_words, united
from fedkin.errors import DataError

MOST_SAMPLES = 10**9
MOST_CLASSES = 100_000
MOST_NUMBERS = 1 << 24  # in one sample, or in one sample's targets
USUAL_CLASSES = 1000  # that sites may name unless the server says otherwise
MADE_UP = 12  # samples that stand for those of the sites
DTYPES = ("uint8", "float32", "int64")


@dataclass(frozen=True)
class Facts:
    """How many samples of which shape a site has, and what they are labelled with: the names of the classes, or, of
    other targets, how many numbers a sample (`width`). `vocabulary`: how many token ids there are; 0: no tokens."""

    name: str
    samples: int
    tests: int | None
    shape: tuple[int, ...]
    dtype: str
    labels: tuple[int | str, ...] = ()
    targets: Targets = "classes"
    width: int = 1
    vocabulary: int = 0
    columns: Told = ()

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Facts:
        name, samples, tests = fields.get("site"), fields.get("samples"), fields.get("tests")
        shape, dtype = fields.get("shape"), fields.get("dtype")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise DataError("it gives no proper name")
        if not _whole(samples, 1, MOST_SAMPLES) or not (tests is None or _whole(tests, 0, MOST_SAMPLES)):
            raise DataError(f"it speaks of {samples!r} samples, {tests!r} for testing")
        assert isinstance(samples, int)
        if (tests or 0) >= samples:
            raise DataError(f"it speaks of {samples!r} samples, {tests!r} for testing")
        if not isinstance(shape, list) or not 1 <= len(shape) <= 4 or not all(_whole(n, 1, 10**6) for n in shape):
            raise DataError(f"its samples have no proper shape ({shape!r})")
        if math.prod(shape) > MOST_NUMBERS:
            raise DataError(f"a sample of it has {math.prod(shape)} numbers, more than {MOST_NUMBERS}")
        targets, width = fields.get("targets", "classes"), fields.get("width", 1)
        vocabulary = fields.get("vocabulary", 0)
        if targets not in TARGETS:
            raise DataError(f"it has targets of no known kind ({str(targets)[:40]!r})")
        if not _whole(vocabulary, 0, MOST_CLASSES) or not _whole(width, 1, MOST_CLASSES):
            raise DataError(f"it speaks of {width!r} targets a sample, {vocabulary!r} token ids")
        assert isinstance(vocabulary, int)
        assert isinstance(width, int)
        if width != {"classes": 1, "survival": 2}.get(targets, width) or (targets == "tokens" and not vocabulary):
            raise DataError(f"it speaks of {width} targets a sample, which {targets} do not have")
        columns = told(fields.get("columns", []), samples)
        if columns and (shape != [len(columns)] or dtype not in ("float32", "float64")):
            raise DataError(f"it names {len(columns)} columns, and its samples have the shape {shape} ({dtype!r})")
        dtype = "float32" if columns else dtype
        if dtype not in DTYPES or (dtype == "int64") != bool(vocabulary):
            raise DataError(f"its samples are of type {dtype!r}, with {vocabulary} token ids")
        labels = _labels(fields.get("labels"), samples) if targets == "classes" else _no_labels(fields.get("labels"))
        return cls(name, samples, tests, tuple(shape), dtype, labels, targets, width, vocabulary, columns)

    def plain(self) -> dict[str, Any]:
        found = {**asdict(self), "site": self.name, "shape": list(self.shape), "labels": list(self.labels)}
        table = found.pop("columns")
        return {**found, "columns": [[name, list(words)] for name, words in table]} if table else found

    @property
    def outputs(self) -> int:
        """How many numbers a network needs at least for this site alone: a sample, or (tokens) a position."""
        if self.targets == "classes":
            return len(self.labels)
        return {"tokens": self.vocabulary, "survival": 1}.get(self.targets, self.width)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What has to be the same at all sites."""
        sort = type(self.labels[0]) if self.labels else None
        return self.shape, self.dtype, sort, self.targets, self.width, self.vocabulary, kinds(self.columns)

    def told_from(self, other: Facts) -> str:
        """In words, what it has that another has not; all of it, unless that is but columns."""
        if self.kind[:-1] != other.kind[:-1]:
            return self.words
        return _words_of(sorted({*kinds(self.columns)} - {*kinds(other.columns)}))

    @property
    def words(self) -> str:
        """That, in words."""
        found = f"{self.dtype} samples of shape {self.shape}"
        if self.vocabulary:
            found += f", {self.vocabulary} token ids"
        if self.labels:
            return f"{found}, {'numbers' if type(self.labels[0]) is int else 'words'} for labels"
        return f"{found}, targets of {self.width} numbers a sample"


def _words_of(columns: Sequence[tuple[str, bool]]) -> str:
    said = [f"{name!r} ({'words' if words else 'numbers'})" for name, words in columns[:5]]
    return f"the columns {', '.join(said)}{', ...' * (len(columns) > 5)}" if columns else "no other columns"


def _labels(labels: object, samples: int) -> tuple[int | str, ...]:
    if not isinstance(labels, list) or not 1 <= len(labels) <= MOST_CLASSES:
        raise DataError("it names no classes")
    if len(labels) > samples:
        raise DataError(f"it names {len(labels)} classes, but has {samples} samples")
    kinds = {type(v) for v in labels}
    if kinds not in ({int}, {str}) or len(set(labels)) < len(labels) or any(len(str(v)) > 200 for v in labels):
        raise DataError("the names of its classes are neither whole numbers nor words")
    return tuple(labels)


def _no_labels(labels: object) -> tuple[int | str, ...]:
    if labels != []:
        raise DataError("it names classes, and its targets are none")
    return ()


def _whole(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def together(facts: Sequence[Facts]) -> tuple[tuple[int, ...], str, list[int | str]]:
    """Shape and type of all sites' samples, and all classes in order; `DataError` where sites do not fit together."""
    first = facts[0]
    for other in facts[1:]:
        if other.kind != first.kind:
            one, two = first.told_from(other), other.told_from(first)
            raise DataError(f"site {first.name!r} has {one}, site {other.name!r} {two}; they must be alike")
    return first.shape, first.dtype, sorted({v for f in facts for v in f.labels})


def fitting(
    facts: Sequence[Facts], most: int, targets: Targets = "classes", task: str = "classification"
) -> tuple[list[Facts], dict[str, str]]:
    """Those of the sites that fit together, in order of their names, and why each of the others does not: targets of
    the run's task, the kind of samples and targets that most sites have, and `most` classes or outputs in all."""
    ordered = sorted(facts, key=lambda f: f.name)
    odd = {
        f.name: f"the run learns {task}, which needs {WORDS[targets]}; it has {WORDS[f.targets]}: start its client "
        f"with --task {task}, and data for it"
        for f in ordered
        if f.targets != targets
    }
    kinds = [f.kind for f in ordered if f.name not in odd]
    # where as many have one as another, the smaller: a site cannot make the network of others large by itself
    usual = max(kinds, key=lambda k: (kinds.count(k), -math.prod(k[0]), -k[4], -k[5]), default=None)
    ours = next((f for f in ordered if f.kind == usual), None)
    for f in ordered:
        if f.name not in odd and ours is not None and f.kind != usual:
            odd[f.name] = f"it has {f.told_from(ours)}; most sites have {ours.told_from(f)}; they must be alike"
    classes: set[int | str] = set()
    for f in sorted((f for f in ordered if f.name not in odd), key=lambda f: len(f.labels)):
        if max(f.outputs, len(classes.union(f.labels))) > most:
            what = "classes" if f.labels else "outputs"
            odd[f.name] = f"with its {f.outputs} {what} there would be more than --max-classes {most}"
        else:
            classes.update(f.labels)
    odd |= too_many_words([(f.name, f.columns) for f in ordered if f.name not in odd])
    return [f for f in ordered if f.name not in odd], odd


def misfit(run: Sequence[Facts], late: Facts) -> str | None:
    """Why a site that comes late cannot have a model of a run that these sites began; None: it can."""
    if late.name in {f.name for f in run}:
        return "it took part in the run and has its model"
    if late.kind != run[0].kind:
        return f"it has {late.told_from(run[0])}; the run's sites have {run[0].told_from(late)}; they must be alike"
    known = together(run)[2]
    foreign = [v for v in late.labels if v not in {*known}]
    if foreign:
        some = ", ".join(map(repr, known[:20])) + (", ..." if len(known) > 20 else "")
        return f"it has the class {foreign[0]!r}, which the run does not know (it knows {some})"
    return None


def like(facts: Sequence[Facts], wish: Preparing = AS_IT_IS) -> Dataset:
    """Samples that are nobody's, and look like those of sites that fit together, once their tables are prepared."""
    shape, dtype, labels = together(facts)
    if facts[0].columns:
        shape = (len(shaped(united([f.columns for f in facts]), wish)),)
    first, rng = facts[0], np.random.Generator(np.random.PCG64(0))
    if dtype == "float32":
        x = rng.random((MADE_UP, *shape), np.float32)
    else:
        x = rng.integers(0, first.vocabulary or 256, (MADE_UP, *shape), np.dtype(dtype))
    outputs = len(labels) or first.outputs
    y = made_up(first.targets, MADE_UP, outputs, first.width)
    names = tuple(map(str, labels))
    return Dataset("sites", x, y, outputs, names, vocabulary=first.vocabulary, targets=first.targets)


def digest(facts: Sequence[Facts]) -> str:
    return hashlib.sha256(json.dumps([f.plain() for f in facts], sort_keys=True).encode()).hexdigest()
