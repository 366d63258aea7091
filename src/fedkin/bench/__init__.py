"""Speed, as ratios measured in one run: training, cells of a table, the network."""
