"""A session in a process of its own, which trains what it is told through a pipe."""

from __future__ import annotations

import json
from pathlib import Path

from tests.graphs_for_tests import tiny_graph
from tests.stacks import best_tensors, start, tasks_of
from weft.core.decision import Decision, updates_to_json
from weft.core.sweep import Sweep
from weft.engine.events import SweepEvents
from weft.engine.folder import RunFolder
from weft.engine.session import Session, outline_of
from weft.runtime.checkpoint import read_checkpoint

MEMBERS = [{"name": "a", "epochs": 20}, {"name": "b", "lr": 0.03}, {"name": "c", "seed": 1}]


def make_session(folder: Path | None = None, told=lambda event: None, **options) -> Session:
    """Three members, one of them with fewer epochs, saved into ``folder``; ``told``: is given the events."""
    graph = tiny_graph()
    tasks = tasks_of(graph, [{"epochs": 60, **member} for member in MEMBERS], dropout=0.5, norm="batch")
    group, events = start(tasks, graph), SweepEvents(Sweep.from_tasks(tasks), told)
    save = None
    if folder is not None:
        folder.mkdir(exist_ok=True)
        save = lambda group, about: RunFolder(folder).save_state("1", group, about)  # noqa: E731
    return Session(group, events, save, **options)


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
    """Answer with updates, act on decisions, until one of them ends it; then send what came of it."""
    session = make_session(Path(folder))
    if resume:
        checkpoint = read_checkpoint(Path(folder))
        session.resume(checkpoint.tensors, checkpoint.about)
    pipe.send_bytes(json.dumps(outline_of(session.group).to_dict()).encode())
    while not session.finished:
        pipe.send_bytes(updates_to_json(session.advance()).encode())
        session.apply(Decision.from_json(pipe.recv_bytes().decode()))
    pipe.send_bytes(json.dumps(outcome(session)).encode())
