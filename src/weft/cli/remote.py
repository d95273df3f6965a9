"""Commands for the tasks and sweeps of a server: ``weft submit``, ``watch``, ``show``, ``cancel`` and so on."""

from __future__ import annotations

import json as jsonlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.format import (
    aligned,
    check_file,
    numbers,
    parse_deadline,
    plain_line,
    plain_text,
    task_table,
    terminal_width,
    with_local_times,
    write_file,
)
from weft.cli.options import Changes, Json, ShellOption, run_options, takes
from weft.cli.spec import with_section
from weft.core.errors import InputError, SpecError
from weft.core.run_options import RunOptions
from weft.core.spec_file import read_with_options
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.wording import option

if TYPE_CHECKING:
    from weft.serve.client import Client

FAILED = 3  # exit code: a task that was waited for failed or was cancelled

Server = Annotated[
    str | None, typer.Option(metavar="URL", help="The server.", show_default="$WEFT_SERVER, else http://127.0.0.1:8787")
]
Token = Annotated[str | None, typer.Option(metavar="FILE", help="File with the token.", show_default="$WEFT_TOKEN")]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Ids of tasks, or names of sweeps.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The id of a task, or the name of a sweep.")]


def _client(server: str | None, token: str | None) -> Client:
    from weft.serve.client import Client

    return Client(server, token)


SUBMITTED = (
    ShellOption("key", str, "The same key queues the same work only once.", shown="none"),
    ShellOption("priority", int, "Higher is considered first.", default=0),
    ShellOption("after", list[str], "Start when this task, or this sweep, is done; repeat.", "NAME"),
    ShellOption(
        "deadline",
        str,
        "When they should be done: 2h (from now; s, m, h, d), 18:30, 2026-11-18T08:00, or seconds since 1970. "
        "Of your tasks of one priority the earliest is considered first; a late one is not stopped.",
        "TIME",
        "none",
    ),
    ShellOption("time_limit", float, "Seconds that each task may run in all; then it is ended.", "S", "the server's"),
    ShellOption("infer", str, "Infer with the best weights of a task, once it is done.", "TASK"),
    ShellOption("weights", str, "Infer with this file of the server's folder of graphs.", "FILE"),
    ShellOption("nodes", str, "Of an inference task: all, train, val, test, or ids: 3,5,8.", shown="all"),
    ShellOption("graph", str, "Of an inference task: another graph.", shown="the one trained on"),
    ShellOption("latency_target", float, "Of an inference task: seconds to its answer.", "S"),
    ShellOption("user", str, "Whose tasks they are, on a server without tokens."),
)


@takes(*SUBMITTED, *run_options("queue"))
def submit(
    spec: Annotated[
        Path | None, typer.Argument(help="TOML file of a task or a sweep.", metavar="[SPEC.toml]", show_default=False)
    ] = None,
    changes: Changes = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when all have ended.")] = False,
    json: Json = False,
    server: Server = None,
    token: Token = None,
    **given: Any,
) -> None:
    """Queue the task or the sweep in SPEC, and print its id, or the name by which commands take the whole sweep.

    With --infer TASK, or SPEC and --weights FILE, queue an inference task; `weft fetch` downloads its predictions.
    Exit codes: 0 queued (with --wait: all done), 2 refused, 3 one of them failed or was cancelled, also when it was
    submitted with the same --key before.
    """
    client = _client(server, token)
    chosen = {row.name: given[row.name] for row in run_options("queue")}
    work, section = (None, {}) if spec is None else read_with_options(spec, changes or [])
    options = RunOptions.of(**with_section(section, "queue", chosen))
    common = {name: given[name] for name in ("key", "priority", "user")} | {"after": given["after"] or ()}
    inference = {name: given[name] for name in ("nodes", "graph", "latency_target")}
    inference["nodes"] = numbers(given["nodes"], "nodes")
    if given["infer"] is not None or given["weights"] is not None:
        task = _inference_task(work, changes or [], given, options)
        queued = [client.infer(given["infer"], task=task, weights=given["weights"], **inference, **common)]
    else:
        unread = next((name for name, value in inference.items() if value is not None), None)
        if unread is not None:
            flag = f"--{unread.replace('_', '-')}"
            raise SpecError(f"{flag} is for inference: give --infer TASK, or SPEC and --weights FILE")
        if work is None:
            raise SpecError("give SPEC.toml, or --infer TASK")
        due = None if given["deadline"] is None else parse_deadline(given["deadline"])
        limits = {"deadline": due, "time_limit": given["time_limit"]}
        queued = client.submit(work, options=options, **limits, **common)
    if wait:
        queued = client.wait(queued)
    if json:
        print(jsonlib.dumps(queued))
    elif sweep := queued[0].get("sweep"):
        states = Counter(task["state"] for task in queued)
        print(plain_line(f"{sweep}  {len(queued)} tasks  {_counted(states)}"))
    else:
        for task in queued:
            print(plain_line(f"{task['id']}  {task['state']}  {task['name']}".rstrip()))
    _exit_if_failed(queued, "" if given["key"] is None else "; submit with another key to queue it again")


def _inference_task(
    work: Task | Sweep | None, changes: list[str], given: dict[str, Any], options: RunOptions
) -> Task | None:
    """The model of an inference task: ``work`` is that of SPEC, if there is one. Refuses what does not go together."""
    infer, weights = given["infer"], given["weights"]
    if infer is not None and (weights is not None or work is not None or changes):
        raise SpecError(f"--infer {infer} has settings and weights of its own; leave SPEC, --set and --weights out")
    if infer is None and work is None:
        raise SpecError(f"--weights {weights} needs SPEC.toml: the settings that they were trained with")
    for name, value in options.given.items():
        reason = "; an inference task takes less than one epoch of its own" if name == "budget" else "; leave it out"
        raise SpecError(f"{option(name, value)} is for trainings{reason}")
    if given["time_limit"] is not None:
        raise SpecError(f"--time-limit {given['time_limit']:g} is for trainings; leave it out")
    if given["deadline"] is not None:
        raise SpecError(f"--deadline {given['deadline']} is for trainings; give an inference task --latency-target S")
    if isinstance(work, Sweep):
        raise SpecError("SPEC is a sweep; an inference task has the settings of one model")
    return work


def list_tasks(
    state: Annotated[
        str | None, typer.Option(help="queued, planned, running, paused, done, failed, cancelled.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Of this user.")] = None,
    sweep: Annotated[str | None, typer.Option(metavar="NAME", help="Of this sweep.")] = None,
    json: Json = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """List the tasks of a server, with the reason why each one waits."""
    tasks = _client(server, token).tasks(state, user, sweep)
    print(jsonlib.dumps(tasks) if json else task_table(tasks, terminal_width()))


def list_sweeps(
    user: Annotated[str | None, typer.Option(help="Of this user.")] = None,
    json: Json = False,
    server: Server = None,
    token: Token = None,
) -> None:
    """List the sweeps of a server, with how many of their tasks are in which state."""
    sweeps = _client(server, token).sweeps(user)
    rows = [(s["name"], s["user"], str(sum(s["counts"].values())), _counted(s["counts"])) for s in sweeps]
    table = aligned([("sweep", "user", "tasks", "states"), *(tuple(map(plain_line, row)) for row in rows)])
    print(jsonlib.dumps(sweeps) if json else "\n".join(table))


def show(name: Name, server: Server = None, token: Token = None) -> None:
    """Everything that the server knows of a task or a sweep, as JSON; late: whether a task missed its deadline."""
    print(jsonlib.dumps(_client(server, token).show(name), indent=2))


def watch(names: Names, server: Server = None, token: Token = None) -> None:
    """Follow tasks, or those of sweeps, until they have ended, one line per event.

    A server that is started again is waited for. Exit codes: 0 all are done, 3 one of them failed or was cancelled.
    """
    from weft.serve.client import is_sweep
    from weft.serve.queue_db import ENDED

    client = _client(server, token)

    def standing() -> Iterator[dict[str, Any]]:
        for name in names:
            yield from client.tasks(sweep=client.show(name)["name"]) if is_sweep(name) else [client.show(name)]

    since = client.state()["last_seq"] if any(map(is_sweep, names)) else 0  # of a sweep what happens from now on
    states = {task["id"]: task["state"] for task in standing()}
    for name in (name for name, state in states.items() if state in ENDED):
        print(plain_line(f"{name}  {states[name]}"), flush=True)
    running = {name for name, state in states.items() if state not in ENDED}
    only = next(iter(states)) if len(states) == 1 else None
    for event in client.events(since=since, task=only, on_lost=_say) if running else ():
        if event["task"] in states:
            data = event["data"]
            named = ("epoch", "epochs", "loss", "message", "error", "worker", "by")
            shown = {key: data[key] for key in named if data.get(key)}
            shown |= {key: value for key, value in data.items() if key.startswith("val_")}
            words = " ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in shown.items()
            )
            event_line = plain_line(f"{event['task']}  {event['kind']}  {words}".rstrip())
            print(event_line, flush=True)
        if event["kind"] in ENDED:
            running.discard(event["task"])
        if not running:
            break
    _exit_if_failed(list(standing()))


def cancel(names: Names, server: Server = None, token: Token = None) -> None:
    """Cancel tasks, or those of sweeps that have not ended; what depends on them fails."""
    _change("cancel", names, server, token)


def pause(names: Names, server: Server = None, token: Token = None) -> None:
    """Keep tasks, or those of sweeps, from running; a running one saves a checkpoint first."""
    _change("pause", names, server, token)


def resume(names: Names, server: Server = None, token: Token = None) -> None:
    """Queue paused tasks, or those of sweeps, again; they go on from their checkpoints."""
    _change("resume", names, server, token)


def _change(action: str, names: Sequence[str], server: str | None, token: str | None) -> None:
    client = _client(server, token)

    def changed(name: str) -> str:
        answer = getattr(client, action)(name)
        if "changed" in answer:
            return f"{name}  {answer['changed']} tasks changed: {_counted(answer['counts'])}"
        if action == "cancel" and answer["state"] != "cancelled":  # the server leaves a task that has ended as it is
            raise InputError(f"task {name!r} has ended already ({answer['state']}); it cannot be cancelled")
        return f"{name}  {answer['state']}"

    _each(changed, names)


def logs(task: Annotated[str, typer.Argument(metavar="TASK")], server: Server = None, token: Token = None) -> None:
    """What a task printed, and the notes of its run."""
    sys.stdout.write(plain_text(with_local_times(_client(server, token).logs(task))))


def fetch(
    names: Names,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where to; a folder per task or sweep is made.")] = Path(
        "results"
    ),
    server: Server = None,
    token: Token = None,
) -> None:
    """Download what tasks left that are done, or a whole sweep that has ended: results, and weights or predictions.

    Of a task whose loss became NaN these are the best weights from before; it is said that it failed. Of a sweep it is
    the folder that `weft run` leaves, with its report.
    """
    client = _client(server, token)

    def fetched(name: str) -> str:
        folder, task = client.fetch(name, out), client.show(name)
        if task.get("state") == "failed":
            _say(f"task {name} failed: {task['error']}")
        return str(folder)

    _each(fetched, names)


def report(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A task or a sweep of the server, or a run's folder.")],
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="Where to write the page.")] = Path("report.html"),
    server: Server = None,
    token: Token = None,
) -> None:
    """Write the report of a sweep of the server as it stands now, of a task that is done, or of a run in a folder."""
    check_file(out)
    if (Path(name) / "result.json").is_file():
        from weft.engine.loading import read_result
        from weft.engine.page import render_report, render_sweep_report
        from weft.engine.result import Result

        result = read_result(Path(name))
        page = render_report(result) if isinstance(result, Result) else render_sweep_report(result)
    else:
        page = _client(server, token).report(name)
    write_file(out, page)
    print(out)


def _counted(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in states.items())


def _say(sentence: str) -> None:
    print(f"weft: {plain_line(sentence)}", file=sys.stderr, flush=True)


def _each(action: Callable[[str], str], tasks: Sequence[str]) -> None:
    """Print what ``action`` returns for every task; errors of some are shown at the end."""
    errors: list[InputError] = []
    for task in tasks:
        try:
            print(action(task))
        except InputError as error:
            errors.append(error)
    for error in errors[:-1]:
        _say(f"error: {error}")
    if errors:
        raise errors[-1]


def _exit_if_failed(tasks: Sequence[dict[str, Any]], then: str = "") -> None:
    """Say which of ``tasks`` failed or were cancelled, and what to do ``then``."""
    wrong = [task for task in tasks if task["state"] in ("failed", "cancelled")]
    for task in wrong:
        sentence = f"weft: task {task['id']} {task['state']}: {task['error'] or ''}".rstrip(": ")
        print(plain_text(sentence + then), file=sys.stderr)
    if wrong:
        raise typer.Exit(FAILED)
