"""Room on the host where memory is short: a temporary file, or a sentence before the first epoch."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import weft
from weft.batches import placement as rooms
from weft.batches.placement import fits_host, free_disk_bytes, host_room, is_mapped
from weft.core.errors import DoesNotFitError, OutOfMemoryError
from weft.core.placement import DataPlacement
from weft.graph.generate import citation

from .test_placement import losses, run_of

LAYERS = DataPlacement("host", "host", evaluation="layers", chunk_edges=100)


@pytest.fixture
def graph():
    return citation(num_nodes=400, num_edges=3000, num_features=12, num_classes=4, seed=1)


@pytest.fixture
def short(monkeypatch, tmp_path):
    """No memory is free; temporary files have a folder of their own."""
    monkeypatch.setattr(rooms, "free_host_bytes", lambda: 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        rooms, "free_disk_bytes", lambda: shutil.disk_usage(tmp_path).free
    )  # though it may be in memory
    return tmp_path


def test_there_is_memory():
    found = host_room((3, 5), torch.bfloat16, False, "it")
    assert (found.shape, found.dtype) == ((3, 5), torch.bfloat16)
    assert not is_mapped(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_takes_what_memory_has_no_room_for(short, dtype):
    found = host_room((1000, 3, 7), dtype, False, "it")
    assert list(short.iterdir()) == [], "its name is gone: nothing is left behind, whatever happens"
    found[:] = torch.arange(21_000).reshape(1000, 3, 7) % 251
    assert torch.equal(found[-1].flatten().float(), torch.arange(20_979, 21_000).remainder(251).float())


def test_an_evaluation_has_the_same_bits_from_a_file(graph, short):
    expected = run_of(graph, DataPlacement("host", "host"))
    spilled = run_of(graph, LAYERS)
    assert losses(spilled) == losses(expected)
    assert [row[2:] for row in spilled.poll(0)[0].rows] == [row[2:] for row in expected.poll(0)[0].rows]
    assert all(map(is_mapped, spilled.stacks[0].source._layers._rooms.values()))


def test_neither_memory_nor_disk(short, monkeypatch):
    monkeypatch.setattr(rooms, "free_disk_bytes", lambda: 1 << 20)
    assert not fits_host([1 << 21])
    with pytest.raises(OutOfMemoryError, match=r"^it takes 4.00 MiB, but the host has 0 B of memory free .* TMPDIR"):
        host_room((1 << 20,), torch.float32, False, "it")


def test_what_is_said_to_fit_fits_one_array_after_another(monkeypatch):
    monkeypatch.setattr(rooms, "free_host_bytes", lambda: 60)
    monkeypatch.setattr(rooms, "host_bytes", lambda: 100)  # of which ten stay free
    monkeypatch.setattr(rooms, "free_disk_bytes", lambda: 100)
    assert fits_host([50, 90])
    assert fits_host([90, 50])
    assert not fits_host([100]), "no array is in memory and on disk"
    assert not fits_host([50, 60, 60])


def test_a_file_that_cannot_be_made_is_one_sentence(short, monkeypatch):
    def full(*about):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rooms.os, "posix_fallocate", full)
    with pytest.raises(OutOfMemoryError, match=r"it takes 4\.00 MiB"):
        host_room((1 << 20,), torch.float32, False, "it")
    assert list(short.iterdir()) == []


def test_it_is_told_before_the_first_epoch(graph, monkeypatch):
    monkeypatch.setattr("weft.engine.run_planner.fits_host", lambda sizes: False)
    monkeypatch.setattr("weft.engine.run_planner.is_small", lambda *about: False)
    task = weft.Task(graph=graph, model="sage", mode="sampled", batch=32, epochs=2)
    monkeypatch.setattr("weft.planner.placement.on_device", lambda kind: LAYERS)
    with pytest.raises(DoesNotFitError, match="what an evaluation keeps on the host between layers takes"):
        weft.run(task, device="cpu", progress=False)


def test_a_folder_in_memory_is_no_disk(monkeypatch, tmp_path):
    mounts = f"disk / ext4 rw\nshm {tmp_path} tmpfs rw\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **how: mounts)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert free_disk_bytes() == 0
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path.parent))
    assert free_disk_bytes() > 0
