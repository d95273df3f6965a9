"""The NVIDIA GPUs of this host, without CUDA: which of them CUDA shows, and what the driver (NVML) says of them."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.errors import SpecError

VISIBLE = "CUDA_VISIBLE_DEVICES"
KNOWN = "WEFT_KNOWN_DEVICES"  # numbers of the GPUs that a process is to know of, whatever CUDA shows it
FILES = Path("/proc/driver/nvidia/gpus")
NVML = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"  # comes with the driver
TEXT_BYTES = 96
MOST_PROCESSES = 256  # of a GPU that are read
NOT_AVAILABLE = (1 << 64) - 1  # what the driver writes for a figure that it does not know
DEVICE_NAME = re.compile(r"auto|(cpu|cuda)(:[0-9]+)?")


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it; ``uuid`` is empty where the driver does not say."""

    name: str
    uuid: str


def check_device_name(name: str) -> str:
    """Refuse what is no device at all, before torch is loaded; torch says whether it is there."""
    if DEVICE_NAME.fullmatch(name) is None:
        raise SpecError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N")
    return name


# ---- Which GPUs CUDA shows to a process, as ``CUDA_VISIBLE_DEVICES`` says: by numbers or by UUIDs.


def gpu_names() -> list[str]:
    """Names of the GPUs that CUDA shows to this process, ``cuda:0`` first."""
    return [gpu.name for _, gpu in _shown()]


def without_gpus() -> Mapping[str, str]:
    """The environment of a process that CUDA shows no GPU; :func:`gpu_names` says there what it says here."""
    return {VISIBLE: "", KNOWN: ",".join(str(number) for number, _ in _shown())}


def renumbered() -> Mapping[str, str]:
    """The environment of a process that numbers the GPUs shown here from 0; :func:`gpu_names` says there the same."""
    chosen, shown = os.environ.get(VISIBLE), _shown()
    if chosen is None or not chosen.strip()[:1].isdigit() or not shown:
        return {}  # all of them, none, or chosen by names, which hold everywhere
    return {VISIBLE: ",".join(map(str, range(len(shown)))), KNOWN: ",".join(str(number) for number, _ in shown)}


def visible_places(chosen: str | None, uuids: Sequence[str]) -> list[int]:
    """Numbers of the GPUs that a process sees, in its order, among all GPUs with ``uuids``; None chooses all.

    As CUDA does, the list ends before its first entry that is no GPU, and one that names a GPU twice shows none. A
    part of a GPU (MIG) counts as the first one: CUDA shows a process one part, and the driver does not say whose it is.
    """
    if chosen is None:
        return list(range(len(uuids)))
    if chosen.strip().startswith("MIG-"):
        return [0] if uuids else []
    numbers: list[int] = []
    for entry in map(str.strip, chosen.split(",")):
        if names_uuids(chosen):  # the one GPU whose UUID begins with the entry
            fitting = [i for i, uuid in enumerate(uuids) if entry.startswith("GPU-") and uuid.startswith(entry)]
        else:  # the number that the entry begins with, whatever follows it
            digits = re.match(r"\+?[0-9]+", entry)
            fitting = [int(digits.group())] if digits and int(digits.group()) < len(uuids) else []
        if len(fitting) != 1:
            break
        if fitting[0] in numbers:
            return []
        numbers += fitting
    return numbers


def names_uuids(chosen: str | None) -> bool:
    """True if GPUs are chosen by their UUIDs."""
    return chosen is not None and chosen.strip().startswith("GPU-")


def _shown() -> list[tuple[int, Gpu]]:
    """The GPUs that CUDA shows, with their numbers among all of the host.

    All are in the order of the bus, which is that of CUDA where they are alike. They come from the driver's files, or
    from its library on hosts without such files (some containers). The files may lack the UUID of a GPU that is not in
    use.
    """
    chosen, gpus = os.environ.get(KNOWN, os.environ.get(VISIBLE)), _in_files()
    if not gpus or (names_uuids(chosen) and any(not gpu.uuid for gpu in gpus)):
        gpus = [gpu for gpu, _ in _in_driver()] or gpus
    return [(number, gpus[number]) for number in visible_places(chosen, [gpu.uuid for gpu in gpus])]


def _in_files() -> list[Gpu]:
    gpus = []
    for card in sorted(FILES.glob("*/information")):
        try:
            text = card.read_text(encoding="utf-8")
        except OSError:
            continue
        name = re.search(r"^Model:\s*(.+)$", text, flags=re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9A-Fa-f-]+)\s*$", text, flags=re.MULTILINE)
        if name:
            gpus.append(Gpu(name.group(1).strip(), uuid.group(1) if uuid else ""))
    return gpus


# ---- The driver's library


class _Process(ctypes.Structure):
    """``nvmlProcessInfo_t``."""

    _fields_ = (
        ("pid", ctypes.c_uint), ("bytes", ctypes.c_ulonglong), ("instance", ctypes.c_uint), ("part", ctypes.c_uint)
    )  # fmt: skip


def nvml() -> Any:
    """The driver's library, initialised; an OSError without a driver that answers."""
    driver = ctypes.CDLL(NVML)
    code = driver.nvmlInit_v2()
    if code:
        raise OSError(f"nvmlInit_v2 answered {code}")
    return driver


def _in_driver() -> list[tuple[Gpu, ctypes.c_void_p]]:
    """All GPUs with the driver's handles; empty if the driver does not answer for one of them."""
    try:
        driver, count, gpus = nvml(), ctypes.c_uint(), []
    except OSError:
        return []
    if driver.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device, texts = ctypes.c_void_p(), []
        if driver.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
            return []
        for function in (driver.nvmlDeviceGetName, driver.nvmlDeviceGetUUID):
            text = ctypes.create_string_buffer(TEXT_BYTES)
            failed = function(device, text, ctypes.c_uint(TEXT_BYTES))
            texts.append("" if failed else text.value.decode(errors="replace"))
        if not texts[0]:
            return []
        gpus.append((Gpu(*texts), device))
    return gpus


def process_bytes(uuid: str, pid: int | None = None) -> int | None:
    """Bytes of the GPU with ``uuid`` that a process (None: this one) holds; None if the driver does not say."""
    device = next((device for gpu, device in _in_driver() if gpu.uuid == uuid), None)
    if device is None:
        return None
    count, processes = ctypes.c_uint(MOST_PROCESSES), (_Process * MOST_PROCESSES)()
    try:
        failed = nvml().nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), processes)
    except (AttributeError, OSError):  # a driver older than 510
        return None
    sizes = [entry.bytes for entry in processes[: count.value] if entry.pid == (pid or os.getpid())]
    return None if failed or not sizes or sizes[0] in (0, NOT_AVAILABLE) else int(sizes[0])


def busy_share(uuid: str) -> float | None:
    """How busy the GPU with ``uuid`` was over the last moments, from 0 to 1; None if the driver does not say."""
    device = next((device for gpu, device in _in_driver() if gpu.uuid == uuid), None)
    rates = (ctypes.c_uint * 2)()  # of its processors and of its memory, in percent
    return None if device is None or nvml().nvmlDeviceGetUtilizationRates(device, rates) else rates[0] / 100
