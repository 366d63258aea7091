"""What travels between server and sites: named values as bytes, and back. Nothing is ever pickled.

A parcel is four bytes that name the format, the length of a header, the header (JSON) and the raw bytes of the
values, one after another. The header says of every value its name, type, shape and how it is packed, so a reader can
check all of it against the number of bytes that came before it makes anything of it. Truth values travel as bits. Of
a `Masked` value only the entries under the mask travel, and the mask only where no truth value in the same parcel
already tells it.

`transport` says how float32 values of at least `SMALL` numbers travel. With x a number and b the largest absolute
value among the 1024 numbers that share a scale with it:

    fp32    as they are, exactly
    fp16    half the bytes; error at most 2^-11 |x|, or 2^-25 below 6.1e-5; beyond 65504 cut off
    int8    a quarter of the bytes; error at most b / 254
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedkin.core.federation import Each, Masked
from fedkin.errors import FedKinError

Transport = Literal["fp32", "fp16", "int8"]
Value = Tensor | Masked | Each | bool | int | float | str | None
Plain = bool | int | float | str | None | list[Any] | dict[str, Any]

MAGIC = b"FKW1"
HEADER = 1 << 20  # bytes of a header, at most
VALUES = 256  # values in a parcel, at most
AXES = 8
MOST = 1 << 40  # numbers in a tensor, fewer than
LIMIT = 2 << 30  # bytes that a parcel may become
SMALL = 1024  # shorter tensors always travel exactly
BLOCK = 1024  # numbers that share a scale in int8
LARGEST_HALF = 65504.0
DTYPES: dict[str, torch.dtype] = {
    str(t).removeprefix("torch."): t
    for t in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class WireError(FedKinError):
    """A parcel that cannot be what it says it is."""


@dataclass(frozen=True)
class Parcel:
    """What was unpacked: `fields` say what it is about, `values` are the tensors and numbers themselves."""

    fields: dict[str, Any]
    values: dict[str, Value]


# ---------------------------------------------------------------- packing


def pack(values: Mapping[str, Any], fields: Mapping[str, Plain] | None = None, transport: Transport = "fp32") -> bytes:
    """One parcel. An `Each` must hold a single row: the one of the site it goes to."""
    entries: list[dict[str, Any]] = []
    body: list[bytes] = []
    flags = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.dtype == torch.bool}
    for name, value in values.items():
        entry, parts = _pack_one(value, flags, transport)
        entries.append({"name": name, **entry})
        body += parts
    header = json.dumps({"fields": dict(fields or {}), "values": entries}, allow_nan=False).encode()
    if len(header) > HEADER:
        raise WireError(f"a header of {len(header)} bytes: at most {HEADER} can be sent")
    return b"".join([MAGIC, len(header).to_bytes(4, "little"), header, *body])


def _pack_one(value: object, flags: Mapping[str, Tensor], transport: Transport) -> tuple[dict[str, Any], list[bytes]]:
    if isinstance(value, Each):
        if len(value.rows) != 1:
            raise WireError(f"each(...) holds {len(value.rows)} rows; a site is sent one")
        entry, parts = _pack_tensor(value.rows, transport)
        return {"type": "each", **entry}, parts
    if isinstance(value, Masked):
        how, bits = _describe_mask(value.mask, flags)
        entry, parts = _pack_tensor(value.values.detach()[value.mask], transport)
        full = list(value.values.shape)
        return {"type": "masked", **entry, "full": full, "mask": how}, [*bits, *parts]
    if isinstance(value, Tensor):
        entry, parts = _pack_tensor(value, transport)
        return {"type": "tensor", **entry}, parts
    if isinstance(value, float):
        return {"type": "float", "value": value.hex()}, []
    if value is None or isinstance(value, bool | int | str):
        return {"type": "plain", "value": value}, []
    raise WireError(f"a message cannot hold a {type(value).__name__}: send tensors, numbers and strings")


def _pack_tensor(tensor: Tensor, transport: Transport) -> tuple[dict[str, Any], list[bytes]]:
    flat = tensor.detach().cpu().contiguous()
    entry = {"dtype": str(flat.dtype).removeprefix("torch."), "shape": list(flat.shape), "as": "raw"}
    if flat.dtype == torch.bool:
        return {**entry, "as": "bits"}, [np.packbits(flat.numpy().reshape(-1)).tobytes()]
    if flat.dtype == torch.float32 and flat.numel() >= SMALL and bool(torch.isfinite(flat).all()):
        if transport == "fp16":
            return {**entry, "as": "fp16"}, [_raw(flat.clamp(-LARGEST_HALF, LARGEST_HALF).half())]
        if transport == "int8":
            return {**entry, "as": "int8"}, _pack_int8(flat.reshape(-1))
    return entry, [_raw(flat)]


def _raw(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _pack_int8(flat: Tensor) -> list[bytes]:
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    scale = (blocks.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    numbers = (blocks / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    return [_raw(scale), _raw(numbers.view(-1)[: len(flat)])]


def _describe_mask(mask: Tensor, flags: Mapping[str, Tensor]) -> tuple[dict[str, Any], list[bytes]]:
    """The mask as what a truth value in the same parcel says, or not, or repeats along further axes; else as bits."""
    for name, flag in flags.items():
        if flag.shape == mask.shape[: flag.dim()]:
            wide = _along(flag, mask.shape)
            if bool((wide == mask).all()):
                return {"of": name, "not": False}, []
            if bool((wide != mask).all()):
                return {"of": name, "not": True}, []
    return {"of": None, "not": False}, [np.packbits(mask.cpu().contiguous().numpy().reshape(-1)).tobytes()]


def _along(flag: Tensor, shape: Sequence[int]) -> Tensor:
    return flag.reshape([*flag.shape, *[1] * (len(shape) - flag.dim())]).expand(list(shape))


# ---------------------------------------------------------------- unpacking


def unpack(whole: bytes, limit: int = LIMIT) -> Parcel:
    """What a parcel holds; `WireError` says what is wrong with it.

    `limit` bounds what it may become in memory, which is looked at before anything is made; while it is unpacked,
    a few times as much is needed."""
    if len(whole) > limit:
        _refuse(f"{len(whole)} bytes, more than the limit of {limit}")
    if whole[:4] != MAGIC:
        _refuse("it does not begin like a FedKin message")
    length = int.from_bytes(whole[4:8], "little")
    if len(whole) < 8 or length > HEADER or length > len(whole) - 8:
        _refuse("its header is cut off or too long")
    header = _header(whole[8 : 8 + length])
    plans = [_Plan.of(entry) for entry in header["values"]]
    names = [p.name for p in plans]
    if len(set(names)) < len(names):
        _refuse("two values have the same name")
    body = memoryview(whole)[8 + length :]
    if sum(p.size for p in plans) != len(body):
        _refuse(f"its header speaks of {sum(p.size for p in plans)} bytes, it has {len(body)}")
    if sum(p.becomes for p in plans) > limit:
        _refuse(f"it would become {sum(p.becomes for p in plans)} bytes, more than the limit of {limit}")
    values: dict[str, Value] = {}
    at = 0
    for plan in plans:
        if plan.kind != "masked":
            values[plan.name] = _value(plan, body[at : at + plan.size])
        at += plan.size
    at = 0
    for plan in plans:
        if plan.kind == "masked":
            values[plan.name] = _masked(plan, body[at : at + plan.size], values)
        at += plan.size
    return Parcel(header["fields"], {name: values[name] for name in names})


def _refuse(why: str) -> NoReturn:
    raise WireError(f"not a valid message: {why}")


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError):
        _refuse("its header is not JSON")
    if not isinstance(header, dict) or set(header) != {"fields", "values"}:
        _refuse("its header is not one")
    fields, values = header["fields"], header["values"]
    if not isinstance(fields, dict) or not isinstance(values, list) or len(values) > VALUES:
        _refuse(f"its header does not hold fields and at most {VALUES} values")
    return header


@dataclass(frozen=True)
class _Plan:
    """One value as the header describes it, checked; `size`: its bytes in the parcel, `becomes`: in memory."""

    name: str
    kind: str
    value: Any = None
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    how: str = "raw"
    full: tuple[int, ...] = ()
    mask: tuple[str | None, bool] = (None, False)
    size: int = 0
    becomes: int = 0

    @classmethod
    def of(cls, entry: Any) -> _Plan:
        if not isinstance(entry, dict):
            _refuse("a value is not described")
        name, kind = entry.get("name"), entry.get("type")
        if not isinstance(name, str) or not 0 < len(name) <= 100 or not name.isprintable():
            _refuse("a value has no proper name")
        if kind == "plain":
            value = entry.get("value")
            if value is not None and not isinstance(value, bool | int | str):
                _refuse(f"{name!r} is not a plain value")
            return cls(name, kind, value)
        if kind == "float":
            return cls(name, kind, _float(name, entry.get("value")))
        if kind not in ("tensor", "each", "masked"):
            _refuse(f"{name!r} is of no known type")
        return cls._of_tensor(name, kind, entry)

    @classmethod
    def _of_tensor(cls, name: str, kind: str, entry: Mapping[str, Any]) -> _Plan:
        dtype, how = DTYPES.get(str(entry.get("dtype"))), entry.get("as")
        if dtype is None:
            _refuse(f"{name!r} holds no known type of numbers")
        shape = _shape(name, entry.get("shape"))
        if kind == "each" and (not shape or shape[0] != 1):
            _refuse(f"{name!r} is not one row")
        ways = {torch.bool: ("bits",), torch.float32: ("raw", "fp16", "int8")}.get(dtype, ("raw",))
        if how not in ways:
            _refuse(f"{name!r} is packed in no known way")
        count = math.prod(shape)
        size = {
            "raw": count * dtype.itemsize,
            "bits": -(-count // 8),
            "fp16": 2 * count,
            "int8": count + 4 * -(-count // BLOCK),
        }[str(how)]
        becomes = count * dtype.itemsize
        if kind != "masked":
            return cls(name, kind, None, dtype, shape, str(how), size=size, becomes=becomes)
        full, mask = _shape(name, entry.get("full")), entry.get("mask")
        whole = math.prod(full)
        if len(shape) != 1 or not isinstance(mask, dict) or set(mask) != {"of", "not"}:
            _refuse(f"{name!r} has no proper mask")
        of, negated = mask["of"], mask["not"]
        if not (of is None or isinstance(of, str)) or not isinstance(negated, bool) or count > whole:
            _refuse(f"{name!r} has no proper mask")
        bits = -(-whole // 8) if of is None else 0
        return cls(
            name,
            kind,
            None,
            dtype,
            shape,
            str(how),
            full,
            (of, negated),
            size + bits,
            becomes + whole * (dtype.itemsize + 1),
        )


def _float(name: str, value: object) -> float:
    try:
        return float.fromhex(value) if isinstance(value, str) else _refuse(f"{name!r} is not a number")
    except (ValueError, OverflowError):
        _refuse(f"{name!r} is not a number")


def _shape(name: str, shape: object) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > AXES:
        _refuse(f"{name!r} has no proper shape")
    for n in shape:
        if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n < MOST:
            _refuse(f"{name!r} has no proper shape")
    if math.prod(max(1, n) for n in shape) >= MOST:  # even of a tensor without numbers: its strides are numbers too
        _refuse(f"{name!r} has no proper shape")
    return tuple(shape)


def _value(plan: _Plan, data: memoryview) -> Value:
    if plan.kind in ("plain", "float"):
        found: Value = plan.value
        return found
    return _tensor(plan, data)


def _tensor(plan: _Plan, data: memoryview) -> Tensor:
    count = math.prod(plan.shape)
    if not count:
        return torch.zeros(plan.shape, dtype=plan.dtype)
    if plan.how == "bits":
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count)
        return torch.from_numpy(bits.astype(np.bool_)).view(plan.shape)
    if plan.how == "int8":
        scales = -(-count // BLOCK)
        scale = _numbers(data[: 4 * scales], torch.float32)
        numbers = _numbers(data[4 * scales :], torch.int8).float()
        return (numbers * scale.repeat_interleave(BLOCK)[:count]).view(plan.shape)
    if plan.how == "fp16":
        return _numbers(data, torch.float16).float().view(plan.shape)
    return _numbers(data, plan.dtype).view(plan.shape)


def _numbers(data: memoryview, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if len(data) else torch.zeros(0, dtype=dtype)


def _masked(plan: _Plan, data: memoryview, values: Mapping[str, Value]) -> Masked:
    of, negated = plan.mask
    whole = math.prod(plan.full)
    bits = 0
    if of is None:
        bits = -(-whole // 8)
        flat = np.unpackbits(np.frombuffer(data[:bits], np.uint8), count=whole)
        mask = torch.from_numpy(flat.astype(np.bool_)).view(plan.full)
    else:
        flag = values.get(of)
        if not isinstance(flag, Tensor) or flag.dtype != torch.bool or flag.shape != plan.full[: flag.dim()]:
            _refuse(f"the mask of {plan.name!r} is not there")
        mask = _along(flag, plan.full) != negated
    if int(mask.sum()) != math.prod(plan.shape):
        _refuse(f"{plan.name!r} has {math.prod(plan.shape)} numbers for {int(mask.sum())} places")
    dense = torch.zeros(plan.full, dtype=plan.dtype)
    dense[mask] = _tensor(plan, data[bits:])
    return Masked(dense, mask.contiguous())
