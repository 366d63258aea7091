"""What a run leaves behind: a folder with its settings, metrics, split, checkpoints and log; and how to read it.

Reading (`folder`, `catalogue`) imports no torch, so that listing hundreds of runs takes a moment."""
