"""The cells of the matrix: a kind of work, a place that trains it, and whether a process is killed on the way.

A cell is tried, nothing about it is assumed: it ends with the numbers of the plain run (``SAME``), or with the one
sentence by which Weft refuses it before the first epoch. Anything else is a :class:`Fault`: other numbers, a traceback,
several lines, an error after training began. ``run`` without a kill is compared with a plain loop of PyTorch, all
others with ``weft.run``.

What is killed, with SIGKILL: the process of the run; one of two ranks; the queue's worker; the process of Ray's task. A
run and ranks go on by ``resume=True``, the queue and Ray by themselves.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import weft
from tests.behaviour.cases import graph as small_graph
from tests.matrix import plain
from tests.serve.direct_queue import DirectQueue
from tests.serve.serving import ServeProcess
from weft.core.errors import WeftError
from weft.serve.queue_db import ENDED

SAME = "same"
MODES = ("full", "sampled")
KINDS = ("solo", "stacked sweep", "mixed sweep", "own module", "PyG module", "R-GCN")
PLACES = ("run", "queue", "2 ranks", "2 ranks in the queue", "Ray")
MODULES = "tests.matrix.modules"
EPOCHS, KILLED_EPOCHS, QUEUED_EPOCHS = 12, 40, 250  # plain; killed by itself; killed from outside, which takes longer
CLOSE, FAR = (2e-4, 2e-5), (2e-3, 2e-4)  # relative and absolute, of 12 epochs and of many
SECONDS = 120.0


class Fault(AssertionError):
    """A cell that neither has the numbers of the plain run nor is refused in one sentence."""


class EndedFirst(Exception):
    """A task was done before its worker was killed: it needs more epochs."""


@dataclass(frozen=True, order=True)
class Cell:
    """One cell; its text is what the record of outcomes has as its key."""

    mode: str
    kind: str
    place: str
    killed: bool

    def __str__(self) -> str:
        return f"{self.mode}, {self.kind}, {self.place}{', killed' if self.killed else ''}"


CELLS = tuple(itertools.starmap(Cell, itertools.product(MODES, KINDS, PLACES, (False, True))))


def some_cells() -> tuple[Cell, ...]:
    """Thirty of them: every kind in every place, in turn full and sampled, killed and not."""
    return tuple(
        Cell(MODES[(i + j) % 2], kind, place, (i + j) // 2 % 2 == 1)
        for j, place in enumerate(PLACES)
        for i, kind in enumerate(KINDS)
    )


# ---- The work


def dropout_of(cell: Cell) -> float:
    """The rate of dropout of a cell.

    A plain loop draws other masks than Weft; so do ranks that sample (docs/scaling.md), each for its part of a batch.
    """
    by_ranks = cell.mode == "sampled" and cell.place.startswith("2 ranks")
    return 0.0 if by_ranks or (cell.place, cell.killed) == ("run", False) else 0.3


def work_of(cell: Cell, graph: str, epochs: int) -> weft.Task | weft.Sweep:
    """What a cell trains: a task, or a sweep of three."""
    shared: dict[str, Any] = {"epochs": epochs, "lr": 0.01, "dropout": dropout_of(cell)}
    if cell.mode == "sampled":
        shared |= {"mode": "sampled", "fanout": (3, 2), "batch": 16}
    if cell.kind == "stacked sweep":
        return weft.Sweep(graph, "gcn", hidden=8, seed=[0, 1, 2], **shared)
    if cell.kind == "mixed sweep":
        return weft.Sweep(graph, ["gcn", "sage", "gin"], hidden=8, **shared)
    own = {
        "solo": {"model": "gcn", "hidden": 8},
        "own module": {"model": f"{MODULES}:Own"},
        "PyG module": {"model": f"{MODULES}:Pyg"},
        "R-GCN": {"model": "rgcn", "hidden": 8, "bases": 2},
    }
    return weft.Task(graph=graph, name=cell.kind, **own[cell.kind], **shared)


def members(work: weft.Task | weft.Sweep) -> list[weft.Task]:
    """The tasks of a work."""
    return [work] if isinstance(work, weft.Task) else list(work)


History = dict[str, list[float]]
RESUMED = "resumed after epoch"  # how the note of a run begins that goes on from a checkpoint


def went_on(notes: Iterable[str]) -> None:
    """A :class:`Fault` unless one of ``notes`` says that training went on: begun anew, it has the same numbers."""
    if not any(note.startswith(RESUMED) for note in notes):
        raise Fault("it began anew instead of going on from its checkpoint")


def on_two_ranks(plans: Iterable[Mapping[str, Any]]) -> None:
    """A :class:`Fault` unless all ``plans`` were carried out by two ranks: one has the same numbers."""
    counts = [plan["shards"] for plan in plans]
    if set(counts) != {2}:
        raise Fault(f"it ran on {counts} ranks instead of 2")


def plans_of(result: Any) -> list[dict[str, Any]]:
    """The plan that every member was trained by, as plain data."""
    return [one.plan.to_dict() for one in ([result] if isinstance(result, weft.Result) else list(result))]


def histories(result: Any) -> list[History]:
    """The numbers of every member."""
    results = [result] if isinstance(result, weft.Result) else list(result)
    for one in results:
        if one.status != "finished":
            raise Fault(f"{one.name} ended as {one.status}: {one.message}")
    return [one.history for one in results]


def compare(found: Sequence[History], expected: Sequence[History], close: tuple[float, float]) -> None:
    """A :class:`Fault` if numbers differ by more than rounding."""
    if len(found) != len(expected):
        raise Fault(f"{len(found)} results of {len(expected)} tasks")
    for mine, theirs in zip(found, expected, strict=True):
        for name, values in theirs.items():
            other = mine.get(name, [])
            if len(other) != len(values):
                raise Fault(f"{name} has {len(other)} epochs of {len(values)}")
            for epoch, (one, two) in enumerate(zip(other, values, strict=True), 1):
                one = math.nan if one is None else one
                same = math.isnan(one) and math.isnan(two)
                # An accuracy moves by whole nodes if two logits are nearly the same.
                loose = 0.06 if "accuracy" in name else close[1]
                if not same and not math.isclose(one, two, rel_tol=close[0], abs_tol=loose):
                    raise Fault(f"{name} of epoch {epoch} is {one:.7g}, of the plain run {two:.7g}")


# ---- The places


class Matrix:
    """A folder with the graph; a server and a Ray node, which start when a cell needs them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.graph = folder, str(folder / "graphs" / "small")
        (folder / "graphs").mkdir(parents=True, exist_ok=True)
        small_graph().save(self.graph)
        self._stack = ExitStack()
        self._runs = itertools.count()
        self._server: ServeProcess | None = None
        self._expected = cache(self._plain_run)

    def __enter__(self) -> Matrix:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def outcome(self, cell: Cell) -> str:
        """``SAME``, or the sentence of a refusal; a :class:`Fault` for anything else."""
        try:
            self._try(cell)
        except WeftError as error:
            return self._sentence(str(error))
        except Fault:
            raise
        except Exception as error:
            raise Fault(f"a traceback: {type(error).__name__}: {error}") from error
        return SAME

    def _sentence(self, text: str) -> str:
        """A refusal without names of folders and of tasks, which are those of this run."""
        if "\n" in text.strip() or "Traceback" in text:
            raise Fault(f"not one sentence: {text}")
        text = re.sub(rf"{re.escape(str(self.folder))}/\S*?(?=[\s'\":;,)]|$)", "FOLDER", text.strip())
        text = re.sub(r" \(attempt \d of \d\)$", "", text)  # a queue adds how often it has tried
        return re.sub(r"'[0-9a-f]{12}'", "'TASK'", text)

    def _try(self, cell: Cell) -> None:
        if (cell.place, cell.killed) == ("run", False):
            work = work_of(cell, self.graph, EPOCHS)
            found = histories(weft.run(work, device="cpu", progress=False))
            expected = [{"loss": plain.losses(task, small_graph())} for task in members(work)]
            compare(found, expected, CLOSE)
            return
        try_it: Callable[[Cell], tuple[list[History], int]] = {
            "run": self._run_killed,
            "2 ranks": self._ranks,
            "queue": self._queue,
            "2 ranks in the queue": self._queue,
            "Ray": self._ray,
        }[cell.place]
        found, epochs = try_it(cell)
        usual = cell if dropout_of(cell) == 0.0 else replace(cell, place="queue")  # one plain run for several places
        compare(found, self._expected(replace(usual, killed=True), epochs), CLOSE if epochs == EPOCHS else FAR)

    def _plain_run(self, cell: Cell, epochs: int) -> list[History]:
        return histories(weft.run(work_of(cell, self.graph, epochs), device="cpu", progress=False))

    def _out(self) -> Path:
        return self.folder / f"run-{next(self._runs)}"

    # ---- this process

    def _run_killed(self, cell: Cell) -> tuple[list[History], int]:
        work, out = work_of(cell, self.graph, KILLED_EPOCHS), self._out()
        refused = _in_a_process(_train_and_die, work, str(out))
        if refused:
            raise WeftError(refused)
        notes, listen = _notes()
        result = weft.run(work, device="cpu", progress=False, out=out, resume=True, on_event=listen)
        went_on(notes)
        return histories(result), KILLED_EPOCHS

    def _ranks(self, cell: Cell) -> tuple[list[History], int]:
        if not cell.killed:
            result = weft.run(work_of(cell, self.graph, EPOCHS), device="cpu", ranks=2, progress=False)
            on_two_ranks(plans_of(result))
            return histories(result), EPOCHS
        work, out, killed = work_of(cell, self.graph, KILLED_EPOCHS), self._out(), []

        def kill(event: Any) -> None:
            if event.kind == "checkpoint" and not killed:
                rank = next(one for one in multiprocessing.active_children() if one.name == "weft rank 1")
                killed.append(rank.pid)
                os.kill(rank.pid, signal.SIGKILL)

        options = weft.RunOptions(device="cpu", ranks=2, checkpoint_every=0.0)
        try:
            weft.run(work, out=out, progress=False, on_event=kill, options=options)
        except WeftError:
            if not killed:
                raise
        else:
            raise Fault("it went on without a rank that was killed" if killed else "it ended before a checkpoint")
        notes, listen = _notes()
        result = weft.run(work, out=out, progress=False, resume=True, on_event=listen, options=options)
        went_on(notes)
        on_two_ranks(plans_of(result))
        return histories(result), KILLED_EPOCHS

    # ---- a server

    @property
    def server(self) -> ServeProcess:
        """``weft serve`` with two workers, checkpoints after every epoch, and a user's modules allowed."""
        if self._server is None:
            place = self.folder / "server"
            place.mkdir()
            words = ["--no-auth", "--workers", "2", "--checkpoint-seconds", "0", "--allow-model", f"{MODULES}:*"]
            self._server = ServeProcess(place, *words, "--graphs", str(self.folder / "graphs")).start()
            self._stack.callback(self._server.stop)
        return self._server

    def _queue(self, cell: Cell) -> tuple[list[History], int]:
        if not cell.killed:
            return self._queued(cell, EPOCHS), EPOCHS
        # Ranks take longer per epoch, and what rounding does grows with the steps: 0.5 % after 500 of a GIN.
        least = KILLED_EPOCHS if cell.place.startswith("2 ranks") else QUEUED_EPOCHS
        for epochs in (least, 4 * least, 16 * least):
            with suppress(EndedFirst):
                return self._queued(cell, epochs), epochs
        raise Fault("it ended before its worker was killed")

    def _queued(self, cell: Cell, epochs: int) -> list[History]:
        client, options = weft.Client(self.server.url), {"ranks": 2} if cell.place.startswith("2 ranks") else {}
        names = [task["id"] for task in submit(client, work_of(cell, self.graph, epochs), options)]
        if cell.killed:
            self._kill_worker(names)
        tasks = self._ended(names)
        for task in tasks:
            if task.state != "done":
                trained = any(event["kind"] == "progress" for event in self._events(task.id))
                raise Fault(f"failed while it trained: {task.error}") if trained else WeftError(str(task.error))
        if cell.killed and max(task.attempts for task in tasks) < 2:
            raise EndedFirst
        if cell.killed:
            went_on(self._journal(names))
        results = [client.result(name) for name in names]
        if options:
            on_two_ranks(result["plan"] for result in results)
        return [result["history"] for result in results]

    def _journal(self, names: Sequence[str]) -> list[str]:
        """The notes of the runs in the server's folders that have one of the tasks ``names``."""
        notes: list[str] = []
        for path in Path(f"{self.server.db}.runs").rglob("events.jsonl"):
            text = path.read_text(encoding="utf-8")
            events = [json.loads(line) for line in text.splitlines() if any(name in text for name in names)]
            notes += [str(event["message"]) for event in events if event["event"] == "note"]
        return notes

    def _kill_worker(self, names: Sequence[str]) -> None:
        """Kill the worker that trains one of ``names``, after its first checkpoint."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with DirectQueue(self.server.db) as queue:
                tasks = [queue.get(name) for name in names]
            if all(task.state in ENDED for task in tasks):
                return
            for task in tasks:
                if task.worker and any(event["kind"] == "checkpoint" for event in self._events(task.id)):
                    with suppress(ProcessLookupError):
                        os.kill(int(task.worker.rpartition("/")[2]), signal.SIGKILL)  # it ends with the process's id
                        return
            time.sleep(0.01)
        raise Fault(f"no checkpoint within {SECONDS:.0f} s")

    def _events(self, name: str) -> list[dict[str, Any]]:
        with DirectQueue(self.server.db) as queue:
            return [{"kind": event.kind, **event.data} for event in queue.events(task=name, limit=10_000)]

    def _ended(self, names: Sequence[str]) -> list[Any]:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with DirectQueue(self.server.db) as queue:
                tasks = [queue.get(name) for name in names]
            if all(task.state in ENDED for task in tasks):
                return tasks
            time.sleep(0.05)
        states = [(task.state, task.error) for task in tasks]
        raise Fault(f"not ended within {SECONDS:.0f} s: {states}")

    # ---- a Ray node

    @cache  # noqa: B019
    def _ray_node(self) -> Any:
        import ray

        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        paths = os.pathsep.join([str(Path(weft.__file__).parents[1]), str(Path(__file__).parents[2])])
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = paths  # Ray's workers have the environment of its node
        try:
            ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
                     object_store_memory=80 << 20)  # fmt: skip
        finally:
            os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
        self._stack.callback(ray.shutdown)
        return ray

    def _ray(self, cell: Cell) -> tuple[list[History], int]:
        from weft.cluster.ray import run_on_ray

        self._ray_node()
        if not cell.killed:
            options = weft.RunOptions(device="cpu")
            return histories(run_on_ray(work_of(cell, self.graph, EPOCHS), options=options, progress=False)), EPOCHS
        killed: list[int] = []
        notes, listen = _notes()

        def kill(event: Any) -> None:
            listen(event)
            if event.kind == "checkpoint" and not killed:
                for pid in _descendants(os.getpid(), "ray::_on_node"):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        killed.append(pid)

        options = weft.RunOptions(device="cpu", checkpoint_every=0.0)
        result = run_on_ray(work_of(cell, self.graph, QUEUED_EPOCHS), options=options, on_event=kill, progress=False)
        if not killed:
            raise Fault("it ended before its first checkpoint was seen")
        went_on(notes)
        return histories(result), QUEUED_EPOCHS


def _notes() -> tuple[list[str], Callable[[Any], None]]:
    """Notes that a run gives, and the listener that collects them."""
    notes: list[str] = []

    def listen(event: Any) -> None:
        if event.kind == "note":
            notes.append(str(event.data["message"]))

    return notes, listen


def submit(client: weft.Client, work: weft.Task | weft.Sweep, options: dict[str, Any]) -> list[dict[str, Any]]:
    """The tasks of ``work`` as the server shows them; options of a run as the client takes them."""
    if not options:
        return client.submit(work)
    known = inspect.signature(client.submit).parameters
    if "options" in known:
        return client.submit(work, options=weft.RunOptions(**options))
    return client.submit(work, **options)


# ---- Processes


def _in_a_process(target: Callable[..., None], *given: Any) -> str:
    """Run ``target(*given, connection)`` in a process that kills itself; what it sent before, if it did not."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*given, there))
    process.start()
    there.close()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise Fault(f"the run did not end within {SECONDS:.0f} s")
    if process.exitcode != -signal.SIGKILL:
        said = here.recv() if here.poll() else "nothing"
        if isinstance(said, tuple):
            return str(said[0])
        raise Fault(f"the run was not killed, but ended with code {process.exitcode}: {said}")
    return ""


def _train_and_die(work: Any, out: str, line: Any) -> None:
    """A run that is killed at its first checkpoint."""
    torch.set_num_threads(1)

    def die(event: Any) -> None:
        if event.kind == "checkpoint":
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        options = weft.RunOptions(device="cpu", checkpoint_every=0.0)
        weft.run(work, out=out, progress=False, on_event=die, options=options)
    except WeftError as error:
        line.send((str(error),))
    except BaseException as error:
        line.send(f"{type(error).__name__}: {error}")
        raise


def _descendants(pid: int, name: str) -> list[int]:
    """The processes below ``pid`` whose title begins with ``name``."""
    parents: dict[int, int] = {}
    titles: dict[int, str] = {}
    for place in Path("/proc").iterdir():
        if place.name.isdecimal():
            with suppress(OSError, ValueError, IndexError):
                parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                titles[int(place.name)] = (place / "cmdline").read_bytes().decode(errors="replace")
    found, level = [], [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        found += [child for child in level if titles[child].startswith(name)]
    return found


def recorded(path: Path) -> dict[str, str]:
    """The outcomes on record, by cell."""
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    return found
