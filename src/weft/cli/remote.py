"""``weft submit``, ``watch``, ``cancel``, ``pause``, ``resume``, ``logs``, ``fetch``, ``queue list`` and ``show``."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.format import (
    parse_deadline,
    plain_line,
    plain_text,
    task_table,
    terminal_width,
    with_lateness,
    with_local_times,
)
from weft.core.errors import InputError, SpecError
from weft.core.spec_file import read_spec
from weft.core.task import Task

if TYPE_CHECKING:
    from weft.serve.client import Client

FAILED = 3  # exit code: a task that was waited for failed or was cancelled

Server = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The server.", show_default="$WEFT_SERVER, else http://127.0.0.1:8787"),
]
Token = Annotated[str | None, typer.Option(metavar="FILE", help="File with the token.", show_default="$WEFT_TOKEN")]
Ids = Annotated[list[str], typer.Argument(metavar="TASK...", help="Ids of tasks.")]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]


def _client(server: str | None, token: str | None) -> Client:
    from weft.serve.client import Client

    return Client(server, token)


def submit(
    spec: Annotated[
        Path | None, typer.Argument(help="TOML file of a task or a sweep.", metavar="[SPEC.toml]", show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting: --set train.lr=0.02; repeat."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="The same key queues the same work only once.", show_default="none")
    ] = None,
    priority: Annotated[int, typer.Option(help="Higher is considered first.")] = 0,
    after: Annotated[
        list[str] | None, typer.Option(metavar="TASK", help="Start when this task is done; repeat.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Memory that each task may take.", show_default="its estimate")
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="When they should be done: 2h (from now; s, m, h, d), 18:30, 2026-11-18T08:00, or seconds since 1970. "
            "Of tasks of one priority the earliest is considered first; a late one is not stopped.",
            show_default="none",
        ),
    ] = None,
    infer: Annotated[
        str | None, typer.Option(metavar="TASK", help="Infer with the best weights of a task, once it is done.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="FILE", help="Infer with this file of the server's folder of graphs.")
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(help="Of an inference task: all, train, val, test, or ids: 3,5,8.", show_default="all")
    ] = None,
    graph: Annotated[
        str | None, typer.Option(help="Of an inference task: another graph.", show_default="the one trained on")
    ] = None,
    latency_target: Annotated[
        float | None, typer.Option(metavar="S", help="Of an inference task: seconds to its answer.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Whose tasks they are, on a server without tokens.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when all have ended.")] = False,
    json: Json = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """Queue the task or every task of the sweep in SPEC, and print their ids.

    With --infer TASK, or SPEC and --weights FILE, queue an inference task; `weft fetch` downloads its predictions.
    Exit codes: 0 queued (with --wait: all done), 2 refused, 3 one of them failed or was cancelled, also when it was
    submitted with the same --key before.
    """
    client = _client(server, token)
    common: dict[str, Any] = {"key": key, "priority": priority, "after": after or (), "user": user}
    asked: dict[str, Any] = {"nodes": _parse_nodes(nodes), "graph": graph, "latency_target": latency_target}
    if infer is not None or weights is not None:
        _check_inference(infer, weights, spec, changes, {"budget": budget, "deadline": deadline})
        task = None if spec is None else _one_task(spec, changes or [])
        found = [client.infer(infer, task=task, weights=weights, **asked, **common)]
    else:
        work = read_spec(_training_spec(spec, asked), changes or [])
        due = None if deadline is None else parse_deadline(deadline)
        found = client.submit(work, budget=budget, deadline=due, **common)
    if wait:
        found = client.wait(found)
    if json:
        print(jsonlib.dumps(found))
    else:
        for one in found:
            print(plain_line(f"{one['id']}  {one['state']}  {one['name']}".rstrip()))
    _exit_if_failed(found, "" if key is None else "; submit with another key to queue it again")


def _training_spec(spec: Path | None, asked: dict[str, Any]) -> Path:
    given = next((name for name, value in asked.items() if value is not None), None)
    if given is not None:
        raise SpecError(f"--{given.replace('_', '-')} is for inference: give --infer TASK, or SPEC and --weights FILE")
    if spec is None:
        raise SpecError("give SPEC.toml, or --infer TASK")
    return spec


def _check_inference(
    infer: str | None, weights: str | None, spec: Path | None, changes: list[str] | None, limits: dict[str, str | None]
) -> None:
    """Refuse what does not go together; ``limits``: what trainings have and inference tasks do not."""
    if infer is not None and (weights is not None or spec is not None or changes):
        raise SpecError(f"--infer {infer} has settings and weights of its own; leave SPEC, --set and --weights out")
    if infer is None and spec is None:
        raise SpecError(f"--weights {weights} needs SPEC.toml: the settings that they were trained with")
    if limits["budget"] is not None:
        told = "is for trainings; an inference task takes less than one epoch of its own"
        raise SpecError(f"--budget {limits['budget']} {told}")
    if limits["deadline"] is not None:
        raise SpecError(f"--deadline {limits['deadline']} is for trainings; give an inference task --latency-target S")


def _one_task(spec: Path, changes: list[str]) -> Task:
    work = read_spec(spec, changes)
    if not isinstance(work, Task):
        raise SpecError(f"{spec}: is a sweep; an inference task has the settings of one model")
    return work


def _parse_nodes(nodes: str | None) -> str | list[int] | None:
    if nodes is None or not nodes[:1].isdigit():
        return nodes
    try:
        return [int(node) for node in nodes.split(",")]
    except ValueError:
        raise SpecError(f"--nodes {nodes}: expected all, train, val, test, or ids: 3,5,8") from None


def list_tasks(
    state: Annotated[
        str | None, typer.Option(help="queued, planned, running, paused, done, failed, cancelled.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Of this user.")] = None,
    json: Json = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """List the tasks of a server, with the reason why each one waits."""
    found = _client(server, token).tasks(state, user)
    print(jsonlib.dumps(found) if json else task_table(found, terminal_width()))


def show(task: Annotated[str, typer.Argument(metavar="TASK")], server: Server = None, token: Token = None) -> None:
    """Everything that the server knows of a task, as JSON; late: whether it missed its deadline."""
    print(jsonlib.dumps(with_lateness(_client(server, token).show(task)), indent=2))


def watch(tasks: Ids, server: Server = None, token: Token = None) -> None:
    """Follow tasks until they have ended, one line per event; a server that is started again is waited for.

    Exit codes: 0 all are done, 3 one of them failed or was cancelled.
    """
    from weft.serve.queue_file import ENDED

    client = _client(server, token)
    states = {name: client.show(name)["state"] for name in tasks}
    for name in (name for name, state in states.items() if state in ENDED):
        print(plain_line(f"{name}  {states[name]}"), flush=True)
    left = {name for name, state in states.items() if state not in ENDED}
    only = tasks[0] if len(tasks) == 1 else None
    for event in client.events(task=only, on_lost=_say) if left else ():
        if event["task"] in tasks:
            print(_event_line(event), flush=True)
        if event["kind"] in ENDED:
            left.discard(event["task"])
        if not left:
            break
    _exit_if_failed([client.show(name) for name in tasks])


def cancel(tasks: Ids, server: Server = None, token: Token = None) -> None:
    """Cancel tasks; what depends on them fails."""
    client = _client(server, token)
    _each(lambda task: _changed(task, _cancelled(task, client.cancel(task))), tasks)


def pause(tasks: Ids, server: Server = None, token: Token = None) -> None:
    """Keep tasks from running; a running one saves a checkpoint first."""
    client = _client(server, token)
    _each(lambda task: _changed(task, client.pause(task)), tasks)


def resume(tasks: Ids, server: Server = None, token: Token = None) -> None:
    """Queue paused tasks again; they go on from their checkpoints."""
    client = _client(server, token)
    _each(lambda task: _changed(task, client.resume(task)), tasks)


def logs(task: Annotated[str, typer.Argument(metavar="TASK")], server: Server = None, token: Token = None) -> None:
    """What a task printed, and the notes of its run."""
    sys.stdout.write(plain_text(with_local_times(_client(server, token).logs(task))))


def fetch(
    tasks: Ids,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to; a folder per task is made in it.")] = Path(
        "results"
    ),
    server: Server = None,
    token: Token = None,
) -> None:
    """Download what tasks left that are done: result.json, and weights or predictions.

    Of a task whose loss became NaN these are the best weights from before; it is said that it failed.
    """
    client = _client(server, token)
    _each(lambda task: _fetched(client, task, out), tasks)


def _fetched(client: Client, task: str, out: Path) -> str:
    """Download what a task left; the folder."""
    place, found = client.fetch(task, out), client.show(task)
    if found["state"] == "failed":
        _say(f"task {task} failed: {found['error']}")
    return str(place)


def _say(sentence: str) -> None:
    print(f"weft: {plain_line(sentence)}", file=sys.stderr, flush=True)


def _changed(name: str, task: dict[str, Any]) -> str:
    return f"{name}  {task['state']}"


def _each(action: Callable[[str], str], tasks: Sequence[str]) -> None:
    """Print what ``action`` says of every task that it can be done with; the others are told at the end."""
    wrong: list[InputError] = []
    for task in tasks:
        try:
            print(action(task))
        except InputError as error:
            wrong.append(error)
    for one in wrong[:-1]:
        _say(f"error: {one}")
    if wrong:
        raise wrong[-1]


def _cancelled(name: str, task: dict[str, Any]) -> dict[str, Any]:
    """``task``, unless it had ended before, which the server leaves as it is."""
    if task["state"] != "cancelled":
        raise InputError(f"task {name!r} has ended already ({task['state']}); it cannot be cancelled")
    return task


def _exit_if_failed(tasks: Sequence[dict[str, Any]], then: str = "") -> None:
    """Say which of ``tasks`` failed or were cancelled, and what to do ``then``."""
    wrong = [task for task in tasks if task["state"] in ("failed", "cancelled")]
    for task in wrong:
        told = f"weft: task {task['id']} {task['state']}: {task['error'] or ''}".rstrip(": ")
        print(plain_text(told + then), file=sys.stderr)
    if wrong:
        raise typer.Exit(FAILED)


def _event_line(event: dict[str, Any]) -> str:
    data = event["data"]
    shown = {key: data[key] for key in ("epoch", "epochs", "loss", "message", "error", "worker") if data.get(key)}
    shown |= {key: value for key, value in data.items() if key.startswith("val_")}
    words = " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in shown.items()
    )
    return plain_line(f"{event['task']}  {event['kind']}  {words}".rstrip())
