"""C-PFL: the paper's algorithm (`method`), and what its votes are worth (`committee`)."""

from fedkin.methods.c_pfl.method import CPFL
from fedkin.methods.c_pfl.options import CPFLOptions

__all__ = ["CPFL", "CPFLOptions"]
