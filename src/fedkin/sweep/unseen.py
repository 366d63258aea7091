"""What is chosen on validation samples is worth nothing where the models that begin have trained on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedkin.config import Config
from fedkin.errors import UsageError
from fedkin.rounds import prepare
from fedkin.runs.origin import name_of, with_origin
from fedkin.sweep.loaded import Data


def check_unseen(configs: Sequence[Config], given: Mapping[str, Any], data: Data) -> None:
    """UsageError if one of the runs begins with another that has trained on its samples for validation, as far as can
    be told; they are prepared to see it, and not carried out."""
    for config in configs:
        if config.start_from is None:
            continue
        job = prepare(config, **with_origin(config, {**given, "data": data.of(config, given)}))
        if job.taken is not None and job.taken.spoilt:
            name, share, seen = name_of(config), config.validation_share, job.taken.spoilt
            raise UsageError(
                f"start_from={name!r}: {seen} of the validation samples at seed {config.seed} were training "
                "samples of it, or of a run before it: trials would be chosen by what was learnt by heart. Begin with "
                f"a run that set the same samples aside (seed {config.seed}, the same split, "
                f"validation_share={share}), or tune without it"
            )
