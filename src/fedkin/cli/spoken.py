"""What is said on the command line, in the words of the command line: flags where the rest of FedKin has settings, and
a way out where somebody typed what another tool, or another command, would have taken."""

from __future__ import annotations

import re
from dataclasses import fields

import click
from typer.core import TyperCommand

from fedkin.config import Config

ELSEWHERE = {
    "--lr": ("learning-rate", "learning_rate", "step-size", "local-lr"),
    "--batch": ("batch-size", "batch_size", "bs"),
    "--epochs": ("local-epochs", "local_epochs", "num-epochs"),
    "--rounds": ("num-rounds", "global-rounds", "communication-rounds", "num_rounds"),
    "--clients": ("num-clients", "num_clients", "n-clients"),
    "--data": ("dataset", "data-set"),
    "--optimiser": ("optimizer", "opt"),
    "--rule": ("aggregator", "aggregation", "aggregation-rule"),
    "--seeds": ("num-seeds", "trials"),
    "--label": ("target", "label-column"),
    "--partition": ("split", "alpha"),
    "--participation": ("fraction", "join-ratio", "client-fraction"),
}
"""What other tools call our flags."""
_SETTINGS = "|".join(sorted((f.name for f in fields(Config) if f.name not in ("method", "options")), key=len)[::-1])
_SAID = re.compile(rf"(?<![\w.=+:,-])(?<!option )({_SETTINGS})=('[^']*'|[^\s,;()]*[^\s,;():.])")


def as_flags(text: str) -> str:
    """A refusal with flags in place of settings: attack='sf' is --attack sf. What a settings file says stays, and so do
    the options of what a flag names."""
    return text if ".toml" in text or text.startswith("--") else _SAID.sub(_flag, text)


def _flag(found: re.Match[str]) -> str:
    flag, value = "--" + found[1].replace("_", "-"), found[2]
    if value in ("True", "true"):
        return flag
    plain = value.strip("'")
    return f"{flag} {plain}" if plain and " " not in plain else f"{flag} {value}"


class Spoken(TyperCommand):
    """A command that knows what people mean by flags and words that it does not take."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        said = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-")
            ours = next((flag for flag, theirs in ELSEWHERE.items() if name in theirs), None)
            if ctx.info_name == "run" and "--seeds" in (error.option_name, ours):
                raise click.UsageError(f"run does one run; for several seeds: {_compare(said)}", ctx) from None
            if ours is not None and any(ours in p.opts for p in self.params):
                error.possibilities = [ours]
            raise
        except click.UsageError as error:
            if ctx.info_name == "run" and "extra argument" in error.message:
                raise click.UsageError(f"run takes one method; for several: {_compare(said)}", ctx) from None
            raise


def _compare(said: list[str]) -> str:
    return " ".join(["fedkin compare", *said])
