"""Parcels: what is packed comes out again, and nothing else ever does."""

from __future__ import annotations

import json
import pickle
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedkin.core.federation import Each, Masked, wire_bytes
from fedkin.deploy.wire import BLOCK, DTYPES, LIMIT, MAGIC, WireError, pack, unpack

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def same(a: object, b: object) -> bool:
    if isinstance(a, Masked) and isinstance(b, Masked):
        kept = torch.equal(a.mask, b.mask)
        return kept and same(a.values[a.mask], b.values[b.mask]) and bool((b.values[~b.mask] == 0).all())
    if isinstance(a, Each):
        a = a.rows
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return not a.numel() or left.equal(right)
    return type(a) is type(b) and (a == b or (a != a and b != b))


@st.composite
def tensors(draw: st.DrawFn, lead: int | None = None) -> Tensor:
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 5), min_size=1 if lead else 0, max_size=3))
    shape = [lead, *shape[1:]] if lead else shape
    raw = np.random.default_rng(draw(st.integers(0, 999))).integers(0, 256, int(np.prod(shape)) * 8, np.uint8)
    if dtype == torch.bool:
        return torch.from_numpy(raw[: int(np.prod(shape))] > 127).view(shape)
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(raw[:count].copy()).view(dtype).view(shape) if count else torch.zeros(shape, dtype=dtype)


values = st.one_of(
    tensors(),
    tensors(1).map(Each),
    st.integers(-(2**70), 2**70),
    st.booleans(),
    st.none(),
    st.text(max_size=20),
    st.floats(),
    tensors().map(lambda t: Masked(t, t != t.abs()) if t.dtype in (torch.float32, torch.int64) else t),
)
names = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=10)


@QUICK
@given(st.dictionaries(names, values, max_size=6))
def test_what_is_packed_comes_out_again(message: dict[str, object]) -> None:
    found = unpack(pack(message, {"round": 3, "phase": "train"}))
    assert found.fields == {"round": 3, "phase": "train"}
    assert list(found.values) == list(message)
    for name, value in message.items():
        assert same(value, found.values[name]), name


def test_masks_without_axes_are_packed() -> None:
    one, flag = Masked(torch.tensor(2.0), torch.tensor(True)), torch.tensor(True)
    found = unpack(pack({"flag": flag, "one": one}, {})).values
    assert same(one, found["one"])
    assert same(flag, found["flag"])


@QUICK
@given(st.binary(max_size=400), st.booleans())
def test_garbage_is_refused_and_nothing_worse(garbage: bytes, begins_well: bool) -> None:
    with pytest.raises(WireError):
        unpack(MAGIC + garbage if begins_well else garbage)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 2**70), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=8,
)
GOOD = {
    "tensor": {"name": "a", "type": "tensor", "dtype": "float32", "shape": [2], "as": "raw"},
    "masked": {
        "name": "a",
        "type": "masked",
        "dtype": "float32",
        "shape": [2],
        "as": "raw",
        "full": [4],
        "mask": {"of": None, "not": False},
    },
    "float": {"name": "a", "type": "float", "value": "0x1p0"},
}


@QUICK
@given(st.sampled_from(sorted(GOOD)), st.data(), st.binary(max_size=12))
def test_a_header_that_lies_is_refused_and_nothing_worse(kind: str, data: st.DataObject, body: bytes) -> None:
    entry = dict(GOOD[kind])
    key = data.draw(st.sampled_from(sorted(entry)))
    entry[key] = data.draw(json_values)
    header = json.dumps({"fields": {}, "values": [entry]}).encode()
    with suppress(WireError):
        unpack(MAGIC + len(header).to_bytes(4, "little") + header + body)


@QUICK
@given(st.dictionaries(names, values, min_size=1, max_size=4), st.data())
def test_a_flipped_byte_never_raises_anything_else(message: dict[str, object], data: st.DataObject) -> None:
    parcel = bytearray(pack(message))
    parcel[data.draw(st.integers(0, len(parcel) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(WireError):
        unpack(bytes(parcel))


def with_header(*entries: dict[str, object], body: bytes = b"") -> bytes:
    header = json.dumps({"fields": {}, "values": list(entries)}).encode()
    return MAGIC + len(header).to_bytes(4, "little") + header + body


@pytest.mark.parametrize(
    ("parcel", "why"),
    [
        (b"", "does not begin"),
        (pickle.dumps({"model": [1.0]}), "does not begin"),
        (MAGIC + b"\xff\xff\xff\xff", "header"),
        (with_header({**GOOD["tensor"], "shape": [10**11]}), "speaks of 400000000000 bytes"),
        (with_header({**GOOD["tensor"], "shape": [-1]}), "shape"),
        (with_header({**GOOD["tensor"], "shape": [1, 0, 1 << 39, 1 << 39]}), "no proper shape"),
        (with_header({**GOOD["masked"], "shape": [0], "full": [0, 1 << 39, 1 << 39]}), "no proper shape"),
        (with_header({**GOOD["tensor"], "dtype": "object"}), "no known type"),
        (with_header({**GOOD["tensor"], "type": "pickle"}), "no known type"),
        (with_header({**GOOD["tensor"], "as": "bits"}, body=b"a"), "packed in no known way"),
        (with_header(GOOD["tensor"], GOOD["tensor"], body=bytes(16)), "same name"),
        (with_header(GOOD["tensor"], body=bytes(9)), "speaks of 8 bytes, it has 9"),
        (with_header(GOOD["masked"], body=b"\x80" + bytes(8)), "2 numbers for 1 places"),
        (with_header({**GOOD["masked"], "mask": {"of": "b", "not": False}}, body=bytes(8)), "is not there"),
        (
            with_header(
                {"name": "b", "type": "tensor", "dtype": "bool", "shape": [1], "as": "bits"},
                {**GOOD["masked"], "shape": [0], "full": [1, 10**10], "mask": {"of": "b", "not": False}},
                body=b"\0",
            ),
            "would become",
        ),
    ],
)
def test_what_a_parcel_may_not_be(parcel: bytes, why: str) -> None:
    with pytest.raises(WireError, match=why):
        unpack(parcel)


def test_size_limits() -> None:
    parcel = pack({"model": torch.zeros(1000)})
    with pytest.raises(WireError, match="more than the limit of 4000"):
        unpack(parcel, limit=4000)
    assert unpack(parcel, limit=5000).values["model"].shape == (1000,)  # type: ignore[union-attr]
    assert LIMIT == 2 << 30


def test_bytes_are_counted_before_they_are_read() -> None:
    with pytest.raises(WireError, match="1001 bytes, more than the limit of 1000"):
        unpack(bytes(1001), limit=1000)


def hostile(rng: np.random.Generator) -> bytes:
    """A frame by somebody who knows the format: a good one with one to three things wrong."""
    shape = [int(rng.choice([0, 1, 2, 7, 1 << 20, 1 << 39, 1 << 63])) for _ in range(rng.integers(0, 10))]
    mask = {"of": rng.choice([None, "a", "b", "m"]), "not": bool(rng.integers(2))}
    entries = [
        {
            "name": "a",
            "type": str(rng.choice(["tensor", "each", "masked", "plain", "float", "pickle"])),
            "dtype": str(rng.choice([*DTYPES, "object"])),
            "shape": shape,
            "full": shape[::-1],
            "mask": mask,
            "as": str(rng.choice(["raw", "bits", "fp16", "int8", "zip"])),
            "value": "0x1p99999",
        },
        {"name": "b", "type": "tensor", "dtype": "bool", "shape": [1, int(rng.integers(0, 9))], "as": "bits"},
        {
            "name": "m",
            "type": "masked",
            "dtype": "float32",
            "shape": [int(rng.integers(0, 3))],
            "as": "raw",
            "full": [1, int(rng.integers(0, 9)), int(rng.choice([1, 3, 1 << 30]))],
            "mask": {"of": "b", "not": False},
        },
    ]
    chosen = [entries[i] for i in rng.permutation(3)[: rng.integers(1, 4)]]
    for _ in range(rng.integers(0, 3)):
        entry = chosen[rng.integers(len(chosen))]
        junk = [None, -1, 1.5, "", [], {}, [[]], True, 10**30, "x" * 1000, [1, None]]
        entry[str(rng.choice(list(entry)))] = junk[rng.integers(len(junk))]  # type: ignore[index]
    return with_header(*chosen, body=rng.bytes(int(rng.choice([0, 1, 2, 8, 64]))))


def test_two_thousand_hostile_frames_raise_one_error_and_cost_no_memory() -> None:
    import resource

    rng, limit = np.random.default_rng(0), 1 << 20
    unpack(pack({"model": torch.zeros(1000)}))
    before, passed = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for _ in range(2000):
        with suppress(WireError):
            found = unpack(hostile(rng), limit)
            passed += 1
            for value in found.values.values():
                tensor = value.values if isinstance(value, Masked) else value
                assert not isinstance(tensor, Tensor) or tensor.numel() * tensor.element_size() <= limit
    assert passed > 20  # some are not wrong at all
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * (limit >> 10)  # in KiB


def test_only_what_is_under_the_mask_travels_and_a_mask_that_is_known_does_not() -> None:
    mask = torch.rand(1, 8000) < 0.5
    rows = torch.randn(1, 8000) * mask
    header = 700
    count = int(mask.sum())
    with_bits = pack({"model": Masked(rows, mask)})
    assert len(with_bits) < 4 * count + 1000 + header
    known = pack({"model": Masked(rows, mask), "mask": ~mask})
    assert len(known) < 4 * count + 1000 + header  # the bits are those of `mask`, and not there twice
    per_class = torch.rand(1, 10) < 0.5
    wide = per_class.unsqueeze(2).expand(1, 10, 64)
    prototypes = {"prototypes": Masked(torch.randn(1, 10, 64), wide), "present": per_class}
    assert len(pack(prototypes)) < 4 * int(wide.sum()) + 2 + header
    for message in ({"model": Masked(rows, mask)}, {"model": Masked(rows, mask), "mask": ~mask}, prototypes):
        for name, value in unpack(pack(message)).values.items():
            assert same(message[name], value)


def test_the_ledger_and_the_wire_agree() -> None:
    message = {"model": torch.randn(1, 20000), "mask": torch.rand(1, 20000) < 0.3, "score": torch.randn(1), "t": 0.5}
    counted = sum(wire_bytes(v) for v in message.values())
    assert counted <= len(pack(message)) <= 1.03 * counted


@pytest.mark.parametrize(("transport", "share"), [("fp16", 0.5), ("int8", 0.25 + 4 / BLOCK)])
def test_smaller_transports_and_their_error(transport: str, share: float) -> None:
    row = torch.cat([torch.randn(1, 50_000), 100 * torch.randn(1, 3_000), 1e-6 * torch.randn(1, 3_000)], 1)
    parcel = pack({"model": row}, transport=transport)  # type: ignore[arg-type]
    assert len(parcel) < share * 4 * row.numel() + 300
    found = unpack(parcel).values["model"]
    assert isinstance(found, Tensor)
    error = (found - row).abs()
    if transport == "fp16":
        assert (error <= torch.maximum(row.abs() * 2.0**-11, torch.tensor(2.0**-25))).all()
    else:
        blocks = torch.nn.functional.pad(row[0], (0, -row.numel() % BLOCK)).view(-1, BLOCK).abs().amax(1)
        bound = blocks.repeat_interleave(BLOCK)[: row.numel()] / 254
        assert (error[0] <= bound * 1.0001).all()
    assert error.max() > 0


def test_what_must_be_exact_is_exact_in_every_transport() -> None:
    message = {"score": torch.randn(1, 10), "ids": torch.arange(5000), "mask": torch.rand(5000) < 0.5, "t": 1 / 3}
    broken = torch.randn(1, 5000)
    broken[0, 7] = torch.nan
    for transport in ("fp16", "int8"):
        found = unpack(pack({**message, "model": broken}, transport=transport)).values  # type: ignore[arg-type]
        assert all(same(message[name], found[name]) for name in message)
        assert same(broken, found["model"])  # the gate has to see what is not finite


def test_what_cannot_be_sent() -> None:
    with pytest.raises(WireError, match="cannot hold a list"):
        pack({"model": [1.0, 2.0]})
    with pytest.raises(WireError, match="2 rows"):
        pack({"model": Each(torch.zeros(2, 3))})
