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

# ---- The load of the machine

STAT = Path("/proc/stat")
TICKS = 100.0  # of a second, as Linux counts them for every program
MOST_BUSY = 0.15  # of all cores that others may take while something is measured


@dataclass(frozen=True)
class LoadSample:
    """CPU seconds until the moment ``time`` of the clock: of this process and of all, on ``cores`` cores."""

    time: float
    process: float
    all: float
    cores: int

    @classmethod
    def now(cls) -> LoadSample | None:
        """The load now, on the cores that this process may use; None where the system does not say."""
        try:
            usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            lines = [line.split() for line in STAT.read_text(encoding="ascii").splitlines()]
            busy = [sum(map(int, [*words[1:4], *words[6:9]])) for words in lines if words and words[0] in usable]
        except (OSError, ValueError, AttributeError):
            return None
        times = os.times()
        process = times.user + times.system + times.children_user + times.children_system
        return cls(time.monotonic(), process, sum(busy) / TICKS, len(busy)) if busy else None

    def others(self, before: LoadSample) -> float:
        """Cores that other processes took since ``before``."""
        seconds = max(self.time - before.time, 1e-9)
        return max((self.all - before.all) - (self.process - before.process), 0.0) / seconds


# ---- Start the process

VARIABLE = "WEFT_PROBE"
FORGOTTEN = 3600.0  # seconds after which one that did not end was lost with the machine
CHILD = "weft.engine.background_probe"
STARTED_WORDS = (
    "rates of this machine were never measured: a probe in the background does so once it is idle, "
    f"for the plans to come ({VARIABLE}=off: never)"
)


def start_probe(device: str) -> str:
    """Start a probe if ``device`` is a CPU that has none; returns a sentence that says so, or nothing."""
    from weft.engine.machine import choose_device, machine_of

    chosen = choose_device(device)
    if chosen.type != "cpu" or not is_wanted():
        return ""
    if os.name != "posix" or not sys.executable or LoadSample.now() is None:
        return ""
    folder = machine_folder(machine_of(chosen))
    if (folder / PROBE).exists():
        return ""
    started = folder / STARTED
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if started.exists() and time.time() - started.stat().st_mtime > FORGOTTEN:
            started.unlink()
        started.touch(exist_ok=False)
    except OSError:  # one was started before, or nothing can be kept here
        return ""
    # Through a shell that ends at once: this process has no child to wait for. It measures the disk of ``folder``.
    command = ["/bin/sh", "-c", '"$0" -m "$1" </dev/null >/dev/null 2>&1 &', sys.executable, CHILD]
    paths = [str(Path(__file__).parents[2]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    changed = {HOME_VARIABLE: str(home().absolute()), "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))}
    try:
        done = subprocess.run(command, cwd=folder, env=os.environ | changed, start_new_session=True, check=False)
    except OSError:
        return ""
    return STARTED_WORDS if done.returncode == 0 else ""


def is_wanted() -> bool:
    """True unless $WEFT_PROBE says off."""
    chosen = os.environ.get(VARIABLE, "").strip().lower()
    if chosen not in ("", "on", "off"):
        raise SpecError(f"{VARIABLE}={chosen!r} must be on or off")
    return chosen != "off"


# ---- The process: wait until the machine is idle, measure, keep the result if it stayed idle.

IDLE_SECONDS = 3.0  # before it begins
PATIENCE_SECONDS = 300.0  # then it gives up; the next run starts another


def main(sleep: Callable[[float], None] = time.sleep) -> None:
    """Measure once, or give up."""
    folder = machine_folder(machine_name("cpu"))
    with suppress(OSError, AttributeError):
        os.nice(19)
    try:
        until = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < until and not (folder / PROBE).exists():
            before = LoadSample.now()
            sleep(IDLE_SECONDS)
            if was_idle(before) and _measure():
                return
    finally:
        if not (folder / PROBE).exists():
            (folder / STARTED).unlink(missing_ok=True)


def was_idle(before: LoadSample | None) -> bool:
    """True if other processes left the machine alone since ``before``."""
    now = LoadSample.now()
    return before is not None and now is not None and now.others(before) <= MOST_BUSY * now.cores


def _measure() -> bool:
    """Measure; True if the result is kept: only if nothing else ran meanwhile."""
    import torch  # takes seconds, and may be for nothing

    from weft.engine.machine import keep_probe
    from weft.engine.probe import probe

    before = LoadSample.now()
    machine = probe(torch.device("cpu"))
    if not was_idle(before):
        return False
    with suppress(WeftError):  # nothing can be kept here
        keep_probe(machine)
    return True


if __name__ == "__main__":
    main()
