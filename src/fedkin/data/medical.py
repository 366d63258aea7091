"""Patients by hospital or region, as FLamby cuts and splits them: Fed-Heart-Disease and Fed-TCGA-BRCA."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from fedkin.data.dataset import Array, Bools, Dataset
from fedkin.data.files import column, existing, read_npz
from fedkin.data.sources import published
from fedkin.data.targets import Ints, read_targets
from fedkin.errors import DataError

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
REGIONS = ("northeast", "south", "west", "midwest", "europe", "canada")
DISEASE = ("no disease", "disease")

ATTRIBUTES = 14
"""Of a patient in UCI's processed files; the last is the diagnosis, 0 to 4."""
LEFT_OUT = (10, 11, 12)
"""slope, ca and thal, which three of the hospitals hardly recorded."""
CATEGORIES = {2: (2, 3, 4), 6: (1, 2)}
"""Chest pain and electrocardiogram: a column for each of these values, behind the others."""
TRAIN_SHARE, SPLIT_SEED = 0.66, 43


@published("heart")
def read_heart(root: Path) -> Dataset:
    """Patients with a value missing are left out, and what a hospital's features are standardised by is its own
    training patients, as in FLamby."""
    return _heart("heart", root, together=False)


@published("heart-pooled")
def read_heart_pooled(root: Path) -> Dataset:
    """The same patients, standardised by the training patients of all hospitals, as FLamby does where it pools them."""
    return _heart("heart-pooled", root, together=True)


def _heart(name: str, root: Path, together: bool) -> Dataset:
    folder, note = root / "heart-disease", ""
    file = existing(folder / f"processed.{HOSPITALS[0]}.data", root / "fed_heart_disease.npz")
    if file.suffix == ".npz":
        x, y, site, test = _packed(file, 13, len(HOSPITALS))
    else:
        x, y, site, test, left_out = read_hospitals(folder)
        note = f"{left_out} patients with a missing value left out"
    groups = np.zeros_like(site) if together else site
    return Dataset(
        name,
        standardised(x, groups, test),
        y,
        2,
        DISEASE,
        user=site,
        official_test=test,
        note=note,
        users=HOSPITALS,
        model="linear",
    )


def read_hospitals(folder: Path) -> tuple[Array, Ints, Ints, Bools, int]:
    """UCI's processed files as features [n, 13], labels, hospitals, FLamby's test patients, and how many were left out
    because a value is missing."""
    parts, left_out = [], 0
    for site, hospital in enumerate(HOSPITALS):
        table = _hospital(existing(folder / f"processed.{hospital}.data"))
        whole = table[~np.isnan(table).any(1)]
        left_out += len(table) - len(whole)
        y = (whole[:, -1] != 0).astype(np.int64)
        parts.append((whole[:, :-1], y, np.full(len(y), site), held_out(y, folder)))
    x, y, sites, test = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    plain = [x[:, i] for i in range(x.shape[1]) if i not in CATEGORIES]
    dummies = [x[:, i] == value for i, values in CATEGORIES.items() for value in values]
    return np.stack([*plain, *dummies], 1).astype(np.float32), y, sites, test, left_out


def _hospital(path: Path) -> Array:
    """Rows of numbers, NaN where the file has a question mark, without the columns that are left out."""
    with path.open(encoding="ascii", errors="replace", newline="") as stream:
        rows = [row for row in csv.reader(stream) if row]
    try:
        table = np.array([[value.strip().replace("?", "nan") for value in row] for row in rows], np.float64)
    except ValueError as error:
        raise DataError(f"{path}: expected {ATTRIBUTES} numbers or question marks in a row, found: {error}") from error
    if table.ndim != 2 or table.shape[1] != ATTRIBUTES:
        raise DataError(f"{path}: expected rows of {ATTRIBUTES} values, found an array of shape {table.shape}")
    return np.delete(table, LEFT_OUT, 1)


def held_out(y: Ints, where: Path) -> Bools:
    """FLamby's test patients of one hospital: a third, with the mix of labels kept if three patients or more have
    each."""
    from sklearn.model_selection import train_test_split

    labels, counts = np.unique(y, return_counts=True)
    stratify = y if len(labels) > 1 and (counts > 2).all() else None
    shares = {"train_size": TRAIN_SHARE, "test_size": 1.0 - TRAIN_SHARE}
    try:
        _, rows = train_test_split(np.arange(len(y)), **shares, random_state=SPLIT_SEED, stratify=stratify)
    except ValueError as error:
        raise DataError(f"{where}: {len(y)} patients of a hospital cannot be split ({error})") from error
    return np.isin(np.arange(len(y)), rows)


def standardised(x: Array, groups: Ints, test: Bools) -> Array:
    """Features by the mean and the deviation of each group's training rows."""
    x, out = x.astype(np.float64), np.empty_like(x, np.float32)
    for group in np.unique(groups):
        mine = groups == group
        train = x[mine & ~test]
        out[mine] = (x[mine] - train.mean(0)) / (train.std(0, ddof=1) + 1e-9)
    return out


@published("tcga-brca")
def read_tcga(root: Path) -> Dataset:
    """Features as they are, as in FLamby: the age in years, the others 0 or 1."""
    file = existing(root / "fed_tcga_brca" / "brca.csv", root / "fed_tcga_brca.npz")
    if file.suffix == ".npz":
        x, y, site, test = _packed(file, 39, len(REGIONS))
    else:
        x, y, site, test = read_regions(file, existing(file.with_name("train_test_split.csv")))
    return Dataset(
        "tcga-brca",
        x,
        y,
        1,
        user=site,
        official_test=test,
        targets="survival",
        users=REGIONS,
        model="linear",
    )


def read_regions(patients: Path, split: Path) -> tuple[Array, Array, Ints, Bools]:
    """FLamby's table of patients (pid, 39 features, E, T) with the region and part that its split says: ``train_0``."""
    table, parts = _table(patients), {row["pid"]: row.get("fold2") or "" for row in _table(split)}
    features = [name for name in table[0] if name not in ("pid", "E", "T")]
    found = []
    for row in table:
        part, _, region = parts.get(row["pid"], "").partition("_")
        if part not in ("train", "test") or region not in map(str, range(len(REGIONS))):
            raise DataError(f"{split}: expected a fold2 such as train_0 for patient {row['pid']!r}")
        found.append((int(region), part == "test"))
    try:
        x = np.array([[row[name] for name in features] for row in table], np.float32)
        y = np.array([[row["T"], row["E"]] for row in table], np.float32)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{patients}: expected a number in every column and the columns E and T ({error})") from error
    site, test = (np.array(values) for values in zip(*found, strict=True))
    order = np.argsort(site, kind="stable")
    return x[order], read_targets("survival", y[order], str(patients)), site[order].astype(np.int64), test[order]


def _table(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.DictReader(stream))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: expected a CSV file, found: {error}") from error
    if not rows or "pid" not in rows[0]:
        raise DataError(
            f"{path}: expected a CSV file with a column pid, found {list(rows[0])[:4] if rows else 'nothing'}"
        )
    return rows


def _packed(path: Path, width: int, sites: int) -> tuple[Array, Array, Ints, Bools]:
    """x, targets (y, or time and event), site and split (1: test) of an .npz file."""
    arrays = read_npz(path)
    x, site, split = (column(arrays, key, path) for key in ("x", "site", "split"))
    if x.ndim != 2 or x.shape[1] != width or not np.isin(site, range(sites)).all() or not np.isin(split, (0, 1)).all():
        raise DataError(
            f"{path}: expected x [n, {width}], sites below {sites} and a split of 0 and 1, found x of shape {x.shape}"
        )
    y: Array
    if "time" in arrays:
        y = np.stack([column(arrays, "time", path), column(arrays, "event", path)], 1)
        y = read_targets("survival", y, str(path))
    else:
        y = column(arrays, "y", path).astype(np.int64)
    return x.astype(np.float32), y, site.astype(np.int64), split.astype(np.bool_)
