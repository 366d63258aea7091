"""LSTM, GRU and plain RNN layers of many rows: one product for all time steps, then one batched product a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute.forward import Unsupported
from fedkin.compute.rowmm import row_matmul

if TYPE_CHECKING:
    from fedkin.compute.calls import Calls


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
    ahead = row_matmul(x.reshape(rows, length * batch, -1).to(dtype), w)
    if len(own) == 4:  # GRU's second bias stands inside a product with a gate
        ahead = ahead + (own[2] if kind == "gru" else own[2] + own[3]).unsqueeze(1).to(dtype)
    ahead = ahead.view(rows, length, batch, -1).transpose(0, 1).contiguous()
    states = [s.to(dtype) for s in states]
    if kind == "lstm":
        found: tuple[Tensor, ...] = _Lstm.apply(ahead, u, *states)  # type: ignore[no-untyped-call]
        return found[0].transpose(0, 1), *found[1:]
    bias = None if len(own) == 2 else own[3].unsqueeze(1).to(dtype)
    results, h, turned = [], states[0], u.transpose(1, 2)
    for now in ahead.unbind():
        if kind == "gru":
            back = torch.bmm(h, turned) if bias is None else torch.baddbmm(bias, h, turned)
            r, z, n = now.chunk(3, -1)
            back_r, back_z, back_n = back.chunk(3, -1)
            n = (n + (r + back_r).sigmoid() * back_n).tanh()
            h = n + (z + back_z).sigmoid() * (h - n)
        else:
            gates = torch.baddbmm(now, h, turned)
            h = gates.tanh() if kind == "rnn_tanh" else gates.relu()
        results.append(h)
    return torch.stack(results, 1), h


class _Lstm(torch.autograd.Function):
    """All steps of an LSTM, [T, R, B, .]. Autograd's own way back would add to the weights' gradient at every step;
    here it is one product over all of them."""

    @staticmethod
    def forward(ctx: Any, ahead: Tensor, u: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        turned, hs, cs, gates = u.transpose(1, 2), [h], [c], []
        for now in ahead.unbind():
            h, c, all_gates = _cell(now, torch.bmm(h, turned), c)
            hs.append(h)
            cs.append(c)
            gates.append(all_gates)
        ctx.save_for_backward(u, *hs, *cs, *gates)
        return torch.stack(hs[1:]), h, c

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        u, *saved = ctx.saved_tensors
        g_results, g_h, g_c = grads
        length = len(g_results)
        hs, cs, gates = saved[: length + 1], saved[length + 1 : 2 * length + 2], saved[2 * length + 2 :]
        found: list[Tensor] = []
        for t in reversed(range(length)):
            g_h = g_h + g_results[t] if t == length - 1 else torch.baddbmm(g_results[t], found[-1], u)
            g_gates, g_c = _cell_back(g_h, g_c, cs[t], cs[t + 1], gates[t])
            found.append(g_gates)
        g_ahead = torch.stack(found[::-1])
        rows, steps = u.shape[0], g_ahead.transpose(0, 1)
        before = torch.stack(hs[:-1], 1)
        g_u = torch.bmm(steps.reshape(rows, -1, u.shape[1]).transpose(1, 2), before.reshape(rows, -1, u.shape[2]))
        return g_ahead, g_u, torch.bmm(found[-1], u), g_c


def _cell(ahead: Tensor, back: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The next state, and the gates i, f, g, o after their functions, [R, B, .]."""
    if _has_cell(str(c.device)):
        flat = torch.ops.aten._thnn_fused_lstm_cell(ahead.flatten(0, 1), back.flatten(0, 1), c.flatten(0, 1))
        return flat[0].view(c.shape), flat[1].view(c.shape), flat[2].view(ahead.shape)
    return _cell_by_hand(ahead, back, c)


def _cell_by_hand(ahead: Tensor, back: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    i, f, g, o = (ahead + back).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c, torch.cat([i, f, g, o], -1)


def _cell_back(g_h: Tensor, g_c: Tensor, before: Tensor, c: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients at the sums that go into the gates, and at the cell before."""
    if _has_cell(str(c.device)):
        flat = [t.flatten(0, 1) for t in (g_h, g_c, before, c, gates)]
        g_gates, g_before, _ = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(*flat, False)
        return g_gates.view(gates.shape), g_before.view(c.shape)
    return _cell_back_by_hand(g_h, g_c, before, c, gates)


def _cell_back_by_hand(g_h: Tensor, g_c: Tensor, before: Tensor, c: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, -1)
    tanh = c.tanh()
    g_c = g_c + g_h * o * (1 - tanh * tanh)
    parts = g_c * g * i * (1 - i), g_c * before * f * (1 - f), g_c * i * (1 - g * g), g_h * tanh * o * (1 - o)
    return torch.cat(parts, -1), g_c * f


@cache
def _has_cell(device: str) -> bool:
    """PyTorch has a kernel for a step of the LSTM on GPUs only. It is used where it says what we say."""
    if not device.startswith("cuda"):
        return False
    a, b, c, g = (torch.linspace(-1, 1, n, device=device).view(1, 2, -1) for n in (24, 24, 6, 6))
    try:
        mine = _cell_by_hand(a, b, c)
        flat = [t.flatten(0, 1) for t in (a, b, c)]
        theirs = torch.ops.aten._thnn_fused_lstm_cell(*flat)
        back = [t.flatten(0, 1) for t in (g, g, c, mine[1])]
        theirs_back = torch.ops.aten._thnn_fused_lstm_cell_backward_impl(*back, theirs[2], False)[:2]
        mine_back = _cell_back_by_hand(g, g, c, mine[1], mine[2])
        pairs = zip((*mine[:2], *mine_back), (*theirs[:2], *theirs_back), strict=True)
        return all(torch.allclose(m.flatten(0, 1), t, atol=1e-5) for m, t in pairs)
    except (RuntimeError, AttributeError, TypeError):
        return False
