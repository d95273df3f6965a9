"""Which machine a plan is for: a name, a file, or the one at hand, without starting CUDA."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import torch

from weft.core.errors import SpecError
from weft.core.machine import Machine
from weft.engine.home import CALIBRATION, PROBE, THROUGHPUT, gpu_names, machine_folder, machine_name
from weft.engine.probe import cpu_count, host_bytes
from weft.engine.result import write_text
from weft.plan.calibration import Calibration
from weft.plan.profiles import PROFILES, closest_profile, profile
from weft.plan.throughput import Throughput

Given = Machine | str | os.PathLike[str] | None


def find_machine(given: Given = None) -> Machine:
    """The machine that ``given`` is or names: a profile or a file; None is the one at hand."""
    if isinstance(given, Machine):
        return given
    if given is None:
        return this_machine()
    text = os.fspath(given)
    if text.lower() in PROFILES:
        return profile(text)
    path = Path(text).expanduser()
    if path.is_file():
        return read_machine(path)
    if path.suffix == ".json" or os.sep in text:
        raise SpecError(f"machine {text!r}: no such file; `weft probe --out FILE` writes one")
    return profile(text)


def read_machine(path: Path) -> Machine:
    """The machine in a file that ``weft probe`` wrote."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"machine {str(path)!r}: cannot be read ({error})") from None
    return Machine.from_json(text, str(path))


def this_machine() -> Machine:
    """The machine at hand: as probed, else the profile of its GPU, else the CPU profile with this host's memory."""
    gpus = gpu_names() if torch.backends.cuda.is_built() else []
    kept = probe_file(gpus[0] if gpus else "cpu")
    if kept.is_file():
        return read_machine(kept)
    if gpus:
        known = closest_profile(gpus[0])
        if known is None:
            raise SpecError(f"nothing is known of the GPU {gpus[0]!r}; run `weft probe` once, or give --machine")
        return replace(known, cores=cpu_count(), host_bytes=host_bytes())
    memory = host_bytes()
    return replace(profile("cpu"), memory_bytes=memory, host_bytes=memory, cores=cpu_count())


def probe_file(device: str) -> Path:
    """Where the probe of this host with ``device`` is kept."""
    return machine_folder(machine_name(device)) / PROBE


def keep_probe(machine: Machine) -> Path:
    """Keep ``machine`` as what is known of this host with its device."""
    return _keep(machine_folder(machine.name) / PROBE, machine.to_json())


def load_calibration(machine: Machine) -> Calibration | None:
    """What earlier runs on ``machine`` taught; None where there were none, or none that can be read."""
    path = machine_folder(machine.name) / CALIBRATION
    try:
        found = Calibration.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return found if found.known else None


def keep_calibration(machine: Machine, calibration: Calibration) -> Path:
    """Keep what runs on ``machine`` taught."""
    text = json.dumps(calibration.to_dict(), indent=1, allow_nan=False) + "\n"
    return _keep(machine_folder(machine.name) / CALIBRATION, text)


def load_throughput(machine: Machine) -> Throughput | None:
    """The group sizes that were measured on ``machine``; None where there are none."""
    try:
        text = (machine_folder(machine.name) / THROUGHPUT).read_text(encoding="utf-8")
        return Throughput.from_dict(json.loads(text))
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _keep(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise SpecError(f"cannot keep {path}: {error.strerror}; WEFT_HOME names another folder") from None
    return path
