"""Torch's symmetric memory behind the interface of peer memory. One GPU has one rank of it: ranks must be distinct."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import weft
from weft.dist.peer_memory import has_nvshmem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ONE_RANK = """
import sys, tempfile, torch, torch.distributed as dist
from weft.dist.peer_memory import Symmetric, peer_memory_for

device = torch.device("cuda", 0)
torch.cuda.set_device(device)
store = dist.FileStore(tempfile.mktemp(), 1)
dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
memory = peer_memory_for(0, 1, device, distinct=True, gather=lambda mine: [mine], peers=sys.argv[1])
assert isinstance(memory, Symmetric)
for size in (1000, 100_000):  # it grows
    memory.reserve(size)
    first, second = memory.slot(0, 0), memory.slot(0, 1)
    assert first.numel() >= size and first.data_ptr() != second.data_ptr()
    first.fill_(3)
    second.fill_(5)
    assert int(first.float().mean()) == 3 and int(second.float().mean()) == 5
memory.close(together=True)
dist.destroy_process_group()
print("fine")
"""


@pytest.mark.parametrize("peers", ["auto", "symmetric", "nvshmem"])
def test_slots_of_one_rank(peers):
    if peers == "nvshmem" and not has_nvshmem():
        pytest.skip("this torch has no NVSHMEM")
    script = [sys.executable, "-c", ONE_RANK, peers]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert "fine" in done.stdout, done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs: NVSHMEM has one rank per GPU")
@pytest.mark.parametrize("peers", ["symmetric", "nvshmem"])
def test_two_gpus_train_as_one(peers):
    """Losses over two GPUs are those of one, whichever memory the ranks read."""
    if peers == "nvshmem" and not has_nvshmem():
        pytest.skip("this torch has no NVSHMEM")
    task = weft.Task(graph="demo", model="gcn", hidden=16, epochs=5, seed=1)
    one = weft.run(task, device="cuda:0", progress=False)
    two = weft.run(task, device="cuda", ranks=2, options=weft.RunOptions(peers=peers), progress=False)
    assert two.history["loss"] == pytest.approx(one.history["loss"], rel=1e-4)
