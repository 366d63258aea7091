"""Real deployment: each client on its own machine, with its own data."""
