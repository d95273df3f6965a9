"""What measured phase times are of: a key that is equal for groups whose batches and steps are alike."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.placement import Placement
from weft.core.task import Task


def phases_key(tasks: Sequence[Task], place: Placement, digest: str, trainer: str = "gpu", buckets: int = 1) -> str:
    """Of ``tasks`` that share every batch of the graph with fingerprint ``digest``, on ``trainer``.

    ``buckets``: sizes that batches are padded to.
    """
    first = tasks[0]
    shape = (first.model_name, first.layers, first.hidden, first.precision, len(tasks))
    where = (place.features, place.topology, place.cache_bytes)
    sizes = (f"{buckets} sizes",) if buckets > 1 else ()
    return " ".join(map(str, (digest, trainer, *shape, *first.fanouts, first.batch, *where, *sizes)))
