"""FedPKDA: the paper's algorithm (`method`), its prototypes (`prototypes`), and what only its ablation and the
authors' code need (`ablations`)."""

from fedkin.methods.fedpkda.ablations import FedPKDA
from fedkin.methods.fedpkda.options import FedPKDAOptions

__all__ = ["FedPKDA", "FedPKDAOptions"]
