"""Tasks and devices for scheduler tests: short ways to write them, and hypothesis strategies."""

from __future__ import annotations

from hypothesis import strategies as st

from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.task_queue import TaskQueue

GIB = 1 << 30


def device(budget=26 * GIB, workers=2, name="cuda:0", **more) -> DeviceState:
    """One device."""
    return DeviceState(name, budget, workers=workers, **more)


def task(name, size=1, seconds=10.0, **more) -> QueuedTask:
    """A task of ``size`` GiB."""
    return QueuedTask(id=name, bytes=int(size * GIB), seconds=seconds, **more)


class CountingQueue(TaskQueue):
    """Counts how many tasks a policy reads."""

    reads = 0

    def __getitem__(self, name):
        self.reads += 1
        return super().__getitem__(name)


@st.composite
def queues(draw, most=14):
    """Up to ``most`` tasks of all kinds, of which some never fit in 26 GiB; dependencies name earlier tasks.

    Some trainings are sharded over two or more ranks.
    """
    tasks = []
    for number in range(draw(st.integers(1, most))):
        size = draw(st.integers(0, 28 * GIB))
        kind = draw(st.sampled_from(["training", "training", "training", "inference"]))
        earlier = [one.id for one in tasks]
        seconds = draw(st.floats(0.0, 1000.0))
        tasks.append(
            QueuedTask(
                id=f"t{number}",
                bytes=size,
                seconds=seconds,
                start_seconds=seconds * draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
                graph=draw(st.sampled_from(["cora", "pubmed"])),
                join_key=draw(st.sampled_from(["", "a", "b"])) if kind == "training" else "",
                fusable=draw(st.booleans()),
                shared_bytes=draw(st.integers(0, size)),
                utilisation=draw(st.floats(0.0, 1.0)),
                arrival=draw(st.sampled_from([0.0, 0.0, 5.0, 700.0])),
                user=draw(st.sampled_from(["ann", "bob"])),
                priority=draw(st.integers(0, 2)),
                deadline=draw(st.none() | st.floats(0.0, 2000.0)),
                after=tuple(draw(st.lists(st.sampled_from(earlier), max_size=2))) if earlier else (),
                kind=kind,
                latency_target=draw(st.floats(0.1, 100.0)) if kind == "inference" else None,
                attempts=draw(st.integers(0, 1)),
                turn_seconds=draw(st.sampled_from([0.0, 1e-6, 1e-3])),
                ranks=draw(st.sampled_from([1, 1, 1, 2, 3, 5])) if kind == "training" else 1,
            )
        )
    return tasks


KINDS = [(26, 1, 0), (26, 2, 0), (26, 4, 0), (12, 2, 0), (26, 2, 1), (12, 4, 2)]  # GiB, workers, kept for inference
machines = st.lists(st.sampled_from(KINDS), min_size=1, max_size=3).map(
    lambda kinds: tuple(
        device(size * GIB, workers, f"cuda:{place}", inference_workers=kept)
        for place, (size, workers, kept) in enumerate(kinds)
    )
)
