"""FedKin: personalised federated learning that survives hostile clients."""

from fedkin.api import compare, run
from fedkin.cohort import Cohort, Keep, Model
from fedkin.compute.losses import align, cross_entropy, guide
from fedkin.compute.optim import SGD, Adam
from fedkin.config import Config
from fedkin.data import dirichlet, groups, iid, natural, pathological, shards
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.federation import Clients, Federation, each, weighted_mean
from fedkin.layout import Layout
from fedkin.methods import METHODS, Method, option
from fedkin.models import MODELS
from fedkin.run import Result

__version__ = "0.1.0"

__all__ = [
    "METHODS", "MODELS", "SGD", "Adam", "Clients", "Cohort", "Config", "DataError", "FedKinError", "Federation",
    "Keep", "Layout", "Method", "Model", "Result", "UsageError", "align", "compare", "cross_entropy", "dirichlet",
    "each", "groups", "guide", "iid", "natural", "option", "pathological", "run", "shards", "weighted_mean",
]  # fmt: skip
