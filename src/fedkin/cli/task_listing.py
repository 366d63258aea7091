"""What can be learnt, and by which metrics it is told."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from fedkin.cli.console import screen, table
from fedkin.cli.listing import Parts
from fedkin.data.targets import WORDS
from fedkin.tasks import TASKS, Task


class Tasks(Parts):
    plural = title = "tasks"
    columns = ("task", "what is learnt", "metrics, the main one first", "targets", "options")
    flag, names = "task", TASKS
    hint = "--metrics NAME+NAME adds metrics to the main one; "

    def facts(self, name: str) -> dict[str, Any]:
        kind = TASKS[name]
        if isinstance(kind, Task):  # of two functions: it has no options, and a docstring that is every such task's
            about = {"name": name, "about": kind.about, "paper": kind.paper, "options": [], "description": kind.about}
        else:
            about = super().facts(name)
        order = [kind.main, *(m for m in kind.metrics if m != kind.main)]
        told = [
            {"name": m.name, "about": m.about, "unit": m.unit, "higher": m.higher}
            for m in (kind.metrics[n] for n in order)
        ]
        targets: Any = kind.targets
        return {**about, "targets": targets, "target_form": WORDS[targets], "metrics": told}

    def row(self, facts: dict[str, Any]) -> tuple[str, ...]:
        options = ", ".join(o["name"] for o in facts["options"])
        return facts["about"], ", ".join(m["name"] for m in facts["metrics"]), escape(facts["target_form"]), options

    def show(self, facts: dict[str, Any]) -> None:
        super().show(facts)
        out = screen()
        out.print(f"{'targets':<8} {facts['target_form']}", markup=False)
        made = table("Metrics; the first is the one that a result is told by", "metric", "what it is", "better")
        for metric in facts["metrics"]:
            unit = " (%)" if metric["unit"] else ""
            made.add_row(metric["name"], metric["about"] + unit, "higher" if metric["higher"] else "lower")
        out.print(made)
