"""One file per paper. Importing this package registers all of them."""

from fedkin.methods import ditto, fedavg, fedbabu, fedper, fedprox, fedrep, lg_fedavg, local  # noqa: F401
from fedkin.methods.base import METHODS, Keep, Method
from fedkin.options import option

__all__ = ["METHODS", "Keep", "Method", "option"]
