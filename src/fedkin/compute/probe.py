"""Does this CPU survive bf16? Some virtual machines announce the instructions and then die of them."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from fedkin.errors import UsageError

_TRY = (
    "import torch; x = torch.randn(4, 3, 16, 16).bfloat16(); w = torch.randn(8, 3, 3, 3).bfloat16();"
    "torch.conv2d(x, w).sum(); (torch.randn(64, 64).bfloat16() @ torch.randn(64, 64).bfloat16()).sum()"
)


@cache
def bf16_works() -> bool:
    """Tried in a child process, which may crash without harm."""
    try:
        done = subprocess.run([sys.executable, "-c", _TRY], capture_output=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def require_bf16() -> None:
    if not bf16_works():
        raise UsageError("precision='bf16': a trial on this CPU crashed; use fp32, or a GPU")
