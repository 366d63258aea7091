"""Grids of runs: which there are, running them, and what they say together."""
