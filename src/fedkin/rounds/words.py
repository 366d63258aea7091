"""A run in words, for every place that shows one: whose accuracy its numbers are, who attacks, and what was reached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedkin.config import Config
from fedkin.options import named_spec

if TYPE_CHECKING:
    from fedkin.rounds.records import Accuracy
    from fedkin.rounds.result import Result


def printable(text: str) -> str:
    """Text of unknown origin as a terminal may have it: no control characters, no changes of direction."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def size(count: float) -> str:
    """Bytes for people: 812 B, 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def seconds(value: float) -> str:
    """A time for people: 9.3 s, 12 min 05 s, 3 h 20 min."""
    if value < 100:
        return f"{value:.1f} s"
    whole = round(value)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {whole % 60:02d} s"


# ---------------------------------------------------------------- who attacks, and whose accuracy is counted


def attackers(config: Config, clients: int) -> int:
    """How many clients are malicious (at a time, if others are every round)."""
    from fedkin.robust import Adversary, Attack  # which needs torch: not everybody who says bytes does

    if config.attack == "none":
        return 0
    return int(Adversary.of(config, Attack(), clients).malicious().sum())


def benign_only(config: Config) -> bool:
    """Whether accuracy leaves out malicious clients: it does where the same ones are malicious all along, unless what
    they lose is the question."""
    from fedkin.robust import Adversary, make_attack

    if config.attack == "none":
        return False
    return not Adversary(make_attack(*named_spec(config.attack)), 1, redraw=config.attackers == "redrawn").counted


def threat(config: Config, clients: int) -> str:
    """The attack in a few words, and whose accuracy is counted; empty without one."""
    if config.attack == "none":
        return ""
    bad = attackers(config, clients)
    told = f"{config.attack}: {bad} of {clients} clients malicious"
    if benign_only(config):
        return f"{told}, accuracy of the {clients - bad} benign ones only"
    return f"{told}{', others every round' if config.attackers == 'redrawn' else ''}, accuracy of all clients"


# ---------------------------------------------------------------- what came out


def whose(result: Result) -> str:
    """What the numbers of a result are, and of whom where not of all."""
    what = result.accuracy.metric
    if not benign_only(result.config):
        return what
    return f"{what} of {len(result.per_client) - len(result.malicious)} benign clients"


def reached(result: Result) -> list[tuple[str, Accuracy]]:
    """The scores that a result is shown with, each by its name: of its models, of the best round, on validation."""
    best = result.config.keep == "best"
    which = f"kept: best round ({result.kept.round})" if best else f"last round ({result.kept.round})"
    by = "validation" if result.best_by == "validation" else "test data"
    found = [(which, result.accuracy)]
    if not best:
        found.append((f"best round ({result.best.round}), by {by}", result.best.accuracy))
    aside = result.validation
    return found if aside is None else [*found, (f"{which}, on validation samples", aside)]


def method_of(result: Result) -> str:
    """The method with its options."""
    return " ".join([result.method, *(f"{k}={v}" for k, v in result.options.items())])


def title(result: Result) -> str:
    """What was run, in a line."""
    config, clients = result.config, len(result.per_client)
    parts = [
        f"{result.method} on {config.data}",
        f"{clients} clients, {config.partition}",
        f"{result.history[-1].round} rounds",
        f"seed {result.seed}",
        *([threat(config, clients)] if config.attack != "none" else []),
    ]
    return " · ".join(parts)


def brief(result: Result) -> str:
    """A result in a few lines, however many clients it has."""
    found, sent = result.accuracy, result.bytes
    unit = f" {found.unit}" if found.unit else ""
    which = reached(result)[0 if result.config.keep == "best" else 1][0]
    scores = (("macro", found.macro), ("micro", found.micro), ("worst decile", found.worst_decile))
    lines = [
        f"Result: {title(result)}",
        f"{whose(result)}: {', '.join(f'{found.said(v)}{unit} {name}' for name, v in scores)}; {which}",
        f"sent {size(sent['down'])} down, {size(sent['up'])} up; {seconds(result.wall)} on {result.prepared.device}"
        + (f"; folder {result.run}" if result.run else ""),
    ]
    if result.diverged is not None:
        lines.append(f"diverged: {result.diverged}")
    elif result.remarks:
        more = f" (and {len(result.remarks) - 1} more in .remarks)" if len(result.remarks) > 1 else ""
        lines.append(f"note: {result.remarks[0]}{more}")
    return "\n  ".join(lines)
