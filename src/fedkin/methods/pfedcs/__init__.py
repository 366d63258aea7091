"""PFedCS: the paper's algorithm (`method`), how similar heads are told from others (`mixture`), and what it is compared
with (`ablations`)."""

from fedkin.methods.pfedcs.ablations import PFedCS
from fedkin.methods.pfedcs.method import collaborators, mixing
from fedkin.methods.pfedcs.options import PFedCSOptions

__all__ = ["PFedCS", "PFedCSOptions", "collaborators", "mixing"]
