"""A sweep of the queue as ``weft.run`` would have left it, made from the results of its tasks.

``python -m weft.serve.sweep_result`` reads what a server knows of a sweep, or of one task, from stdin, and writes the
report to stdout: the server itself does without torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.core.errors import InputError
from weft.core.event import Event
from weft.core.files import write_json
from weft.core.plan import Plan
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.engine.events import Broadcast
from weft.engine.folder import JOURNAL, SweepFolder
from weft.engine.loading import LoadedResult
from weft.engine.page import render_report, render_sweep_report
from weft.engine.result import RESULT, Result
from weft.engine.run import about_graphs
from weft.engine.sweep_result import SweepResult, folder_names
from weft.serve.submissions import given_settings

STATUS = {"failed": "failed", "cancelled": "cancelled", "running": "running"}  # of a task without a result, by state
NOT_TRAINED = {"best_epoch": 0, "epochs_run": 0, "seconds": 0.0, "seconds_per_epoch": 0.0}


def sweep_of(spec: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> Sweep:
    """The sweep that was submitted as ``spec`` with tasks of these ``settings``; one of the same tasks without it."""
    with suppress(InputError, TypeError, ValueError, KeyError, AttributeError):
        sweep = Sweep.from_dict(spec)
        if json.loads(json.dumps([given_settings(task) for task in sweep])) == list(settings):
            return sweep
    return Sweep.from_tasks([Task.from_dict(one) for one in settings], spec.get("name"))


def member_result(member: Mapping[str, Any], name: str, folder: Path | None, names: Mapping[str, str]) -> Result:
    """The result of a task in ``folder``, or how it stands without one; ``names``: of its group's members, by id."""
    if folder is None or not (folder / RESULT).is_file():
        status, message = STATUS.get(member["state"], "waiting"), str(member["error"] or "")
        task = Task.from_dict({**member["task"], "name": name})
        return Result(task, Plan((name,)), dict(NOT_TRAINED), {}, None, {}, status, message)
    data = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    data["task"] |= {"name": name, "graph": member["task"].get("graph", data["task"]["graph"])}
    data["plan"]["members"] = [names.get(known, known) for known in data["plan"]["members"]]
    return LoadedResult.of(folder, data, {"model": None, "graph": None})


def sweep_result(described: Mapping[str, Any], folders: Sequence[Path | None]) -> SweepResult:
    """The outcome of a sweep so far; ``folders`` have the results of its members, None for one without."""
    members = described["members"]
    sweep = sweep_of(described["spec"], [member["task"] for member in members])
    names = {member["id"]: task.label for member, task in zip(members, sweep.tasks(), strict=True)}
    results = [
        member_result(member, names[member["id"]], folder, names)
        for member, folder in zip(members, folders, strict=True)
    ]
    trained = [result for result in results if result.trained_on is not None]
    stats = {sweep.graph_of(result.task): result.trained_on for result in trained}
    graphs = about_graphs(lambda task: stats[sweep.graph_of(task)], sweep) if len(stats) == len(sweep.graphs) else {}
    plans = tuple({result.plan.members: result.plan for result in trained}.values())
    open_states = any(result.status in ("waiting", "running") for result in results)
    end = time.time() if open_states else max(member["updated"] for member in members)
    environment = trained[0].environment if trained else {}
    return SweepResult(sweep, results, plans, environment, max(end - described["created"], 0.0), graphs)


def member_folders(place: Path, described: Mapping[str, Any]) -> list[Path]:
    """The folders of the members of a sweep in ``place``, as a run names them."""
    sweep = sweep_of(described["spec"], [member["task"] for member in described["members"]])
    return [place / "tasks" / name for name in folder_names([task.label for task in sweep])]


def write_sweep(place: Path, described: Mapping[str, Any], folders: Sequence[Path]) -> None:
    """Write into ``place``, with ``folders`` of the members, what a run of the sweep writes, less its checkpoints."""
    result = sweep_result(described, folders)
    for member, folder in zip(result, folders, strict=True):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RESULT, member.to_dict())
    written = SweepFolder(place, result.sweep)
    (place / JOURNAL).unlink(missing_ok=True)
    written.open(afresh=False)
    try:
        emit, label = Broadcast([written.journal], None, described["name"]), result.sweep.label
        for member in result:
            emit(Event("end", member.name, {"sweep": label, "status": member.status, "metrics": member.metrics}))
        emit(Event("finish", label, {"status": "finished", **result.summary()}))
        written.save_groups([(str(number), plan) for number, plan in enumerate(result.plan, 1)])
        written.save_sweep(result)
    finally:
        written.close()


def main() -> None:
    """Write the report of what stdin describes to stdout."""
    described = json.load(sys.stdin)
    folders = [None if member["folder"] is None else Path(member["folder"]) for member in described["members"]]
    if "spec" in described:
        page = render_sweep_report(sweep_result(described, folders))
    else:
        (member,) = described["members"]
        name = member["name"] or member["id"]
        page = render_report(member_result(member, name, folders[0], {member["id"]: name}))
    sys.stdout.buffer.write(page.encode())


if __name__ == "__main__":
    main()
