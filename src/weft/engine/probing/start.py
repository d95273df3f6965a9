"""Start a probe in the background after the first `weft run` at a terminal of a CPU that was never measured.

It is a process of its own with the lowest priority, and it measures only while nothing else runs: on a busy machine
rates come out several times too low. ``WEFT_PROBE=off`` does without.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from weft.core.errors import SpecError
from weft.engine.base.device import choose_device, machine_of
from weft.engine.base.home import HOME_VARIABLE, PROBE, STARTED, home, machine_folder
from weft.engine.probing.machine_load import Look

VARIABLE = "WEFT_PROBE"
FORGOTTEN = 3600.0  # seconds after which one that did not end was lost with the machine
CHILD = "weft.engine.probing.child"
TOLD = (
    "rates of this machine were never measured: a probe in the background does so once it is idle, "
    f"for the plans to come ({VARIABLE}=off: never)"
)


def start_probe(device: str) -> str:
    """Start one if ``device`` is a CPU that has none; a sentence that says so, or nothing."""
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
    paths = [str(Path(__file__).parents[3]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    places = {HOME_VARIABLE: str(home().absolute()), "PYTHONPATH": os.pathsep.join(map(os.path.abspath, paths))}
    try:
        done = subprocess.run(command, cwd=folder, env=os.environ | places, start_new_session=True, check=False)
    except OSError:
        return False
    return done.returncode == 0
