"""The file of a study that somebody else wrote: refused with a sentence, whatever is in it or in its place."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from fedkin.errors import DataError
from fedkin.sweep.search import Axis

pytest.importorskip("optuna")

from fedkin.sweep.study import Study, Told
from fedkin.sweep.tuning import trial_of


def study(path: Path) -> Study:
    return Study(path, [Axis("lr", 0.01, 1.0, True), Axis("batch", values=(5, 10))], seed=3, warmup=2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("param_value_internal", "x"),
        ("param_value_internal", 1e308),
        ("param_value_internal", math.nan),
        ("user_attr", {"fedkin": [1, 2]}),
        ("values", ["a"]),
        ("values", [math.nan]),
    ],
)
def test_a_study_that_somebody_made_up_is_refused_with_a_sentence(key: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with study(path) as one:
        one.tell(one.ask().number, "done", 1.0, {"runs": ["a"]})
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert any(key in entry for entry in entries)
    path.write_text("".join(json.dumps({**e, key: value} if key in e else e) + "\n" for e in entries))
    with pytest.raises(DataError, match="cannot be read"):
        study(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_in_the_place_of_a_study_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "s.jsonl")
    with pytest.raises(DataError, match="is no ordinary file"):
        study(tmp_path / "s.jsonl")


@pytest.mark.parametrize("facts", [{"rounds": math.inf}, {"rounds": "x"}, {"validation": [10**400]}, {"runs": 3}])
def test_a_trial_that_somebody_made_up_is_refused_with_a_sentence(facts: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="trial 4 of the study cannot be read"):
        trial_of(Told(4, {"lr": 0.1}, "done", 1.0, facts))
