"""The folder with what Weft has learned about machines: probes, calibrations and stack sizes.

``$WEFT_HOME``, else ``$XDG_CACHE_HOME/weft``, else ``~/.cache/weft``; in it ``machines/NAME/``.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from pathlib import Path

HOME_VARIABLE = "WEFT_HOME"
STEPS = "steps"  # captured by dry runs
PROBE, CALIBRATION, THROUGHPUT = "probe.json", "calibration.json", "throughput.json"
NVML = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"  # comes with the driver
NAME_BYTES = 96
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


def gpu_names() -> list[str]:
    """Names of the NVIDIA GPUs of this host as the driver lists them, without starting CUDA."""
    return _names_in_proc() or _names_by_nvml()


def _names_in_proc() -> list[str]:
    names = []
    for card in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            found = re.search(r"^Model:\s*(.+)$", card.read_text(encoding="utf-8"), flags=re.MULTILINE)
        except OSError:
            continue
        if found:
            names.append(found.group(1).strip())
    return names


def _names_by_nvml() -> list[str]:
    """The same from the driver's library, for hosts that have no such files (some containers)."""
    try:
        driver = ctypes.CDLL(NVML)
    except OSError:
        return []
    count, found = ctypes.c_uint(), []
    if driver.nvmlInit_v2() or driver.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device, name = ctypes.c_void_p(), ctypes.create_string_buffer(NAME_BYTES)
        if driver.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
            return []
        if driver.nvmlDeviceGetName(device, name, ctypes.c_uint(NAME_BYTES)):
            return []
        found.append(name.value.decode(errors="replace"))
    return found
