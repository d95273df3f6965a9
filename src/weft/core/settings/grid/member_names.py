"""Names of a sweep's members: the settings that vary, short where that is enough to tell members apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from weft.core.settings.grid.values import ABSENT, distinct, seed_last, varies, with_args_apart
from weft.core.settings.value_names import Labels, describe

Combination = tuple[int, dict[str, Any]]  # the entry of ``tasks`` that it belongs to, and its settings


def member_names(explicit: Sequence[Mapping[str, Any]], combinations: Sequence[Combination]) -> list[str]:
    """A name for every combination: what varies; a name given in ``tasks`` stands for the settings given with it."""
    values = [values for _, values in combinations]
    keys = seed_last({key: 0 for each in values for key in each if key != "name"})
    varying = [key for key in keys if distinct(each.get(key, ABSENT) for each in values) > 1]
    labels = Labels({key: [each[key] for each in values if key in each] for key in varying})
    entries = explicit or ({},)
    short, full = [], []
    for position, each in combinations:
        named = isinstance(each.get("name"), str) and each["name"]
        entry = with_args_apart(entries[position])
        fixed = {key for key, value in entry.items() if not varies(key, value)} if named else set()
        short.append(labels.name(each, [key for key in varying if key not in fixed], named or ""))
        full.append(labels.name(each, varying, named or ""))
    taken = Counter(short)
    chosen = [a if taken[a] == 1 else b for a, b in zip(short, full, strict=True)]
    return _unique(chosen, describe(values[0]["model"]))


def _unique(names: Sequence[str], fallback: str) -> list[str]:
    """Names that are not empty and differ: the second of a kind gets ``#2``."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        name = name or fallback
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} #{seen[name]}")
    return result
