"""The folder with what Weft has learned about machines: probes, calibrations and stack sizes.

``$WEFT_HOME``, else ``$XDG_CACHE_HOME/weft``, else ``~/.cache/weft``; in it ``machines/NAME/``.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

HOME_VARIABLE = "WEFT_HOME"
STEPS = "steps"  # captured by dry runs
PROBE, CALIBRATION, THROUGHPUT = "probe.json", "calibration.json", "throughput.json"
STARTED = "probe.started"  # beside the probe: one is under way in the background


def home() -> Path:
    """The folder for what Weft keeps between runs; it need not exist."""
    given = os.environ.get(HOME_VARIABLE)
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "weft"


def machine_name(device: str) -> str:
    """What this host with ``device`` (``"cpu"``, or the name of its GPU) is called wherever something is kept."""
    return f"{platform.node() or 'this host'} {device}"


def machine_folder(name: str) -> Path:
    """The folder of the machine of that name."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return home() / "machines" / (words or "machine")
