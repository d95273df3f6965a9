"""Find the machine of a plan or a run, with its probe and calibration.

A plan is for a name, a file, or the machine at hand, found without starting CUDA; a run is for the device it trains on.
The machine at hand has one name, whether it was probed or not; under it are kept its probe and what runs taught of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weft.core.errors import SpecError
from weft.core.gpus import check_device_name, gpu_names
from weft.core.host_memory import cpu_count, host_bytes
from weft.core.keyed_store import KeyedStore
from weft.core.machine import Host, Machine
from weft.core.version import __version__
from weft.engine.home import CALIBRATION, PROBE, machine_folder, machine_name
from weft.planner.cost.calibration import Calibration
from weft.planner.machine_profiles import PROFILES, DataSheet, assumed_host, closest_profile, profile

# ---- The host as the system reports it: cores, memory and cache.

MIB = 2**20
CPU_CACHE = 8 * MIB  # where the system does not report it


def cpu_cache_bytes() -> int:
    """Bytes of the last cache before memory, as Linux reports them."""
    sizes = []
    for level in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = level.read_text(encoding="utf-8").strip()
        sizes.append(int(text[:-1]) * {"K": 1024, "M": MIB}.get(text[-1], 1) if text[-1:].isalpha() else int(text))
    return max(sizes, default=CPU_CACHE)


# ---- Choose the device of a run, and describe its environment.


def choose_device(device: str | torch.device = "auto") -> torch.device:
    """``"auto"`` is the GPU if there is one; ``"cpu"``, ``"cuda"`` and ``"cuda:1"`` are what they say."""
    if str(device) == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    check_device_name(str(device))
    device = torch.device(device)
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise SpecError(f"device {str(device)!r}: torch finds no CUDA device here; use auto or cpu")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise SpecError(f"device 'cuda:{index}': there are {torch.cuda.device_count()} CUDA devices here")
    return torch.device("cuda", index)


def device_name(device: torch.device) -> str:
    """The device in words: the GPU's name, or the processor and the threads torch uses of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads)"


def machine_of(device: torch.device) -> str:
    """The name of this host with ``device`` in the home folder (``weft.engine.home``)."""
    return machine_name(torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")


def environment(device: torch.device) -> dict[str, Any]:
    """Versions and device, to reproduce a number."""
    return {
        "weft": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": platform.system(),
        "device": device_name(device),
        **({"cuda": torch.version.cuda} if device.type == "cuda" else {}),
    }


Given = Machine | str | os.PathLike[str] | None

FP32_LANES = 128  # of a multiprocessor; 64 on older ones
NO_RATES = ("name", "sources", "memory_bytes", "context_bytes", "workspace_bytes")  # of the trainer


def find_machine(machine: Given = None) -> Machine:
    """The machine itself, or the one of a profile or file that ``machine`` names.

    None is the one at hand: as probed, else the profile of its GPU, else the CPU profile with this host's memory.
    """
    if isinstance(machine, Machine):
        return machine
    if machine is None:
        gpus = gpu_names() if torch.backends.cuda.is_built() else []
        name = machine_name(gpus[0] if gpus else "cpu")
        here = _probed(name) or _by_profile(name, gpus[0] if gpus else "")
        if here is None:
            raise SpecError(f"nothing is known of the GPU {gpus[0]!r}; run `weft probe` once, or give --machine")
        return here
    if not isinstance(machine, (str, os.PathLike)):
        raise SpecError(f"machine={machine!r} must be a name such as 'h200', a file of `weft probe`, or a weft.Machine")
    text = os.fspath(machine)
    path = Path(text).expanduser()
    if text.lower() not in PROFILES and path.is_file():
        return read_machine(path)
    if text.lower() not in PROFILES and (path.suffix == ".json" or os.sep in text):
        raise SpecError(f"machine {text!r}: no such file; `weft probe --out FILE` writes one")
    return profile(text)


def read_machine(path: Path) -> Machine:
    """The machine in a file that ``weft probe`` wrote."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"machine {str(path)!r}: cannot be read ({error})") from None
    return Machine.from_json(text, str(path))


def machine_with(device: torch.device) -> Machine:
    """This host with ``device`` to train on: as probed, else by its GPU's profile, else by its properties."""
    name = machine_of(device)
    with suppress(SpecError):  # `weft plan` complains of a damaged file; a run does without
        probed = _probed(name)
        if probed is not None and probed.device == device.type:
            return probed
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    machine = _by_profile(name, gpu)
    if machine is not None:
        return machine
    # A GPU without a profile: its own properties, and rates scaled from a known GPU's.
    properties = torch.cuda.get_device_properties(device)
    ghz = getattr(properties, "clock_rate", 1.5e6) / 1e6
    width, clock = getattr(properties, "memory_bus_width", 384), getattr(properties, "memory_clock_rate", 8e6)
    fp32 = properties.multi_processor_count * ghz * 1e9 * 2 * FP32_LANES
    tensor_cores = properties.major >= 8
    sheet = DataSheet(
        name,
        memory=properties.total_memory,
        bandwidth=2 * clock * 1e3 * width / 8,
        l2=int(getattr(properties, "L2_cache_size", 0)) or 8 * MIB,
        sms=properties.multi_processor_count,
        ghz=ghz,
        flops=(fp32, 2 * fp32 if tensor_cores else fp32, 4 * fp32 if tensor_cores else fp32),
        pcie=13e9,
        source="as the device reports; `weft probe` measures it",
    )
    return sheet.machine(_this_host())


def _probed(name: str) -> Machine | None:
    file = machine_folder(name) / PROBE
    return read_machine(file) if file.is_file() else None


def _by_profile(name: str, gpu: str) -> Machine | None:
    """By the profile of ``gpu`` ("": of a CPU), with the cores and memory of this host; None without a profile."""
    if not gpu:
        return replace(profile("cpu"), name=name).with_host(memory_bytes=host_bytes(), cores=cpu_count())
    closest = closest_profile(gpu)
    return None if closest is None else replace(closest, name=name, host=_this_host())


def _this_host() -> Host:
    """This host as probed, else with its own cores and memory and assumed rates."""
    with suppress(SpecError):
        probed = _probed(machine_name("cpu"))
        if probed is not None:
            return probed.host
    return assumed_host(cpu_count(), host_bytes(), "what the system says")


def keep_probe(machine: Machine) -> Path:
    """Keep the probe of this host with its device; of one with a GPU, also the host by itself."""
    if machine.devices and machine.host.flops:
        keep_probe(machine.host_only(machine_name("cpu")))
    return _keep(KeyedStore(machine_folder(machine.name)), PROBE, machine.to_dict())


def load_calibration(machine: Machine) -> Calibration | None:
    """The calibration by earlier runs on ``machine``; None if there were none, or none that can be read."""
    calibration = _calibrations(machine).read(CALIBRATION, Calibration.from_dict)
    return calibration if calibration is not None and (calibration.observations or calibration.phases) else None


def update_calibration(machine: Machine, change: Callable[[Calibration], Calibration]) -> Calibration:
    """Change the calibration of ``machine`` and keep it; other processes wait."""
    store = _calibrations(machine)
    with store.lock(CALIBRATION):
        calibration = change(load_calibration(machine) or Calibration())
        _keep(store, CALIBRATION, calibration.to_dict())
    return calibration


def _calibrations(machine: Machine) -> KeyedStore:
    """Factors say by how much predictions were off, so they hold only for predictions made from the same rates."""
    return KeyedStore(machine_folder(machine.name), basis_of(machine))


def basis_of(machine: Machine) -> str:
    """What predictions for ``machine`` are made from: a digest of its rates, and the version that uses them."""
    rates = {**machine.primary.to_dict(), "cores": machine.host.cores, "one_thread": machine.host.one_thread}
    rates = {key: value for key, value in rates.items() if key not in NO_RATES}
    digest = hashlib.sha256(json.dumps(rates, sort_keys=True).encode()).hexdigest()
    return f"weft {__version__}, rates {digest[:16]}"


def _keep(store: KeyedStore, key: str, value: Any) -> Path:
    try:
        return store.write(key, value)
    except OSError as error:
        raise SpecError(f"cannot keep {store.folder / key}: {error.strerror}; WEFT_HOME names another folder") from None
