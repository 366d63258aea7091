"""What the numbers of a table are: of which metric, of whom, and when they were taken."""

from __future__ import annotations

from collections.abc import Sequence

from fedkin.config import POINTS
from fedkin.runs.metric import ShownMetric
from fedkin.sweep.statistics import Group


def metrics(groups: Sequence[Group]) -> list[ShownMetric]:
    """More than one where tasks differ."""
    return list(dict.fromkeys(g.score for g in groups if g.outcomes)) or [ShownMetric()]


def name(groups: Sequence[Group]) -> str:
    """Of the metric, where it is one for all."""
    first, *others = metrics(groups)
    return "score" if others else first.name


def title(groups: Sequence[Group]) -> str:
    whose = f"of the personal models{' of benign clients' if all(map(benign, groups)) else ''}"
    found = metrics(groups)
    if found == [ShownMetric()]:
        return f"Accuracy {whose}, {when(groups)}, percent{selected(groups)}"
    what = "; ".join(metric.described for metric in found)
    return f"Scores {whose} ({what}), {when(groups)}{selected(groups)}"


def differences(groups: Sequence[Group], measure: str) -> str:
    """What is compared with a baseline, and what its sign means where that might surprise."""
    first, *others = metrics(groups)
    if others:
        return f"differences in {measure} score per pair"
    words = f"{'points of' if first.unit == '%' else 'differences in'} {measure} {first.name} per pair"
    return words if first == ShownMetric() else f"{words} ({'above' if first.higher else 'below'} zero is better)"


def by_samples(groups: Sequence[Group]) -> str:
    """What `micro` is."""
    return "the share of right answers" if name(groups) == "accuracy" else "the mean over test samples"


def selected(groups: Sequence[Group]) -> str:
    on = {str(g.choice["on"]) for g in groups if g.choice is not None}
    return "".join(f", settings chosen on {samples} data" for samples in sorted(on))


def points(groups: Sequence[Group]) -> list[str]:
    return list(dict.fromkeys(point for g in groups for point in g.points))


def when(groups: Sequence[Group]) -> str:
    """The point at which models were evaluated, where it is one for all."""
    found = points(groups)
    return "evaluated as each row says" if len(found) > 1 else f"evaluated {''.join(POINTS.get(p, p) for p in found)}"


def judged(group: Group) -> str:
    return "; ".join(POINTS.get(p, p) for p in group.points)


def benign(group: Group) -> bool:
    return group.config.attack != "none" and group.config.attackers != "redrawn"
