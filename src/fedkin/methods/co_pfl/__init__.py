"""CO-PFL: the paper's algorithm (`method`), its masks and averages (`masks`), what ablations need (`ablations`)."""

from fedkin.methods.co_pfl.ablations import COPFL
from fedkin.methods.co_pfl.options import COPFLOptions

__all__ = ["COPFL", "COPFLOptions"]
