"""A session in a process of its own, which takes requests through a pipe."""

from __future__ import annotations

import json
from pathlib import Path

from tests.graphs_for_tests import tiny_graph
from tests.stacks import best_tensors, start, tasks_of
from weft.core.run_options import RunOptions
from weft.core.sweep import Sweep
from weft.engine.driver import Driver
from weft.engine.events import SweepEvents
from weft.engine.folder import RunFolder
from weft.engine.session import Session, members_of
from weft.runtime.checkpoint import read_checkpoint

MEMBERS = [{"name": "a", "epochs": 20}, {"name": "b", "lr": 0.03}, {"name": "c", "seed": 1}]


def make_session(folder: Path | None = None, told=lambda event: None, period=None, **options) -> Session:
    """Three members, one of them with fewer epochs, saved into ``folder``; ``told``: is given the events."""
    graph = tiny_graph()
    tasks = tasks_of(graph, [{"epochs": 60, **member} for member in MEMBERS], dropout=0.5, norm="batch")
    group, events = start(tasks, graph), SweepEvents(Sweep.from_tasks(tasks), told)
    save = None
    if folder is not None:
        folder.mkdir(exist_ok=True)
        save = lambda group, about: RunFolder(folder).save_state("1", group, about)  # noqa: E731
    return Session(group, Driver(members_of(group), RunOptions(**options), period=period), events, save)


def outcome(session: Session) -> dict:
    """Histories, statuses and best weights of all members, as JSON can hold them without rounding."""
    return {
        track.name: {
            "status": track.status,
            "rows": [[value.hex() for value in row] for row in track.rows],
            "best": {name: t.flatten().tolist() for name, t in best_tensors(session.group, index).items()},
        }
        for index, track in enumerate(session.members)
    }


def work(pipe, folder: str, resume: bool) -> None:
    """Send how far it is, act on the requests that come back, until one of them ends it; then send what came of it."""
    session = make_session(Path(folder), period=8)
    if resume:
        checkpoint = read_checkpoint(Path(folder))
        session.resume(checkpoint.tensors, checkpoint.about)
    while not session.finished:
        progress = session.advance()
        pipe.send(session.group.epoch)
        decision = session._driver.decide(progress, pipe.recv())
        session.apply(decision)
        pipe.send(decision)
    pipe.send_bytes(json.dumps(outcome(session)).encode())
