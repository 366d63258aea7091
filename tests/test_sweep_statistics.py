"""What a sweep says about its numbers: mean and spread, paired tests and when there is none, and how it is written."""

from __future__ import annotations

import csv
import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import wilcoxon

import fedkin as fk
from fedkin.config import Config
from fedkin.errors import DataError, UsageError
from fedkin.report.tables import paired_sheet, sheet
from fedkin.report.written import comma_separated, latex, markdown, write
from fedkin.rounds import Accuracy, ClientRecord
from fedkin.runs.folder import RunFolder
from fedkin.sweep.statistics import Outcome, compared, groups_of, summary


def outcome(
    method: str, seed: int, each: list[float], split: str = "s", malicious: tuple[int, ...] = (), **settings: Any
) -> Outcome:
    clients = [ClientRecord(i, f"c{i}", a, 0.5, 10, 10, round(a / 10)) for i, a in enumerate(each)]
    kept = np.array([a for i, a in enumerate(each) if i not in malicious])
    accuracy = Accuracy(float(kept.mean()) + 1, float(kept.mean()), float(kept.min()), float(kept.std()))
    best = replace(accuracy, micro=accuracy.micro + 2)
    source: Any = None
    return Outcome(
        Config(method=method, seed=seed, **settings),
        {},
        accuracy,
        best,
        7,
        clients,
        malicious,
        3_000_000,
        4.0,
        f"{split}{seed}",
        "received",
        source,
    )


def groups(*outcomes: Outcome) -> Any:
    return groups_of((o.config, o) for o in outcomes)


RNG = np.random.default_rng(0)
BASE = [RNG.uniform(40, 60, 12).tolist() for _ in range(8)]


def better(seed: int, by: float = 3.0) -> list[float]:
    return (np.array(BASE[seed]) + by + RNG.normal(0, 1, 12)).tolist()


# ---------------------------------------------------------------- mean and spread


def test_mean_and_standard_deviation_over_seeds() -> None:
    (row,) = summary(groups(outcome("fedavg", 0, [50.0, 70.0]), outcome("fedavg", 1, [30.0, 40.0])))
    assert row["seeds"] == [0, 1]
    assert row["macro"] == {"mean": pytest.approx(47.5), "std": pytest.approx(np.std([60, 35], ddof=1))}
    assert row["worst_decile"]["mean"] == pytest.approx(40)
    assert row["best_micro"]["mean"] == pytest.approx(47.5 + 3)
    assert (row["megabytes"]["mean"], row["seconds"]["mean"], row["best_rounds"]) == (3.0, 4.0, [7, 7])
    (one,) = summary(groups(outcome("fedavg", 0, [50.0, 70.0])))
    assert math.isnan(one["macro"]["std"]), "a single seed has no spread"


def test_what_varies_makes_rows_and_columns() -> None:
    found = groups(
        *(outcome("fedavg", 0, [1.0], attack=a, lr=lr) for a in ("none", "sf") for lr in (0.1, 0.2)),
        *(outcome("ditto", 0, [1.0], attack=a, lr=lr) for a in ("none", "sf") for lr in (0.1, 0.2)),
    )
    assert [(g.row, g.column) for g in found[:4]] == [
        ("fedavg", c) for c in ("lr 0.1, no attack", "lr 0.2, no attack", "lr 0.1, sf", "lr 0.2, sf")
    ]
    own = groups(outcome("fedavg", 0, [1.0], lr=0.1), outcome("ditto", 0, [1.0], lr=0.2))
    assert [(g.row, g.column) for g in own] == [("fedavg lr 0.1", ""), ("ditto lr 0.2", "")]
    tuned = groups(*(outcome("ditto", 0, [1.0], options={"lam": lam}) for lam in (0.1, 1.0)))
    assert [g.row for g in tuned] == ["ditto lam=0.1", "ditto lam=1.0"]


def test_shares_of_attackers_do_not_split_the_honest_runs() -> None:
    def cells() -> Any:
        for share in (0.1, 0.3):
            for seed in (0, 1):
                config = Config(attack="none", seed=seed, malicious=share)
                yield config, replace(outcome("fedavg", seed, [1.0]), config=config)

    assert len(groups_of(cells())) == 1


def test_a_missing_seed_is_said() -> None:
    done = outcome("fedavg", 0, [50.0])
    found = groups_of([(done.config, done), (Config(seed=1), None), (Config(method="local"), None)])
    assert [r["missing"] for r in summary(found)] == [[1], [0]]
    made = sheet(found)
    assert made.rows[0][1].plain() == "50.00 (1 of 2 seeds)"
    assert made.rows[1][1].plain() == "failed"


# ---------------------------------------------------------------- paired tests


def test_a_test_is_of_the_metric_that_is_shown() -> None:
    def both(seeds: int, worst: list[float]) -> Any:
        mine = [outcome("ditto", s, better(s)) for s in range(seeds)]
        base = [outcome("fedavg", s, BASE[s]) for s in range(seeds)]
        worse = [*(BASE[s][0] for s in range(seeds)), *(BASE[s][0] + worst[s] for s in range(seeds))]
        return groups(
            *(
                replace(o, accuracy=replace(o.accuracy, worst_decile=value))
                for o, value in zip([*base, *mine], worse, strict=True)
            )
        )

    few = both(3, [-1.0, 2.0, -3.0])
    assert compared(few, "fedavg")[1].p_holm < 0.05
    assert sheet(few, "macro", "fedavg").rows[1][1].mark == "*"
    shown = sheet(few, "worst-decile", "fedavg")
    assert shown.rows[1][1].mark == "", "three seeds say nothing about the worst decile"
    assert any(n.startswith("no stars: worst-decile is one number a seed") for n in shown.notes)
    assert "no test" in [e.text for e in paired_sheet(few, "fedavg", "worst-decile").rows[0]]
    gaps = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, -8.0]
    many = both(8, gaps)
    (test,) = compared(many, "fedavg", "worst-decile").values()
    assert (test.over, test.n, test.metric) == ("seeds", 8, "worst-decile")
    assert test.p == pytest.approx(wilcoxon(gaps).pvalue)
    assert test.difference == pytest.approx(np.median(gaps))
    assert sheet(many, "worst-decile", "fedavg").rows[1][1].mark == ""
    assert sheet(many, "macro", "fedavg").rows[1][1].mark == "*"
    assert "worst decile accuracy of each seed" in " ".join(paired_sheet(many, "fedavg", "worst-decile").notes)
    assert next(csv.DictReader(io.StringIO(comma_separated(few, "fedavg", "micro"))))["paired_metric"] in ("", "micro")


def test_what_diverged_is_marked_and_never_the_best() -> None:
    broken = replace(outcome("fedavg", 0, [90.0]), diverged="the test loss was not finite after round 2")
    found = groups(broken, outcome("fedavg", 1, [80.0]), outcome("local", 0, [50.0]), outcome("local", 1, [50.0]))
    made = sheet(found)
    assert made.rows[0][1].plain().endswith(" (1 of 2 diverged)")
    assert [row[1].best for row in made.rows] == [False, True]
    assert "diverged: fedavg seed 0: the test loss was not finite after round 2" in made.notes
    assert "85.00 ± 7.07 (1 of 2 diverged) " in markdown(made)
    assert r"85.00 $\pm$ 7.07 (1 of 2 diverged) " in latex(made)
    assert summary(found)[0]["diverged"] == {"0": "the test loss was not finite after round 2"}


def test_over_clients_each_client_is_averaged_over_the_seeds() -> None:
    mine = [better(s) for s in range(3)]
    both = {"fedavg": BASE, "ditto": mine}
    found = groups(*(outcome(m, s, each[s]) for m, each in both.items() for s in range(3)))
    (test,) = compared(found, "fedavg").values()
    differences = np.mean([np.array(mine[s]) - BASE[s] for s in range(3)], 0)
    assert (test.over, test.n, test.baseline) == ("clients", 12, "fedavg")
    assert test.p == pytest.approx(wilcoxon(differences).pvalue)
    assert test.difference == pytest.approx(np.median(differences))


def test_over_seeds_from_six_on() -> None:
    mine = [better(s) for s in range(6)]
    both = [outcome("fedavg", s, BASE[s]) for s in range(6)], [outcome("ditto", s, mine[s]) for s in range(6)]
    (test,) = compared(groups(*both[0], *both[1]), "fedavg").values()
    means = [np.mean(mine[s]) - np.mean(BASE[s]) for s in range(6)]
    assert (test.over, test.n) == ("seeds", 6)
    assert test.p == pytest.approx(wilcoxon(means).pvalue) == pytest.approx(2 / 2**6)
    assert test.difference == pytest.approx(np.median(means))
    (fewer,) = compared(groups(*both[0][:5], *both[1]), "fedavg").values()
    assert fewer.over == "clients", "only seeds that both have count"


def test_only_benign_clients_are_paired() -> None:
    spoilt = [0.0, *BASE[0][1:]]
    hostile = {"attack": "sf", "malicious": (0,)}
    found = groups(outcome("fedavg", 0, BASE[0], **hostile), outcome("ditto", 0, spoilt, **hostile))
    (test,) = compared(found, "fedavg").values()
    assert (test.n, test.p, test.difference) == (11, 1.0, 0.0)


def test_no_test_where_the_splits_differ() -> None:
    found = groups(outcome("fedavg", 0, BASE[0]), outcome("ditto", 0, better(0), split="other"))
    (test,) = compared(found, "fedavg").values()
    assert test.over is None
    assert math.isnan(test.p)
    assert "splits differ at seed 0" in test.why
    shown = paired_sheet(found, "fedavg")
    assert [e.text for e in shown.rows[0]][:2] == ["ditto", "no test"]
    assert any("splits differ" in note for note in shown.notes)


def test_no_test_without_a_pair() -> None:
    found = groups(outcome("fedavg", 0, BASE[0]), outcome("ditto", 1, BASE[1]))
    (test,) = compared(found, "fedavg").values()
    assert (test.over, test.why) == (None, "no seed that both have finished")
    with pytest.raises(UsageError, match="did you mean 'ditto'"):
        compared(found, "dito")


def test_holm_corrects_for_all_tests() -> None:
    methods = {"ditto": 3.0, "local": 0.4, "fedper": 0.1}
    found = groups(outcome("fedavg", 0, BASE[0]), *(outcome(m, 0, better(0, by)) for m, by in methods.items()))
    tests = sorted(compared(found, "fedavg").values(), key=lambda t: t.p)
    expected, most = [], 0.0
    for i, t in enumerate(tests):
        most = max(most, min(1.0, (3 - i) * t.p))
        expected.append(most)
    assert [t.p_holm for t in tests] == pytest.approx(expected)
    assert tests[0].p_holm == pytest.approx(3 * tests[0].p)
    shown = sheet(found, baseline="fedavg")
    marks = {row[0].text: row[1].mark for row in shown.rows}
    assert marks == {"fedavg": "", "ditto": "*", "local": "", "fedper": ""}


def test_methods_that_set_samples_aside_are_still_paired(tmp_path: Path) -> None:
    """The clients are tested on the same samples, and the table says what differs."""
    settings = {
        "rounds": 1,
        "epochs": 1,
        "clients": 5,
        "way": "each",
        "samples_per_client": 40,
        "runs_dir": str(tmp_path),
    }
    runs = [fk.run("fedavg", validation_share=share, **settings) for share in (0.0, 0.2)]
    read = [Outcome.read(RunFolder.open(r.run or "")) for r in runs]
    assert read[0].split != read[1].split
    configs = [replace(read[0].config, validation_share=None, method=m) for m in ("a", "b")]
    named = [replace(o, config=c) for o, c in zip(read, configs, strict=True)]
    found = groups_of((o.config, o) for o in named)
    (test,) = compared(found, "a").values()
    assert (test.over, test.n) == ("clients", 5)
    assert "same test samples" in test.why
    assert [c.accuracy for c in read[0].per_client] == [c.accuracy for c in runs[0].per_client]
    assert read[0].accuracy == runs[0].accuracy
    assert (read[0].sent, read[0].best_round) == (sum(runs[0].bytes.values()), runs[0].best.round)


def test_a_run_without_a_result_is_refused(tmp_path: Path) -> None:
    run = fk.run("local", rounds=1, epochs=1, clients=5, way="each", runs_dir=str(tmp_path), samples_per_client=20)
    folder = RunFolder.open(run.run or "")
    with pytest.raises(DataError, match="no result"):
        Outcome.read(RunFolder(replace(folder.info, result={"accuracy": {}})))


# ---------------------------------------------------------------- written out


def awkward() -> Any:
    name = r"a_b|c & 50% #1 $x$ {y} ~^ \z <i>"
    return groups(
        *(outcome("fedavg", s, BASE[s], attack="none") for s in (0, 1)),
        *(outcome(name, s, better(s)) for s in (0, 1)),
        *(outcome(m, s, BASE[s], attack=r"evil_attack:a=1,b=2|x") for m in ("fedavg", name) for s in (0, 1)),
    )


def test_markdown_keeps_its_columns() -> None:
    lines = [line for line in markdown(sheet(awkward(), baseline="fedavg")).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    assert r"a\_b\|c" in lines[3]
    assert "**" in lines[3]
    assert "<i>" not in "\n".join(lines).replace(r"\<i\>", "")


def test_latex_is_escaped_and_square() -> None:
    text = latex(sheet(awkward(), baseline="fedavg"))
    body = text[text.index(r"\toprule") : text.index(r"\bottomrule")]
    rows = [line for line in body.splitlines() if line.endswith(r"\\")]
    columns = re.search(r"\\begin\{tabular\}\{(\w+)\}", text)
    assert columns is not None
    assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(columns[1])}
    for raw in ("_", "%", "#", "$"):
        inside = re.sub(r"\$(\\pm|\^\{\*\})\$", "", body)
        assert not re.search(rf"(?<!\\){re.escape(raw)}", inside), raw
    assert r"\textbackslash{}z" in body
    assert r"\textasciicircum{}" in body
    assert r" $\pm$ " in body
    opened = text.replace(r"\{", "").replace(r"\}", "")
    assert opened.count("{") == opened.count("}")
    assert text.count(r"\begin{") == text.count(r"\end{") == 2


def test_csv_reads_back() -> None:
    found = awkward()
    rows = list(csv.DictReader(io.StringIO(comma_separated(found, "fedavg"))))
    assert [r["method"] for r in rows] == [g.config.method for g in found]
    assert [float(r["macro_mean"]) for r in rows] == [g.metric("macro")["mean"] for g in found]
    assert rows[2]["attack"] == r"evil_attack:a=1,b=2|x"
    assert rows[0]["paired_p"] == ""
    assert float(rows[1]["paired_p"]) <= 1


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be written"):
        write(tmp_path, "x")


def test_from_python_with_a_baseline() -> None:
    settings = {"rounds": 1, "epochs": 1, "clients": 5, "way": "each", "samples_per_client": 20}
    results, rows = fk.compare(["fedavg", "local"], attack=["none", "sf"], baseline="fedavg", **settings)
    assert len(results) == 4
    assert [(r["attack"], r["method"], r["paired"] is None) for r in rows] == [
        ("none", "fedavg", True),
        ("none", "local", False),
        ("sf", "fedavg", True),
        ("sf", "local", False),
    ]
    assert rows[3]["benign_only"]
    assert rows[3]["paired"]["n"] == 4
