"""Which of a host's GPUs CUDA shows to a process, as ``CUDA_VISIBLE_DEVICES`` says: by numbers or by UUIDs."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UUID, _PART = "GPU-", "MIG-"


def names_uuids(chosen: str | None) -> bool:
    """Whether GPUs are chosen by their UUIDs."""
    return chosen is not None and chosen.strip().startswith(_UUID)


def visible_places(chosen: str | None, uuids: Sequence[str]) -> list[int]:
    """Places of the GPUs that a process sees, in its order, among all GPUs with ``uuids``; None chooses all.

    As CUDA does, the list ends before its first entry that is no GPU, and one that names a GPU twice shows none. A
    part of a GPU counts as the first one: CUDA shows a process one part, and the driver does not say whose it is.
    """
    if chosen is None:
        return list(range(len(uuids)))
    if chosen.strip().startswith(_PART):
        return [0] if uuids else []
    places: list[int] = []
    for entry in chosen.split(","):
        place = _by_uuid(entry.strip(), uuids) if names_uuids(chosen) else _by_number(entry.strip(), len(uuids))
        if place is None:
            break
        if place in places:
            return []
        places.append(place)
    return places


def _by_number(entry: str, count: int) -> int | None:
    """The number that ``entry`` begins with, whatever follows it."""
    found = re.match(r"\+?[0-9]+", entry)
    return int(found.group()) if found and int(found.group()) < count else None


def _by_uuid(entry: str, uuids: Sequence[str]) -> int | None:
    """The one GPU whose UUID begins with ``entry``."""
    fitting = [place for place, uuid in enumerate(uuids) if uuid.startswith(entry)]
    return fitting[0] if entry.startswith(_UUID) and len(fitting) == 1 else None
