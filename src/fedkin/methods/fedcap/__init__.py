"""FedCAP: the paper's algorithm (`method`), its arithmetic (`similarity`), and what only its tables and the authors'
code need (`ablations`)."""

from fedkin.methods.fedcap.ablations import FedCAP
from fedkin.methods.fedcap.options import FedCAPOptions

__all__ = ["FedCAP", "FedCAPOptions"]
