"""What measured phase times are of: a key that is equal for groups whose batches and steps are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.core.placement import Placement
from weft.core.task import Task

PLAIN = (str, int, float, tuple)  # values whose text says what they are


def phases_key(tasks: Sequence[Task], place: Placement, digest: str, trainer: str = "gpu", buckets: int = 1) -> str:
    """Of ``tasks`` that share every batch of the graph with fingerprint ``digest``, on ``trainer``.

    ``trainer``: what tells the hardware from other hardware. ``buckets``: sizes that batches are padded to.
    """
    first = tasks[0]
    shape = (first.model_name, first.layers, first.hidden, first.precision, len(tasks))
    where = (place.features, place.topology, place.cache_bytes)
    sizes = (f"{buckets} sizes",) if buckets > 1 else ()
    of_model = _of_model(first)
    return " ".join(map(str, (digest, trainer, *shape, *of_model, *first.fanouts, first.batch, *where, *sizes)))


def _of_model(task: Task) -> Iterator[str]:
    """What else the step of a model depends on: heads, aggregator, norm and the like, where they are not the usual."""
    names = ("norm", "residual", *(task.traits.shaping if task.traits is not None else task.given_to_model()))
    found = {name: getattr(task, name) for name in names} | dict(task.model_args)
    for name, value in sorted(found.items()):
        if value not in (None, False) and isinstance(value, PLAIN):
            yield f"{name}={value}"
