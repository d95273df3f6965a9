"""The process that measures in the background: wait until the machine is idle, measure, keep it if it stayed idle."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress

from weft.core.errors import WeftError
from weft.engine.base.home import PROBE, STARTED, machine_folder, machine_name
from weft.engine.probing.machine_load import MOST_BUSY, Look

LOOK_SECONDS = 3.0  # of idleness before it begins
PATIENCE_SECONDS = 300.0  # then it gives up; the next run starts another


def main(sleep: Callable[[float], None] = time.sleep) -> None:
    """Measure once, or give up."""
    folder = machine_folder(machine_name("cpu"))
    with suppress(OSError, AttributeError):
        os.nice(19)
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until and not (folder / PROBE).exists():
            if _is_idle(sleep) and _measure():
                return
    finally:
        if not (folder / PROBE).exists():
            (folder / STARTED).unlink(missing_ok=True)


def _is_idle(sleep: Callable[[float], None]) -> bool:
    before = Look.here()
    sleep(LOOK_SECONDS)
    return before is not None and was_idle(before)


def was_idle(before: Look) -> bool:
    """Whether other processes left the machine alone since ``before``."""
    now = Look.here()
    return now is not None and now.others(before) <= MOST_BUSY * now.cores


def _measure() -> bool:
    """Whether what was measured is kept: only if nothing else ran meanwhile."""
    import torch  # takes seconds, and may be for nothing

    from weft.engine.base.machines import keep_probe
    from weft.engine.base.probe import probe

    before = Look.here()
    found = probe(torch.device("cpu"))
    if before is None or not was_idle(before):
        return False
    with suppress(WeftError):  # nothing can be kept here
        keep_probe(found)
    return True


if __name__ == "__main__":
    main()
