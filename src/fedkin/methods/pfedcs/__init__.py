"""PFedCS: the paper's algorithm (`method`), how similar heads are told from others (`mixture`), and what it is compared
with (`ablations`)."""

from fedkin.methods.pfedcs.ablations import PFedCSWithAblations
from fedkin.methods.pfedcs.method import PFedCS, collaborators, mixing
from fedkin.methods.pfedcs.options import PFedCSOptions

__all__ = ["PFedCS", "PFedCSOptions", "PFedCSWithAblations", "collaborators", "mixing"]
