"""Start a probe in the background after the first `weft run` at a terminal of a CPU that was never measured.

It is a process of its own with the lowest priority, and it measures only while nothing else runs: on a busy machine
rates come out several times too low. ``WEFT_PROBE=off`` does without.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import SpecError, WeftError
from weft.engine.home import HOME_VARIABLE, PROBE, STARTED, home, machine_folder, machine_name

# ---- Look: what this process and all others did on the machine until a moment.

STAT = Path("/proc/stat")
TICKS = 100.0  # of a second, as Linux counts them for every program
MOST_BUSY = 0.15  # of all cores that others may take while something is measured


@dataclass(frozen=True)
class Look:
    """What was done until a moment: ``now`` by the clock, CPU seconds of this process and of all, in ``cores``."""

    now: float
    own: float
    all: float
    cores: int

    @classmethod
    def here(cls) -> Look | None:
        """Now, on the cores that this process may use; None where the system does not say."""
        try:
            mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            lines = [line.split() for line in STAT.read_text(encoding="ascii").splitlines()]
            busy = [sum(map(int, [*words[1:4], *words[6:9]])) for words in lines if words and words[0] in mine]
        except (OSError, ValueError, AttributeError):
            return None
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return cls(time.monotonic(), own, sum(busy) / TICKS, len(busy)) if busy else None

    def others(self, before: Look) -> float:
        """Cores that other processes took since ``before``."""
        return max((self.all - before.all) - (self.own - before.own), 0.0) / max(self.now - before.now, 1e-9)


VARIABLE = "WEFT_PROBE"
FORGOTTEN = 3600.0  # seconds after which one that did not end was lost with the machine
CHILD = "weft.engine.background_probe"
TOLD = (
    "rates of this machine were never measured: a probe in the background does so once it is idle, "
    f"for the plans to come ({VARIABLE}=off: never)"
)


def start_probe(device: str) -> str:
    """Start one if ``device`` is a CPU that has none; a sentence that says so, or nothing."""
    from weft.engine.machine import (
        choose_device,
        machine_of,
    )  # imports torch, unlike the process started

    chosen = choose_device(device)
    if chosen.type != "cpu" or not is_wanted():
        return ""
    if os.name != "posix" or not sys.executable or Look.here() is None:
        return ""
    folder = machine_folder(machine_of(chosen))
    return TOLD if _claim(folder) and _spawn(folder) else ""


def is_wanted() -> bool:
    """What $WEFT_PROBE says; on, unless it says off."""
    given = os.environ.get(VARIABLE, "").strip().lower()
    if given not in ("", "on", "off"):
        raise SpecError(f"{VARIABLE}={given!r} must be on or off")
    return given != "off"


def _claim(folder: Path) -> bool:
    """Whether this process is the first to start one for the machine of that folder."""
    if (folder / PROBE).exists():
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        started = folder / STARTED
        if started.exists() and time.time() - started.stat().st_mtime > FORGOTTEN:
            started.unlink()
        started.touch(exist_ok=False)
    except OSError:  # one was started before, or nothing can be kept here
        return False
    return True


def _spawn(folder: Path) -> bool:
    """Through a shell that ends at once: this process has no child to wait for. It measures the disk of ``folder``."""
    command = ["/bin/sh", "-c", '"$0" -m "$1" </dev/null >/dev/null 2>&1 &', sys.executable, CHILD]
    paths = [str(Path(__file__).parents[2]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    places = {HOME_VARIABLE: str(home().absolute()), "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))}
    try:
        done = subprocess.run(command, cwd=folder, env=os.environ | places, start_new_session=True, check=False)
    except OSError:
        return False
    return done.returncode == 0


# ---- The process that measures in the background: wait until the machine is idle, measure, keep it if it stayed idle.

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

    from weft.engine.machine import keep_probe
    from weft.engine.probe import probe

    before = Look.here()
    found = probe(torch.device("cpu"))
    if before is None or not was_idle(before):
        return False
    with suppress(WeftError):  # nothing can be kept here
        keep_probe(found)
    return True


if __name__ == "__main__":
    main()
