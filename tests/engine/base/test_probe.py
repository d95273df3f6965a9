"""The probe measures something plausible on a CPU, and leaves everything as it was."""

from __future__ import annotations

import pytest
import torch

from weft.core.machine import Machine
from weft.engine import probe
from weft.engine.home import home, machine_folder, machine_name
from weft.engine.machine import keep_probe, machine_with
from weft.planner.machine_profiles import profile

CPU = torch.device("cpu")


SMALL = probe.Sizes(1 << 20, 1 << 18, 1 << 16, (256, 64), 0.005)


@pytest.fixture(scope="module")
def machine():
    """This machine with its CPU, measured once with tables of a few hundred KiB."""
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    found = probe.probe(CPU, SMALL)
    assert torch.get_float32_matmul_precision() == precision
    assert torch.get_num_threads() == threads
    return found


def test_it_is_a_machine_that_a_file_can_hold(machine):
    assert Machine.from_json(machine.to_json(), "file") == machine
    assert machine.measured
    assert machine.device == "cpu"
    assert machine.name == machine_name("cpu")


def test_rates_are_rates(machine):
    assert 1e7 < machine.copy_bandwidth < 1e13
    assert [width for width, _ in machine.gather] == [64, 256, 1024]
    assert all(1e6 < rate < 1e13 for _, rate in (*machine.gather, *machine.l2_gather))
    assert all(rate > 1e6 for rate in machine.flops.values())
    assert 1e-7 < machine.op_seconds < 1e-2
    assert machine.op_seconds < machine.custom_op_seconds < 1e-1
    assert 0 < machine.host.one_thread <= 1


def test_what_there_is(machine):
    assert machine.memory_bytes == machine.host.memory_bytes > 1 << 28
    assert machine.host.cores >= 1
    assert machine.l2_bytes >= 1 << 18


def test_the_host_and_its_disk_are_measured(machine):
    machine.host.require_rates()
    assert machine.devices == ()
    (disk,) = machine.links
    assert (disk.kind, disk.origin, disk.target) == ("disk", "disk", "host")
    assert 1e5 < disk.bytes_per_second < 1e12
    assert 0 < disk.latency < 10


def test_a_folder_that_cannot_be_written_to_has_no_disk(monkeypatch):
    def refuse(*_):
        raise OSError("read-only")

    monkeypatch.setattr(probe, "disk_rate", refuse)
    assert probe.probe(CPU, SMALL).links == ()


def test_a_gpu_is_measured_together_with_its_host(monkeypatch, machine, tmp_path):
    known = profile("a100-40g")
    monkeypatch.setattr(probe, "_probe_gpu", lambda device: (known.devices[0], known.links[:2]))
    monkeypatch.setattr(probe, "machine_of", lambda device: machine_name("A100"))
    monkeypatch.setattr(probe, "disk_rate", lambda *_: (1e9, 1e-4))
    found = probe.probe(torch.device("cuda", 0), SMALL)
    assert found.device == "cuda"
    assert (found.host.cores, found.host.memory_bytes) == (machine.host.cores, machine.host.memory_bytes)
    assert [link.kind for link in found.links] == ["pcie", "pcie", "disk"]
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    keep_probe(found)
    assert machine_with(CPU) == found.host_only(machine_name("cpu"))  # what a run on the CPU then knows


def test_the_clock_takes_the_quiet_runs():
    waits = iter([0.0, 0.003, 0.001, 0.001, 0.001, 0.05] + [0.001] * 1000)

    def call():
        end = probe.time.perf_counter() + next(waits)
        while probe.time.perf_counter() < end:
            pass

    assert probe.seconds_of(call, CPU, budget=0.02) == pytest.approx(0.001, rel=0.5)


def test_where_things_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("WEFT_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert home() == tmp_path / "cache" / "weft"
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "own"))
    assert machine_folder("Lab 1, NVIDIA H200") == tmp_path / "own" / "machines" / "lab-1-nvidia-h200"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu():
    found = probe.probe(torch.device("cuda"))
    assert found.device == "cuda"
    assert found.copy_bandwidth > 5e10
    assert found.gather_rate(256, cached=True) > found.gather_rate(256, cached=False)
    assert 0 < found.replay_seconds < 1e-3  # which of the two is longer depends on what else the machine does
    assert 0 < found.launch_seconds < 1e-3
    assert found.bus_bandwidth("host", "gpu:0") > 1e9
    assert 0 < found.context_bytes < found.memory_bytes // 4
    assert found.sms > 0
