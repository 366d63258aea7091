"""The methods' main claims on real data (`make test-slow`): each is a table of `fedkin reproduce claims`.

Needs the data sets in FEDKIN_DATA and a GPU. `FEDKIN_CLAIMS_QUICK=1` is a dry run with few rounds and samples on
whatever device there is: it asserts nothing but that everything runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedkin.papers.published import table_names

pytestmark = pytest.mark.slow
QUICK = os.environ.get("FEDKIN_CLAIMS_QUICK") == "1"
CLAIMS = table_names("claims")


@pytest.mark.parametrize("name", CLAIMS)
def test_claim_holds_or_is_known_not_to(name: str, tmp_path: Path) -> None:
    if not QUICK and not torch.cuda.is_available():
        pytest.skip("takes hours without a GPU")
    runs = os.environ.get("FEDKIN_RUNS", str(tmp_path))
    command = [sys.executable, "-m", "fedkin", "reproduce", "claims", name, "--seeds", "1", "--json"]
    more = ["--runs-dir", runs, *(["--quick"] if QUICK else [])]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    table = json.loads(done.stdout)["tables"][0]
    if not any(cell["ours"] is not None for cell in table["cells"]):
        pytest.skip(f"nothing could be run: {table['cells'][0].get('reason')}")
    if not QUICK:
        broken = [v for v in table["verdicts"] if v["holds"] is False]
        assert [v for v in broken if not v["found"]] == []  # what is known not to hold says what came out instead
