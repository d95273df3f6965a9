"""Build the result folder and the report of a sweep of the queue, as ``weft.run`` writes them, from its tasks' results.

``python -m weft.serve.sweep_result`` reads the description of a sweep, or of a single task, as JSON from stdin and
writes the report to stdout. It runs as a process of its own because the server imports no torch.
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

# The status of a task without a result, by its state; "waiting" for every other state.
STATUS = {"failed": "failed", "cancelled": "cancelled", "running": "running"}
NOT_TRAINED = {"best_epoch": 0, "epochs_run": 0, "seconds": 0.0, "seconds_per_epoch": 0.0}


def sweep_of(spec: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> Sweep:
    """Return the sweep submitted as ``spec``; a list of ``settings`` as a sweep if ``spec`` does not expand to them."""
    with suppress(InputError, TypeError, ValueError, KeyError, AttributeError):
        sweep = Sweep.from_dict(spec)
        if json.loads(json.dumps([given_settings(task) for task in sweep])) == list(settings):
            return sweep
    return Sweep.from_tasks([Task.from_dict(values) for values in settings], spec.get("name"))


def member_result(member: Mapping[str, Any], name: str, folder: Path | None, names: Mapping[str, str]) -> Result:
    """Return the result in ``folder``, or the present status if there is none; ``names``: of group members, by id."""
    if folder is None or not (folder / RESULT).is_file():
        status, message = STATUS.get(member["state"], "waiting"), str(member["error"] or "")
        task = Task.from_dict({**member["task"], "name": name})
        return Result(task, Plan((name,)), dict(NOT_TRAINED), {}, None, {}, status, message)
    data = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    data["task"] |= {"name": name, "graph": member["task"].get("graph", data["task"]["graph"])}
    data["plan"]["members"] = [names.get(task, task) for task in data["plan"]["members"]]
    return LoadedResult.of(folder, data, {"model": None, "graph": None})


def sweep_result(description: Mapping[str, Any], folders: Sequence[Path | None]) -> SweepResult:
    """Return the outcome of a sweep so far; ``folders``: of its members' results, None for a member without."""
    members = description["members"]
    sweep = sweep_of(description["spec"], [member["task"] for member in members])
    names = {member["id"]: task.label for member, task in zip(members, sweep.tasks(), strict=True)}
    results = [
        member_result(member, names[member["id"]], folder, names)
        for member, folder in zip(members, folders, strict=True)
    ]
    trained = [result for result in results if result.trained_on is not None]
    stats = {sweep.graph_of(result.task): result.trained_on for result in trained}
    graphs = about_graphs(lambda task: stats[sweep.graph_of(task)], sweep) if len(stats) == len(sweep.graphs) else {}
    plans = tuple({result.plan.members: result.plan for result in trained}.values())
    unfinished = any(result.status in ("waiting", "running") for result in results)
    end = time.time() if unfinished else max(member["updated"] for member in members)
    environment = trained[0].environment if trained else {}
    return SweepResult(sweep, results, plans, environment, max(end - description["created"], 0.0), graphs)


def member_folders(folder: Path, description: Mapping[str, Any]) -> list[Path]:
    """Return the folders of a sweep's members inside ``folder``, named as by a run."""
    sweep = sweep_of(description["spec"], [member["task"] for member in description["members"]])
    return [folder / "tasks" / name for name in folder_names([task.label for task in sweep])]


def write_sweep(folder: Path, description: Mapping[str, Any], member_folders: Sequence[Path]) -> None:
    """Write into ``folder`` what a run of the sweep writes, except checkpoints; ``member_folders`` hold the weights."""
    result = sweep_result(description, member_folders)
    for member, inside in zip(result, member_folders, strict=True):
        inside.mkdir(parents=True, exist_ok=True)
        write_json(inside / RESULT, member.to_dict())
    written = SweepFolder(folder, result.sweep)
    (folder / JOURNAL).unlink(missing_ok=True)
    written.open(afresh=False)
    try:
        emit, label = Broadcast([written.journal], None, description["name"]), result.sweep.label
        for member in result:
            emit(Event("end", member.name, {"sweep": label, "status": member.status, "metrics": member.metrics}))
        emit(Event("finish", label, {"status": "finished", **result.summary()}))
        written.save_groups([(str(number), plan) for number, plan in enumerate(result.plan, 1)])
        written.save_sweep(result)
    finally:
        written.close()


def main() -> None:
    """Read a description from stdin and write its report to stdout."""
    description = json.load(sys.stdin)
    runs, members = Path(description["runs"]), description["members"]
    folders = [None if member["folder"] is None else runs / member["folder"] for member in members]
    if "spec" in description:
        page = render_sweep_report(sweep_result(description, folders))
    else:
        (member,) = members
        name = member["name"] or member["id"]
        page = render_report(member_result(member, name, folders[0], {member["id"]: name}))
    sys.stdout.buffer.write(page.encode())


if __name__ == "__main__":
    main()
