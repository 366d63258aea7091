"""Data: sources, partitions, splits, feature shift, and your own. Arrays are numpy; nothing here knows a model."""

from __future__ import annotations

from fedkin.data import medical, pictures, sensors, text  # noqa: F401 - they register their sources
from fedkin.data.clients import Brought, OwnClients, WholeTable
from fedkin.data.dataset import Dataset
from fedkin.data.download import Progress
from fedkin.data.fitting import Preparing
from fedkin.data.image_folder import Shown
from fedkin.data.manner import Reading
from fedkin.data.own import (
    OF_IMAGES,
    TABLES,
    applied,
    from_arrays,
    from_folder,
    from_torch,
    is_image_folder,
    is_whole,
    own_clients,
    own_data,
    own_folder,
    own_table,
    own_whole,
)
from fedkin.data.partition import (
    PARTITIONS,
    Deal,
    Partition,
    dirichlet,
    groups,
    iid,
    natural,
    parse_partition,
    pathological,
    shards,
    unwritten,
)
from fedkin.data.remarks import remarks_on
from fedkin.data.shift import CORRUPTIONS, apply_shift
from fedkin.data.sources import SOURCES, Source, data_home, load, source
from fedkin.data.split import Split, make_split

__all__ = [
    "CORRUPTIONS",
    "OF_IMAGES",
    "PARTITIONS",
    "SOURCES",
    "TABLES",
    "Brought",
    "Dataset",
    "Deal",
    "OwnClients",
    "Partition",
    "Preparing",
    "Progress",
    "Reading",
    "Shown",
    "Source",
    "Split",
    "WholeTable",
    "applied",
    "apply_shift",
    "data_home",
    "dirichlet",
    "from_arrays",
    "from_folder",
    "from_torch",
    "groups",
    "iid",
    "is_image_folder",
    "is_whole",
    "load",
    "make_split",
    "natural",
    "own_clients",
    "own_data",
    "own_folder",
    "own_table",
    "own_whole",
    "parse_partition",
    "pathological",
    "remarks_on",
    "shards",
    "source",
    "unwritten",
]
