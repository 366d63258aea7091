"""`fedkin models --check my_net.py:Net`: how a network from a file of the user's own would train."""

from __future__ import annotations

import torch

from fedkin.bench.check import check
from fedkin.cli.console import print_json, screen
from fedkin.errors import UsageError
from fedkin.plugins import own_network


def check_network(where: str, shape: str, vocabulary: int, head: str | None, device: str, as_json: bool) -> None:
    """On random samples of this shape."""
    try:
        sizes = [int(n) for n in shape.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--shape {shape}: give the shape of one sample as whole numbers with commas, 3,32,32")
    samples = torch.randn(6, *sizes)
    if vocabulary:
        samples = torch.randint(vocabulary, (6, *sizes))
        samples.view(-1)[0] = vocabulary - 1  # by which the size of the vocabulary is known
    found = check(own_network(where), samples, head=head, device=device)
    if as_json:
        return print_json({"check": found.to_dict()})
    screen().print(str(found), markup=False, highlight=False, soft_wrap=True)
