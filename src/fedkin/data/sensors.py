"""Movement recordings in the form in which their authors publish them: WISDM v1.1 and 2019, and UCI HAR."""

from __future__ import annotations

import csv
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np

from fedkin.data.dataset import Array, Dataset
from fedkin.data.files import column, existing, read_npz
from fedkin.data.sources import named_arrays, published
from fedkin.errors import DataError

HAR_CLASSES = ("walking", "walking_upstairs", "walking_downstairs", "sitting", "standing", "laying")
UCIHAR_TEST_USERS = (2, 4, 9, 10, 12, 13, 18, 20, 24)

WINDOW = 200
"""Ten seconds at 20 Hz."""


def read_arff(path: Path) -> dict[str, Array]:
    """WISDM's feature file as x (missing values NaN), y (names) and user; columns are found by name."""
    head, _, body = existing(path).read_text(encoding="utf-8", errors="replace").partition("@data")
    names = [line.split(None, 2)[1].strip("\"'") for line in head.splitlines() if line.lower().startswith("@attribute")]
    if not body or "class" not in names or "user" not in names:
        raise DataError(f"{path}: expected an ARFF file with attributes user and class, found {names[:4]!r}")
    rows = [row for row in csv.reader(body.splitlines(), skipinitialspace=True) if row]
    for row in rows:
        if len(row) != len(names):
            raise DataError(f"{path}: expected {len(names)} values in a row, found {len(row)}: {row[:3]!r}")
    features = [i for i, name in enumerate(names) if name not in ("UNIQUE_ID", "user", "class")]
    try:
        x = np.array([[row[i].strip().replace("?", "nan") for i in features] for row in rows], np.float32)
        user = np.array([int(float(row[names.index("user")])) for row in rows])
    except ValueError as error:
        raise DataError(f"{path}: expected numbers, found: {error}") from error
    return {"x": x, "y": np.array([row[names.index("class")] for row in rows]), "user": user}


def read_wisdm_raw(path: Path) -> tuple[dict[str, Array], int]:
    """WISDM's raw file as windows of 200 samples that do not overlap, within one user's run of one activity.

    A record is ``user,activity,time,x,y,z;``. The published file has damaged ones (a missing value, none at all); they
    are left out, and their number is returned.
    """
    records, damaged = [], 0
    text = existing(path).read_text(encoding="utf-8", errors="replace")
    for record in filter(str.strip, text.replace("\n", ";").split(";")):
        fields = record.strip().rstrip(",").split(",")
        try:
            user, activity, _, x, y, z = fields
            records.append((int(user), activity, float(x), float(y), float(z)))
        except ValueError:
            damaged += 1
    windows, labels, users = [], [], []
    for (user_id, label), run in groupby(records, key=lambda r: (r[0], r[1])):
        series = np.array([r[2:] for r in run], np.float32)
        for start in range(0, len(series) - WINDOW + 1, WINDOW):
            windows.append(series[start : start + WINDOW].T)
            labels.append(label)
            users.append(user_id)
    if not windows:
        raise DataError(
            f"{path}: expected records 'user,activity,time,x,y,z;', at least {WINDOW} in a run, found "
            f"{len(records)} records and {damaged} damaged ones"
        )
    return {"x": np.stack(windows), "y": np.array(labels), "user": np.array(users)}, damaged


def read_ucihar_text(folder: Path) -> dict[str, Array]:
    """UCI HAR's text files as x [n, 9, 128] (body acceleration, rotation, total acceleration), y and user."""
    names = [f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"]
    parts = []
    for part in ("train", "test"):
        user = _numbers(folder / part / f"subject_{part}.txt", 1)[:, 0]
        labels = _numbers(folder / part / f"y_{part}.txt", 1)[:, 0]
        signals = [_numbers(folder / part / "Inertial Signals" / f"{name}_{part}.txt", 128) for name in names]
        for name, signal in zip(names, signals, strict=True):
            if not len(signal) == len(user) == len(labels):
                raise DataError(
                    f"{folder / part}: expected as many windows in {name} as there are subjects "
                    f"({len(user)}) and labels ({len(labels)}), found {len(signal)}"
                )
        parts.append((np.stack(signals, axis=1).astype(np.float32), labels.astype(np.int64) - 1, user.astype(np.int64)))
    x, y, user = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return {"x": x, "y": y, "user": user}


def _numbers(path: Path, columns: int) -> Array:
    try:
        values = np.array(existing(path).read_text(encoding="ascii").split(), np.float64)
    except ValueError as error:
        raise DataError(f"{path}: expected numbers, found: {error}") from error
    if not len(values) or len(values) % columns:
        raise DataError(f"{path}: expected rows of {columns} numbers, found {len(values)} in all; fetch it again")
    return values.reshape(-1, columns)


@published("wisdm")
def read_wisdm(root: Path) -> Dataset:
    path = existing(root / "wisdm11.npz", root / "WISDM_ar_v1.1" / "WISDM_ar_v1.1_transformed.arff")
    arrays = read_npz(path) if path.suffix == ".npz" else read_arff(path)
    raw = column(arrays, "x", path).astype(np.float64)
    missing = np.isnan(raw)
    filled = np.where(missing, np.nanmedian(raw, axis=0), raw)
    spread = filled.std(axis=0)
    x = (filled - filled.mean(axis=0)) / np.where(spread > 0, spread, 1)
    note = f"{int(missing.sum())} missing values imputed by the median of the feature; features standardised"
    return named_arrays("wisdm", path, {**arrays, "x": x.astype(np.float32)}, note=note)


@published("wisdm-raw")
def read_wisdm_series(root: Path) -> Dataset:
    path = root / "WISDM_ar_v1.1" / "WISDM_ar_v1.1_raw.txt"
    arrays, damaged = read_wisdm_raw(path)
    return _series("wisdm-raw", path, arrays, note=f"{damaged} damaged records left out" if damaged else "")


@published("wisdm51")
def read_wisdm51(root: Path) -> Dataset:
    path = root / "wisdm51.npz"
    return _series("wisdm51", path, read_npz(path))


@published("ucihar")
def read_ucihar(root: Path) -> Dataset:
    path = existing(root / "ucihar.npz", root / "UCI HAR Dataset")
    arrays = read_npz(path) if path.suffix == ".npz" else {**read_ucihar_text(path), "classes": np.array(HAR_CLASSES)}
    dataset = _series("ucihar", path, arrays)
    official = None if dataset.user is None else np.isin(dataset.user, UCIHAR_TEST_USERS)
    return replace(dataset, official_test=official)


def _series(name: str, path: Path, arrays: dict[str, Array], note: str = "") -> Dataset:
    """Windows [n, channels, length] as pictures of height one, which is what networks for series take."""
    x = column(arrays, "x", path)
    if x.ndim != 3:
        raise DataError(f"{path}: expected windows x [n, channels, length], found shape {x.shape}")
    return named_arrays(name, path, {**arrays, "x": x[:, :, None, :]}, note)
