"""The NVIDIA GPUs of this host that CUDA shows, found without starting CUDA: from the driver's files or its library."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import SpecError

# ---- Which of a host's GPUs CUDA shows to a process, as ``CUDA_VISIBLE_DEVICES`` says: by numbers or by UUIDs.

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


VISIBLE = "CUDA_VISIBLE_DEVICES"
KNOWN = "WEFT_KNOWN_DEVICES"  # numbers of the GPUs that a process is to know of, whatever CUDA shows it
FILES = Path("/proc/driver/nvidia/gpus")
NVML = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"  # comes with the driver
TEXT_BYTES = 96


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it; ``uuid`` is empty where the driver does not say."""

    name: str
    uuid: str


def gpu_names() -> list[str]:
    """Names of the GPUs that CUDA shows to this process, ``cuda:0`` first."""
    return [gpu.name for _, gpu in _shown()]


def without_gpus() -> Mapping[str, str]:
    """The environment of a process that CUDA shows no GPU; :func:`gpu_names` says there what it says here."""
    return {VISIBLE: "", KNOWN: _numbers(place for place, _ in _shown())}


def renumbered() -> Mapping[str, str]:
    """The environment of a process that numbers the GPUs shown here from 0; :func:`gpu_names` says there the same."""
    chosen, shown = os.environ.get(VISIBLE), _shown()
    if chosen is None or not chosen.strip()[:1].isdigit() or not shown:
        return {}  # all of them, none, or chosen by names, which hold everywhere
    return {VISIBLE: _numbers(range(len(shown))), KNOWN: _numbers(place for place, _ in shown)}


def _shown() -> list[tuple[int, Gpu]]:
    """The GPUs with their places among all of the host."""
    chosen = os.environ.get(KNOWN, os.environ.get(VISIBLE))
    found = _listed(names_uuids(chosen))
    return [(place, found[place]) for place in visible_places(chosen, [gpu.uuid for gpu in found])]


def _numbers(places: Iterable[int]) -> str:
    return ",".join(str(place) for place in places)


def _listed(with_uuids: bool) -> list[Gpu]:
    """All GPUs in the order of the bus, which is that of CUDA where they are alike.

    The files may lack the UUID of a GPU that is not in use.
    """
    found = _in_files()
    if found and not (with_uuids and any(not gpu.uuid for gpu in found)):
        return found
    return _by_library() or found


def _in_files() -> list[Gpu]:
    found = []
    for card in sorted(FILES.glob("*/information")):
        try:
            text = card.read_text(encoding="utf-8")
        except OSError:
            continue
        name = re.search(r"^Model:\s*(.+)$", text, flags=re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9A-Fa-f-]+)\s*$", text, flags=re.MULTILINE)
        if name:
            found.append(Gpu(name.group(1).strip(), uuid.group(1) if uuid else ""))
    return found


def _by_library() -> list[Gpu]:
    """The same from the driver's library, for hosts that have no such files (some containers)."""
    try:
        driver = ctypes.CDLL(NVML)
    except OSError:
        return []
    count, found = ctypes.c_uint(), []
    if driver.nvmlInit_v2() or driver.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    for index in range(count.value):
        device = ctypes.c_void_p()
        if driver.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
            return []
        name = _text(driver.nvmlDeviceGetName, device)
        if name is None:
            return []
        found.append(Gpu(name, _text(driver.nvmlDeviceGetUUID, device) or ""))
    return found


def _text(ask: ctypes._NamedFuncPointer, device: ctypes.c_void_p) -> str | None:
    """What a function of the driver says of ``device``; None if it fails."""
    text = ctypes.create_string_buffer(TEXT_BYTES)
    return None if ask(device, text, ctypes.c_uint(TEXT_BYTES)) else text.value.decode(errors="replace")


# ---- Names of devices that a run can be given: what is wrong with one, before torch is loaded.

_NAME = re.compile(r"auto|(cpu|cuda)(:[0-9]+)?")


def check_device_name(name: str) -> None:
    """Refuse what is no device at all; whether it is there is for torch to say."""
    if _NAME.fullmatch(name) is None:
        raise SpecError(f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N")
