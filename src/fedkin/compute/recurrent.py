"""LSTM, GRU and plain RNN layers of many rows: one product for all time steps, then one batched product a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute.forward import Unsupported
from fedkin.compute.rowmm import row_matmul

if TYPE_CHECKING:
    from fedkin.compute.functions import Calls


def recurrent(c: Calls, kind: str, x: Any, *given: Any) -> Any:
    """PyTorch's `lstm`, `gru`, `rnn_tanh` and `rnn_relu`, of (input, state, weights, has biases, layers, dropout,
    training, both directions, batch first). Dropout between layers is drawn like any other."""
    func = getattr(torch._VF, kind)
    if not isinstance(given[1], list):  # the lengths of packed sequences come before the state
        return _packed(c, func, x, *given)
    state, weights, biases, layers, dropout, training, both, first = given
    dropout = dropout if training else 0.0
    if c.row is None and not (dropout and layers > 1):
        return func(x, state, weights, biases, layers, dropout, training, both, first)
    states = list(state) if kind == "lstm" else [state]
    ways, each = 2 if both else 1, len(weights) // (layers * (2 if both else 1))
    x = x.transpose(0, 1) if first else x  # [T, B, I]
    ends: list[list[Tensor]] = [[] for _ in states]
    for layer in range(layers):
        if layer and dropout:
            with c:
                x = F.dropout(x.transpose(0, 1), dropout).transpose(0, 1)  # counted sample by sample
        own = weights[layer * ways * each : (layer + 1) * ways * each]
        begin = [s[layer * ways : (layer + 1) * ways] for s in states]
        if c.row is None:
            begun: Any = tuple(begin) if kind == "lstm" else begin[0]
            x, *last = func(x, begun, list(own), biases, 1, 0.0, training, both, False)
        else:
            x, *last = _layer(c, kind, x, begin, own, biases, ways)
        for into, one in zip(ends, last, strict=True):
            into.append(one)
    found = x.transpose(0, 1) if first else x
    return found, *(torch.cat(e) for e in ends)


def _packed(c: Calls, func: Any, *given: Any) -> Any:
    layers, dropout, training = given[5:8]
    if c.row is not None or (dropout and training and layers > 1):
        raise Unsupported("packed sequences: their lengths are data; give padded ones and a mask")
    return func(*given)


def _layer(
    c: Calls, kind: str, x: Tensor, begin: Sequence[Tensor], own: Sequence[Tensor], biases: bool, ways: int
) -> list[Tensor]:
    """One layer: results [T, B, ways * H], then the last states [ways, B, H]."""
    each = len(own) // ways
    if each != 2 + 2 * biases:
        raise Unsupported("an LSTM with proj_size")

    def over(x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        states, weights = rest[: len(begin)], rest[len(begin) :]
        sides = []
        for way in range(ways):
            mine = weights[way * each : (way + 1) * each]
            inputs = x.flip(1) if way else x
            y, *last = _pass(kind, inputs, [s[:, way] for s in states], mine, c.context.dtype)
            sides.append((y.flip(1) if way else y, *last))
        results, *lasts = zip(*sides, strict=True)
        return torch.cat(results, -1), *(torch.stack(last, 1) for last in lasts)

    return list(c.over_rows(over, x, *begin, *own))


def _pass(kind: str, x: Tensor, states: list[Tensor], own: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """In one direction, all rows: x [R, T, B, I], states [R, B, H], weights [R, gates * H, .]."""
    rows, length, batch, _ = x.shape
    w, u = own[0].to(dtype), own[1].to(dtype)
    ahead = row_matmul(x.reshape(rows, length * batch, -1).to(dtype), w).view(rows, length, batch, -1)
    bias_w, bias_u = (own[2].unsqueeze(1), own[3].unsqueeze(1)) if len(own) == 4 else (None, None)
    if bias_w is not None:
        ahead = ahead + bias_w.unsqueeze(1).to(dtype)
        if kind != "gru" and bias_u is not None:
            ahead = ahead + bias_u.unsqueeze(1).to(dtype)
    found, h = [], states[0]
    turned = u.transpose(1, 2)
    cell = states[1] if kind == "lstm" else h
    for now in ahead.unbind(1):
        if kind == "gru":
            back = torch.bmm(h.to(dtype), turned)
            back = back if bias_u is None else back + bias_u.to(dtype)
            r, z, n = now.chunk(3, -1)
            back_r, back_z, back_n = back.chunk(3, -1)
            z = (z + back_z).sigmoid()
            n = (n + (r + back_r).sigmoid() * back_n).tanh()
            h = n + z * (h - n)
        else:
            gates = torch.baddbmm(now, h.to(dtype), turned)
            if kind == "lstm":
                i, f, g, o = gates.chunk(4, -1)
                cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
                h = o.sigmoid() * cell.tanh()
            else:
                h = gates.tanh() if kind == "rnn_tanh" else gates.relu()
        found.append(h)
    results = torch.stack(found, 1)
    return (results, h, cell) if kind == "lstm" else (results, h)
