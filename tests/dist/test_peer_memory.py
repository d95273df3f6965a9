"""The memory that ranks read each other's rows from: chosen by device, or asked for, or refused in a sentence."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.core.errors import InputError, SpecError
from weft.dist import launch
from weft.dist.launch import start_ranks
from weft.dist.peer_memory import CudaIpc, SharedFiles, Symmetric, has_nvshmem, peer_memory_for

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def memory(device=GPU, distinct=True, peers="auto"):
    return peer_memory_for(0, 2, device, distinct, lambda mine: [mine, mine], peers)


def test_the_device_decides():
    assert isinstance(memory(CPU, distinct=False), SharedFiles)
    assert isinstance(memory(distinct=False), CudaIpc)
    assert isinstance(memory(), Symmetric)


def test_what_was_asked_for_is_what_there_is():
    assert isinstance(memory(peers="ipc"), CudaIpc)
    assert isinstance(memory(distinct=False, peers="ipc"), CudaIpc)
    assert memory(peers="symmetric").backend == "CUDA"


@pytest.mark.skipif(has_nvshmem(), reason="this torch has NVSHMEM")
def test_without_nvshmem_it_is_refused():
    with pytest.raises(InputError, match="has no NVSHMEM here"):
        memory(peers="nvshmem")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"peers": "rdma"}, "peers='rdma' must be one of auto, ipc, symmetric, nvshmem"),
        ({"peers": "nvshmem", "distinct": False}, "needs a GPU per rank"),
        ({"peers": "symmetric", "distinct": False}, "needs a GPU per rank"),
        ({"peers": "ipc", "device": CPU}, "ranks on a CPU share files in memory"),
    ],
)
def test_refused(given, message):
    with pytest.raises(SpecError, match=message):
        memory(**given)


def test_a_run_is_refused_before_it_starts():
    task = weft.Task(graph="demo", model="gcn", epochs=1)
    with pytest.raises(SpecError, match="of use over several ranks only"):
        weft.run(task, options=weft.RunOptions(peers="nvshmem"), device="cpu", progress=False)
    with pytest.raises(SpecError, match="ranks on a CPU"):
        weft.run(task, options=weft.RunOptions(peers="nvshmem"), ranks=2, device="cpu", progress=False)
    with pytest.raises(SpecError, match="must be one of"), start_ranks(2, CPU, print, peers="rdma"):
        pass


class ClosedByAll:
    """Memory that is given back once every rank has come to do so, as that of CUDA is."""

    def __init__(self, ranks):
        self._ranks = ranks

    def close(self, together):
        assert together
        assert self._ranks.gather_objects(self._ranks.rank) == [0, 1, 2]


def use_memory_that_all_close(ranks):
    ranks.__dict__["memory"] = ClosedByAll(ranks)


def test_ranks_give_memory_back_before_one_waits_for_the_others_to_end(monkeypatch):
    monkeypatch.setattr(launch, "JOIN_SECONDS", 1.0)  # rank 0 gives up on the others after twelve of them
    with start_ranks(3, CPU, use_memory_that_all_close, timeout=60) as here:
        use_memory_that_all_close(here)
