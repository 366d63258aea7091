"""Partitions against examples counted by hand, and what must hold for all of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkin.data import (
    PARTITIONS,
    Dataset,
    Split,
    dirichlet,
    groups,
    iid,
    make_split,
    natural,
    parse_partition,
    pathological,
    shards,
)
from fedkin.errors import DataError, UsageError

CHARACTERS = "0123456789abcdefghijABCDEFGHIJ"


def toy(per_class=40, classes=10, users=7, official=True, names=None):
    y = np.tile(np.arange(classes), per_class)
    n = len(y)
    return Dataset(
        "toy",
        np.arange(2 * n, dtype=np.float32).reshape(n, 2),
        y,
        classes,
        class_names=tuple(names or map(str, range(classes))),
        user=np.arange(n) % users + 100,
        official_test=(np.arange(n) >= n * 3 // 4) if official else None,
    )


def everything(split: Split):
    return np.concatenate([*split.train, *split.validation, *split.test])


def class_sets(split: Split, dataset: Dataset):
    return [set(np.flatnonzero(row).tolist()) for row in split.class_table(dataset, "all")]


# --- pathological: PFLlib's "pat" ------------------------------------------------------------------------------------


def test_pathological_makes_blocks_of_four():
    data = toy()
    split = make_split(data, 20, "pathological:2", seed=0)
    assert class_sets(split, data) == [{2 * (i // 4), 2 * (i // 4) + 1} for i in range(20)]
    assert (split.class_table(data, "all").max(axis=1) == 10).all()  # 40 samples of a class over 4 clients


def test_pathological_tail_gets_fewer_classes():
    data = toy()
    sets = class_sets(make_split(data, 20, pathological(3), seed=0), data)
    assert sets[:6] == [{0, 1, 2}] * 6
    assert sets[6:12] == [{3, 4, 5}] * 6
    assert sets[12:18] == [{6, 7, 8}] * 6
    assert sets[18:] == [{9}, {9}]


def test_pathological_shuffled_has_the_same_class_sets_elsewhere():
    data = toy()
    specs = ("pathological:2", "pathological:2:shuffled")
    plain, mixed = (class_sets(make_split(data, 20, spec, seed=0), data) for spec in specs)
    assert plain != mixed
    assert sorted(map(sorted, plain)) == sorted(map(sorted, mixed))


def test_pathological_unbalanced_conserves_and_varies():
    data = toy(per_class=400)
    table = make_split(data, 20, "pathological:2:unbalanced", seed=0).class_table(data, "all")
    assert (table.sum(axis=0) == 400).all()
    held = table[table > 0]
    assert held.min() >= 4  # least samples 40 over 10 classes
    assert len(np.unique(held)) > 5


def test_pathological_that_leaves_a_class_to_nobody_is_refused():
    with pytest.raises(DataError, match=r"class 8 of toy to nobody: take a multiple of 5 clients"):
        make_split(toy(), 7, "pathological:2", seed=0)


# --- dirichlet: PFLlib's "dir" ---------------------------------------------------------------------------------------


def test_dirichlet_follows_the_recipe_step_by_step():
    """The slow, obvious loop of the recipe, on the same stream, gives the same counts."""
    data, clients, alpha = toy(per_class=60), 5, 0.5
    split = make_split(data, clients, dirichlet(alpha), seed=3)
    rng = np.random.Generator(np.random.PCG64(3))
    while True:
        held = [0] * clients
        table = np.zeros((clients, 10), int)
        for c in range(10):
            share = rng.dirichlet([alpha] * clients)
            share = np.array([p if h < len(data) / clients else 0 for p, h in zip(share, held, strict=True)])
            ends = [int(e * 60) for e in np.cumsum(share / share.sum())[:-1]] + [60]
            for i, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
                table[i, c] = b - a
                held[i] += b - a
        if min(held) >= min(40, len(data) // clients // 2):
            break
    assert (split.class_table(data, "all") == table).all()


def test_dirichlet_large_alpha_is_nearly_even_and_small_alpha_is_not():
    data = toy(per_class=400)
    even, uneven = (make_split(data, 10, f"dirichlet:{a}", seed=0).class_table(data, "all") for a in (1000, 0.1))
    assert np.abs(even - 40).max() < 15
    assert (uneven == 0).mean() > 0.3


def test_dirichlet_gives_up_with_a_reason():
    refused = pytest.raises(DataError, match=r"in 1000 draws over 100 clients .* larger alpha, fewer clients")
    with refused, np.errstate(invalid="raise", divide="raise"):  # vanishing shares must not become 0 / 0
        make_split(toy(), 100, "dirichlet:0.001:3", seed=0)
    with pytest.raises(DataError, match="10 clients of at least 50 samples need 500, but toy has 400"):
        make_split(toy(), 10, "dirichlet:1:50", seed=0)


# --- shards, groups, natural, iid ------------------------------------------------------------------------------------


def test_shards_keep_the_bound_and_test_on_the_same_classes():
    data = toy(per_class=40)  # 30 rows of a class to train, 10 to test; 20 clients: 4 shards per class
    split = make_split(data, 20, shards(2, train_bound=5, test_bound=2), seed=1)
    train, test = split.class_table(data), split.class_table(data, "test")
    assert (train.sum(axis=1) == 10).all()
    assert (test.sum(axis=1) == 4).all()
    assert (train * 2 == test * 5).all()
    assert (train.sum(axis=0) == 4 * 5).all()
    assert data.official_test[np.concatenate(split.test)].all()
    assert not data.official_test[np.concatenate(split.train)].any()


def test_shards_without_a_published_test_set_hold_a_quarter_out():
    data = toy(per_class=40, official=False)
    split = make_split(data, 10, "shards:2", seed=1)
    assert (split.class_table(data, "test").sum(axis=0) == 10).all()
    assert len(np.unique(everything(split))) == len(data)


def test_shards_that_do_not_divide_still_use_every_class():
    data = toy()
    split = make_split(data, 7, "shards:2", seed=0)  # 14 shards over 10 classes
    assert sorted((split.class_table(data) > 0).sum(axis=0))[0] >= 1
    with pytest.raises(DataError, match="makes 4 shards, fewer than the 10 classes"):
        make_split(data, 4, "shards:1", seed=0)


def test_groups_mix_eighty_to_twenty():
    data = toy(per_class=100, classes=30, names=CHARACTERS)
    split = make_split(data, 15, "groups", seed=0)
    table = split.class_table(data, "all")
    for client, row in enumerate(table):
        own = row[10 * (client // 5) : 10 * (client // 5) + 10].sum()
        assert row.sum() == 200
        assert own / row.sum() == pytest.approx(0.8 + 0.2 / 3, abs=0.08)
    assert table.sum() == len(data)
    assert (make_split(data, 3, groups(1.0), seed=0).class_table(data, "all")[0, 10:] == 0).all()


def test_groups_need_classes_that_are_characters():
    with pytest.raises(DataError, match="single characters"):
        make_split(toy(names=[f"class {i}" for i in range(10)]), 6, "groups", seed=0)
    with pytest.raises(DataError, match="at least two kinds"):
        make_split(toy(), 6, "groups", seed=0)


def test_natural_is_one_client_per_user():
    data = toy(per_class=4, users=7)  # 40 rows: users 100..104 have 6, 105 and 106 have 5
    split = make_split(data, None, natural(), seed=0)
    assert split.names == tuple(f"user-{u}" for u in range(100, 107))
    for client in range(7):
        rows = np.concatenate([split.train[client], split.test[client]])
        assert set(data.user[rows]) == {100 + client}
    assert make_split(data, 2, "natural", seed=0).names == ("user-100", "user-101")
    with pytest.raises(DataError, match="8 clients asked for, but toy has 7 users"):
        make_split(data, 8, "natural", seed=0)


def test_natural_takes_the_largest_users():
    y = np.zeros(10, np.int64)
    data = Dataset("toy", np.zeros((10, 1), np.float32), y, 1, user=np.array([5, 5, 1, 9, 9, 9, 9, 7, 7, 7]))
    assert make_split(data, 2, "natural", seed=0).names == ("user-7", "user-9")


def test_iid_is_even():
    data = toy()
    split = make_split(data, 7, iid(), seed=0)
    assert {len(a) + len(b) for a, b in zip(split.train, split.test, strict=True)} == {57, 58}


# --- sizes and parts -------------------------------------------------------------------------------------------------


def test_fedcap_gets_300_samples_per_client():
    data = toy(per_class=2000)
    split = make_split(data, 20, "pathological:2", seed=0, samples_per_client=300)
    assert {(len(a), len(b)) for a, b in zip(split.train, split.test, strict=True)} == {(225, 75)}
    assert set(split.class_table(data, "all").ravel()) == {0, 150}


def test_the_cap_keeps_the_class_mix():
    y = np.repeat([0, 1], [80, 20])
    data = Dataset("toy", np.zeros((100, 1), np.float32), y, 2)
    table = make_split(data, 1, "iid", seed=0, samples_per_client=50).class_table(data, "all")
    assert table.tolist() == [[40, 10]]


def test_quantity_skew_makes_sizes_uneven_but_never_empty():
    data = toy(per_class=100)
    sizes = make_split(data, 20, "iid", seed=0, quantity_skew=2.0).class_table(data, "all").sum(axis=1)
    assert sizes.max() == 50
    assert sizes.min() >= 2
    assert sizes.std() > 5
    even = make_split(data, 20, "iid", seed=0, quantity_skew=0.0)
    assert even.hash == make_split(data, 20, "iid", seed=0).hash


def test_validation_is_a_stratified_part_of_training():
    data = toy(per_class=80)
    split = make_split(data, 4, "iid", seed=0, validation_share=0.2)
    assert {len(v) for v in split.validation} == {30}
    table = split.class_table(data, "validation")
    assert np.abs(table - (split.class_table(data) + table) * 0.2).max() < 1


def test_a_client_with_one_sample_trains_and_does_not_test():
    data = Dataset("toy", np.zeros((3, 1), np.float32), np.zeros(3, np.int64), 1, user=np.array([1, 1, 2]))
    split = make_split(data, None, "natural", seed=0, validation_share=0.5)
    assert [len(t) for t in split.train] == [1, 1]
    assert [len(t) for t in split.test] == [1, 0]


def test_hash_covers_rows_parts_and_names_and_nothing_else():
    split = Split((np.array([0, 2]),), (np.array([], np.int64),), (np.array([1]),), ("a",))
    assert split.hash == Split((np.array([0, 2], np.int32),), split.validation, split.test, ("a",)).hash
    assert split.hash != Split(split.train, split.validation, split.test, ("b",)).hash
    assert split.hash != Split(split.train, split.test, split.validation, ("a",)).hash


def test_global_random_state_has_no_influence():
    np.random.seed(0)  # noqa: NPY002
    first = make_split(toy(), 5, "dirichlet:0.5", seed=1).hash
    np.random.seed(1)  # noqa: NPY002
    assert make_split(toy(), 5, "dirichlet:0.5", seed=1).hash == first
    assert make_split(toy(), 5, "dirichlet:0.5", seed=2).hash != first


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "iid:3",
        "pathological",
        "pathological:x",
        "pathological:2:odd",
        "shards:1:2:3:4",
        "dirichlet:",
        "dirichlet:1:2:3",
        "groups:a",
        "natural:2",
    ],
)
def test_a_bad_spec_names_the_form(spec):
    form = PARTITIONS[spec.split(":")[0]].form
    with pytest.raises(UsageError) as caught:
        parse_partition(spec)
    assert form in str(caught.value)
    assert repr(spec) in str(caught.value)


def test_unknown_partition_suggests_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'dirichlet'"):
        parse_partition("dirichle:0.1")


@pytest.mark.parametrize(
    "spec", ["dirichlet:0", "dirichlet:-1", "dirichlet:nan", "pathological:0", "shards:2:0", "groups:0"]
)
def test_values_out_of_range_are_named(spec):
    with pytest.raises(UsageError):
        parse_partition(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "iid",
        "pathological:2",
        "pathological:2:unbalanced:shuffled",
        "shards:2:50:100",
        "shards:2",
        "dirichlet:0.1",
        "dirichlet:0.1:5",
        "groups:0.8",
        "natural",
    ],
)
def test_a_partition_prints_as_it_is_written(spec):
    assert str(parse_partition(spec)) == spec
    assert parse_partition(parse_partition(spec)) == parse_partition(spec)


def test_requests_that_cannot_be_met_say_why():
    data = toy(per_class=1)
    with pytest.raises(DataError, match="asks for 11 classes per client, but toy has 10"):
        make_split(data, 10, "pathological:11", seed=0)
    with pytest.raises(DataError, match="11 clients, but toy has 10 samples"):
        make_split(data, 11, "iid", seed=0)
    with pytest.raises(DataError, match="without samples"):
        make_split(data, 10, "pathological:2", seed=0)
    with pytest.raises(UsageError, match="0 clients"):
        make_split(data, 0, "iid", seed=0)
    with pytest.raises(UsageError, match="needs a number of clients"):
        make_split(data, None, "iid", seed=0)
    with pytest.raises(UsageError, match="test share is 1"):
        make_split(data, 2, "iid", seed=0, test_share=1)
    with pytest.raises(UsageError, match="quantity skew is -1"):
        make_split(data, 2, "iid", seed=0, quantity_skew=-1)
    with pytest.raises(UsageError, match="samples per client is 0"):
        make_split(data, 2, "iid", seed=0, samples_per_client=0)
    with pytest.raises(DataError, match="does not say who"):
        make_split(Dataset("toy", data.x, data.y, 10), 2, "natural", seed=0)


# --- what holds for all ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from(
        [
            "iid",
            "pathological:2",
            "pathological:5:unbalanced",
            "pathological:2:shuffled",
            "shards:2",
            "shards:3:4:2",
            "dirichlet:0.5:1",
            "dirichlet:10",
            "groups:0.7",
            "natural",
        ]
    ),
    clients=st.integers(1, 24),
    seed=st.integers(0, 2**32),
    validation=st.sampled_from([0.0, 0.3]),
    cap=st.sampled_from([None, 7]),
    skew=st.sampled_from([None, 1.0]),
)
def test_rows_are_disjoint_everybody_trains_and_the_seed_decides(spec, clients, seed, validation, cap, skew):
    data = toy(per_class=100, classes=6, users=24, names="01abAB")
    options = {"validation_share": validation, "samples_per_client": cap, "quantity_skew": skew}
    try:
        split = make_split(data, clients, spec, seed, **options)
    except DataError:
        if spec.split(":")[0] not in ("pathological", "shards", "groups"):  # the only ones that few clients cannot meet
            raise
        return
    rows = everything(split)
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < len(data)
    assert split.clients == clients
    assert all(len(part) >= 1 for part in split.train)
    assert split.hash == make_split(data, clients, spec, seed, **options).hash
    kept_whole = cap is None and skew is None and spec not in ("shards:3:4:2", "natural")
    if kept_whole:
        assert len(rows) == len(data)
    if cap is not None:
        assert split.class_table(data, "all").sum(axis=1).max() <= cap
