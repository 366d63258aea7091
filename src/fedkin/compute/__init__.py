"""How rows are computed: programs over rows, losses, optimisers, batches, and the ways to run them."""
