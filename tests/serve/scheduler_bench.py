"""A scheduler over a queue whose workers do nothing: what is started, and what each worker is told."""

from __future__ import annotations

import time

from tests.serve.direct_queue import DirectQueue
from tests.serve.serving import TASK
from weft.serve.groups import Groups
from weft.serve.options import ServeOptions
from weft.serve.queue_db import Group, Submission, transaction
from weft.serve.state import SupervisorState, queued_task
from weft.serve.supervisor import Scheduler
from weft.serve.worker_pool import WorkerPool

GIB, MIB = 1 << 30, 1 << 20
PLAN = {"bytes": 10 * MIB, "seconds": 100.0, "utilisation": 0.2}


class FakeWorker:
    """Takes groups and keeps what it is sent."""

    end_reason, fetched, ready, renewed, pid, bytes = "", None, False, False, 1, 0

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device, self.group = name, device, ""
        self.sent: list[dict] = []

    @property
    def idle(self) -> bool:
        return not self.group

    def send(self, do: str, **data) -> None:
        self.sent.append({"do": do, **data})


class Bench:
    """A scheduler over a queue, whose workers do nothing."""

    def __init__(self, folder, devices=("cpu",), workers=1, **more) -> None:
        settings = {"devices": devices, "workers": workers, "reserved": 0, "budget": GIB, **more}
        self.state = SupervisorState(ServeOptions(folder / "queue.db", **settings))
        self.db = self.state.db = DirectQueue(folder / "queue.db")
        self.pool = WorkerPool(self.state)
        for device in devices:
            for place in range(workers):
                worker = FakeWorker(f"{device}/{place}", device)
                self.pool.workers[worker.name] = worker
                self.pool.ready(worker, {"room": 8 * GIB, "beside": 0})
        self.groups = Groups(self.state, self.pool)
        self.scheduler = Scheduler(self.state, self.pool, self.groups)

    def planned(self, count=1, plan=PLAN, graph_path=None, **more) -> list[str]:
        """Tasks that wait; their ids."""
        path = {} if graph_path is None else {"graph_path": graph_path}
        specs = [{"task": {**TASK, "seed": time.time_ns() + place}, **path} for place in range(count)]
        names = [task.id for task in self.db.submit_many([Submission(spec, **more) for spec in specs])]
        self.db.plan_many([(name, plan) for name in names])
        return names

    def preempted(self, count=2, device="cpu", size=100 * MIB, **more) -> tuple[Group, list[str]]:
        """A group that was preempted, as the server before has left it; and its members."""
        names = self.planned(count, **more)
        name = f"{time.time_ns():012x}"[-12:]
        group = Group(name, device, "cpu/0", tuple(names), f"group-{name}", size, 100.0, "", 1.0)
        self.db.claim_all(names, "somebody", 30.0, group)
        for member in names:
            self.state.shares.started(queued_task(self.db.get(member)), time.time())
            self.db.release(member, "preempted")
        self.db.plan_many([(member, self.db.get(member).plan) for member in names])
        self.db.end_group(name, "preempted")
        self.state.resumable = {one.id: one for one in self.db.groups("preempted")}
        return group, names

    def forget(self, name: str) -> None:
        """Delete a task, as files have it that an older server has cleaned up."""
        with transaction(self.db.connection) as db:
            db.execute("DELETE FROM tasks WHERE id = ?", (name,))

    def states(self, names) -> list[str]:
        return [self.db.get(name).state for name in names]

    def notes(self, name: str) -> str:
        return " ".join(e.data["message"] for e in self.db.events(task=name) if e.kind == "note")

    def group_state(self, group: Group) -> str:
        return next(one.state for one in self.db.groups() if one.id == group.id)
