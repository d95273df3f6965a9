"""The thread in which a worker fetches graphs beside its training."""

from __future__ import annotations

import threading
import time
import weakref

import torch

from weft.graph.generate import citation
from weft.runtime.device import cuda_graph
from weft.serve import worker_memory as kept_graphs
from weft.serve.worker_memory import KeptGraphs

MIB = 1 << 20


def test_one_thread_fetches_all_graphs(tmp_path, monkeypatch):
    """A thread that ends takes what CUDA keeps of it along, beside whatever the main thread does."""
    kept, threads = KeptGraphs("cpu", 8 * MIB), []
    make = kept_graphs.Graphs.bring
    monkeypatch.setattr(
        kept_graphs.Graphs, "bring", lambda *given: threads.append(threading.current_thread()) or make(*given)
    )
    for name in ("a", "b"):
        citation(60, 240, 6, 3, seed=1).save(tmp_path / name)
        kept.fetch_next(str(tmp_path / name))
        until = time.monotonic() + 10
        while not kept.store.holds(str(tmp_path / name)):
            assert time.monotonic() < until
            time.sleep(0.005)
    assert len(threads) == 2
    assert threads[0] is threads[1] is not threading.current_thread()


def test_what_an_error_holds_is_let_go_before_the_next_capture(tmp_path, monkeypatch):
    """Memory of a device that it frees later would be freed beside a capture."""
    citation(60, 240, 6, 3, seed=1).save(tmp_path / "a")
    alive, held = [], []

    class Watched:
        """The lock of captures, which looks whether what was allocated is still there when it is given back."""

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            alive.extend(one() is not None for one in held)

    def fails(*_: object) -> None:
        array = torch.ones(8)
        held.append(weakref.ref(array))
        raise RuntimeError("the device does not answer")

    monkeypatch.setattr(cuda_graph, "_ONE_AT_A_TIME", Watched())
    monkeypatch.setattr(kept_graphs.Graphs, "bring", fails)
    kept = KeptGraphs("cpu", 8 * MIB)
    kept.fetch(str(tmp_path / "a"))
    assert held
    assert not alive[-1]
