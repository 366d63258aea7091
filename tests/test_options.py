"""Options convert what is meant, refuse what is not, and say what would be right."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkin.compute.optim import SGD, Adam
from fedkin.config import Config, make_config, read_toml
from fedkin.errors import UsageError
from fedkin.methods import METHODS
from fedkin.options import describe, option, validated
from fedkin.rounds import optimiser_of


@dataclass(frozen=True)
class Schema:
    count: int = option(3, "how many", low=1, high=10)
    share: float = option(0.5, "which share", above=0, high=1)
    flag: bool = option(False, "whether")
    kind: Literal["full", "head"] = option("full", "which")
    limit: int | None = option(None, "at most", low=1)
    sizes: tuple[int, ...] = option((1, 2), "sizes")
    text: str = option("a", "a word")


def test_defaults_hold_when_nothing_is_given() -> None:
    assert validated(Schema, {}) == Schema()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", "7", 7),
        ("count", 7.0, 7),
        ("share", 1, 1.0),
        ("share", "0.25", 0.25),
        ("share", "1e-3", 1e-3),
        ("flag", "False", False),
        ("flag", "no", False),
        ("flag", "0", False),
        ("flag", 0, False),
        ("flag", "true", True),
        ("flag", "ON", True),
        ("flag", 1, True),
        ("flag", True, True),
        ("kind", "head", "head"),
        ("limit", "none", None),
        ("limit", None, None),
        ("limit", "4", 4),
        ("sizes", "3,4", (3, 4)),
        ("sizes", [5], (5,)),
        ("text", "3", "3"),
    ],
)
def test_text_becomes_what_it_says(name: str, value: object, expected: object) -> None:
    found = getattr(validated(Schema, {name: value}), name)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "accepts"),
    [
        ("count", 2.5, "a whole number from 1 to 10"),
        ("count", "2.5", "whole"),
        ("count", True, "whole number"),
        ("count", 0, "from 1 to 10"),
        ("count", 11, "from 1 to 10"),
        ("count", "many", "whole number"),
        ("count", None, "whole number"),
        ("count", float("inf"), "whole number"),
        ("share", 0, "above 0 up to 1"),
        ("share", 1.01, "above 0 up to 1"),
        ("share", float("nan"), "a number"),
        ("share", "nan", "a number"),
        ("share", True, "a number"),
        ("share", "half", "a number"),
        ("flag", "maybe", "true or false"),
        ("flag", 2, "true or false"),
        ("flag", "", "true or false"),
        ("kind", "tail", "full, head"),
        ("limit", 0, "at least 1"),
        ("limit", "few", "none"),
        ("sizes", "1,x", "a list of a whole number"),
        ("text", 3, "text"),
    ],
)
def test_values_that_are_not_meant_are_refused_with_what_is(name: str, value: object, accepts: str) -> None:
    with pytest.raises(UsageError, match=accepts) as error:
        validated(Schema, {name: value})
    assert f"{name}={value!r}" in str(error.value)


def test_only_an_option_that_says_so_may_be_infinite() -> None:
    @dataclass(frozen=True)
    class Bounds:
        rate: float = option(0.1, "how fast", above=0)
        bound: float = option(1.0, "at most", above=0, infinite=True)
        levels: tuple[float, ...] = option((0.5,), "levels")
        share: float | None = option(None, "which share", low=0)

    assert validated(Bounds, {"bound": "inf"}).bound == float("inf")
    assert "or inf" in next(d.accepts for d in describe(Bounds) if d.name == "bound")
    for name, value in (
        ("rate", "inf"),
        ("rate", float("inf")),
        ("rate", "1e999"),
        ("bound", "nan"),
        ("bound", "-inf"),
        ("levels", "0.5,nan"),
        ("levels", [float("inf")]),
        ("share", "inf"),
    ):
        with pytest.raises(UsageError, match="must be finite"):
            validated(Bounds, {name: value})
    for name in ("lr", "quantity_skew", "weight_decay"):
        with pytest.raises(UsageError, match="must be finite"):
            make_config({name: "inf"})


def test_types_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    validated(Schema, {"count": 2})
    monkeypatch.setattr("fedkin.options.get_type_hints", lambda schema: 1 / 0)
    assert validated(Schema, {"count": "4"}).count == 4


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'count'"):
        validated(Schema, {"cuont": 1})
    with pytest.raises(UsageError, match="method 'x' has no option 'zzz': known: count, "):
        validated(Schema, {"zzz": 1}, "method 'x'")


@settings(max_examples=60, deadline=None)
@given(st.integers(-50, 50))
def test_whole_numbers_are_accepted_exactly_in_their_range(value: int) -> None:
    for given_as in (value, str(value), float(value)):
        if 1 <= value <= 10:
            assert validated(Schema, {"count": given_as}).count == value
        else:
            with pytest.raises(UsageError):
                validated(Schema, {"count": given_as})


@settings(max_examples=60, deadline=None)
@given(st.floats(allow_nan=True, allow_infinity=True))
def test_numbers_are_accepted_exactly_in_their_range(value: float) -> None:
    for given_as in (value, repr(value)):
        if 0 < value <= 1:
            assert validated(Schema, {"share": given_as}).share == value
        else:
            with pytest.raises(UsageError):
                validated(Schema, {"share": given_as})


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.lists(st.integers(), max_size=2)))
def test_anything_else_is_a_usage_error_and_never_a_crash(value: object) -> None:
    for name in ("count", "share", "flag", "kind", "limit"):
        try:
            found = getattr(validated(Schema, {name: value}), name)
        except UsageError:
            continue
        assert found is None or type(found) in (int, float, bool, str)


def test_options_describe_themselves() -> None:
    shown = {d.name: d for d in describe(Schema)}
    assert shown["count"].accepts == "a whole number from 1 to 10"
    assert shown["limit"].accepts == "a whole number of at least 1, or none"
    assert shown["share"].default == 0.5
    assert shown["kind"].type == "full, head"


@pytest.mark.parametrize("name", list(METHODS))
def test_every_option_of_every_method_has_help_and_a_valid_default(name: str) -> None:
    schema = METHODS[name].Options
    for d in describe(schema):
        assert d.help, f"{name}.{d.name} has no help"
        validated(schema, {d.name: d.default})
    assert METHODS[name].about
    assert METHODS[name].paper


# ---------------------------------------------------------------- a run's configuration


def test_every_setting_has_help_and_accepts_its_default() -> None:
    for d in describe(Config):
        assert d.help, d.name
        if d.name != "options":
            make_config({d.name: d.default})


def test_names_may_have_dashes() -> None:
    assert make_config({"weight-decay": "0.1"}).weight_decay == 0.1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rouns": 3}, "did you mean 'rounds'"),
        ({"rounds": 0}, "at least 1"),
        ({"participation": 0}, "above 0 up to 1"),
        ({"participation": 1.5}, "above 0 up to 1"),
        ({"lr": -1}, "above 0"),
        ({"drop": 1.0}, "from 0 to 0.99"),
        ({"buffers": "mean"}, "average, local"),
        ({"options": 3}, "a table"),
    ],
)
def test_a_wrong_setting_is_refused(values: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_config(values)


def test_optimisers_are_made_of_the_settings() -> None:
    made = optimiser_of(make_config({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}))
    assert made == SGD(0.1, 0.9, 0.01)
    assert optimiser_of(make_config({"optimiser": "adam", "lr": 0.1})) == Adam(0.1)
    with pytest.raises(UsageError, match="momentum"):
        optimiser_of(make_config({"optimiser": "adam", "momentum": 0.9}))


def test_a_toml_file_is_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('method = "ditto"\nrounds = 3\nlr = 1\n[options]\nlam = 0.5\n')
    config = make_config(read_toml(file))
    assert (config.method, config.rounds, config.lr, dict(config.options)) == ("ditto", 3, 1.0, {"lam": 0.5})
    assert make_config(config.to_dict()) == config


def test_a_damaged_or_missing_toml_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    with pytest.raises(UsageError, match=r"run\.toml: no such file"):
        read_toml(file)
    file.write_bytes(b"rounds = = 3")
    with pytest.raises(UsageError, match="not valid TOML"):
        read_toml(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not valid TOML"):
        read_toml(file)
