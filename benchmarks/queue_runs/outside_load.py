"""How much of the processor others than a queue's workers wanted while the queue ran."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

STATISTICS = Path("/proc/stat")
IDLE = (3, 4)  # columns: idle, and waiting for a disk


def busy_seconds() -> float | None:
    """Seconds that all cores have been busy with other processes than this one; None where the system does not say.

    This process is the queue's own server, which is not a load beside it.
    """
    try:
        columns = [int(word) for word in STATISTICS.read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    busy = sum(count for place, count in enumerate(columns) if place not in IDLE) / os.sysconf("SC_CLK_TCK")
    return busy - time.process_time()


def background(before: float | None, after: float | None, seconds: float, took: Iterable[Mapping[str, float]]) -> float:
    """The share of all cores that others wanted in ``seconds``, of which the workers' groups ``took`` what they did.

    What others had is what was busy less what the groups computed. If cores were short, all had less than they
    wanted; the groups' own waiting says by how much.
    """
    if before is None or after is None or seconds <= 0:
        return 0.0
    groups = list(took)
    computed = sum(group["cpu_seconds"] for group in groups)
    waited = sum(group["waited_seconds"] for group in groups)
    had = max(after - before - computed, 0.0) / ((os.cpu_count() or 1) * seconds)
    return had * ((computed + waited) / computed if computed > 0 else 1.0)
