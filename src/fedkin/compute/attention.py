"""Attention, for rows and with noise that can be repeated: what PyTorch does in one function, in steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkin.compute.forward import Unsupported

if TYPE_CHECKING:
    from fedkin.compute.calls import Calls


def scaled_dot_product(
    c: Calls,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`. Without dropout it has nothing to tell rows apart: they are more samples."""
    if dropout_p > 0.0:
        with c:
            return _by_hand(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    how: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}

    def merged(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q4, k4, v4 = (t.reshape(-1, *t.shape[-3:]) if t.dim() > 4 else t for t in (q, k, v))
        mask = None if mask is None else mask.reshape(-1, *mask.shape[-3:]) if mask.dim() > 4 else mask
        y = F.scaled_dot_product_attention(q4, k4, v4, mask, **how)
        return y.view(*q.shape[:-1], v.shape[-1])

    if c.row is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **how)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    found: Tensor = c.over_rows(merged, query, key, value, attn_mask)
    return found


def _by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    if gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        below = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~below, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return F.dropout(scores.softmax(-1), p) @ v


def multi_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward`, length first: [T, B, E]."""
    if static_k is not None or static_v is not None:
        raise Unsupported("attention with static_k or static_v")
    if query.dim() == 2:
        query, key, value = (t.unsqueeze(1) for t in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        found, weights = multi_head(**{**locals()})
        return found.squeeze(1), None if weights is None else weights.squeeze(0)
    length, batch, width = query.shape
    if use_separate_proj_weight:
        own = [q_proj_weight, k_proj_weight, v_proj_weight]
        biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))
        q, k, v = (F.linear(t, w, b) for t, w, b in zip((query, key, value), own, biases, strict=True))  # type: ignore[arg-type]
    elif query is key and key is value:
        assert in_proj_weight is not None
        q, k, v = F.linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)
    else:
        assert in_proj_weight is not None
        biases = [None] * 3 if in_proj_bias is None else list(in_proj_bias.chunk(3))
        parts = zip((query, key, value), in_proj_weight.chunk(3), biases, strict=True)
        q, k, v = (F.linear(t, w, b) for t, w, b in parts)
    if bias_k is not None and bias_v is not None:  # a key and a value for every sample, after its own
        k, v = (torch.cat([t, b.expand(1, batch, -1)]) for t, b in ((k, bias_k), (v, bias_v)))
    q, k, v = (t.reshape(len(t), batch, num_heads, -1).permute(1, 2, 0, 3) for t in (q, k, v))
    if add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    causal = is_causal and key_padding_mask is None and not need_weights
    mask = None if causal else _mask(attn_mask, key_padding_mask, batch, num_heads, q.dtype)
    if mask is not None:
        mask = F.pad(mask, (0, k.shape[-2] - mask.shape[-1]))  # what was added is seen by all
    p = dropout_p if training else 0.0
    weights = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, p) if p > 0.0 else weights
        y = weights @ v
        weights = weights.mean(1) if average_attn_weights else weights
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, p, causal)
    y = y.permute(2, 0, 1, 3).reshape(length, batch, width)
    return F.linear(y, out_proj_weight, out_proj_bias), weights


def _mask(mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores [B, H, T, S]; where a mask is of truth values, true means: not this one."""

    def added(t: Tensor) -> Tensor:
        if t.dtype != torch.bool:
            return t
        return torch.zeros_like(t, dtype=dtype).masked_fill(t, -math.inf)

    found = None
    if mask is not None:
        found = added(mask.reshape(batch, heads, *mask.shape[1:]) if mask.dim() == 3 else mask)
    if padding is not None:
        wide = added(padding)[:, None, None, :]
        found = wide if found is None else found + wide
    return found
