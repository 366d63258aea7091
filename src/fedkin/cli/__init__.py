"""The command line: `fedkin run`, `fedkin compare` and the commands that show what there is."""

from fedkin.cli.commands import app, main

__all__ = ["app", "main"]
