"""RunFolder and SweepFolder: read and write the folder of a run.

events.jsonl              the journal, one Event a line
checkpoint.safetensors    the state to resume from
result.json               settings, environment, metrics, history
model.safetensors         the best weights
kept.safetensors          what a user's module keeps in Python besides them, if it does
report.html               the same for the eye

Of a sweep: sweep.json (settings, members, groups), groups/KEY/checkpoint.safetensors, tasks/NAME/{result.json,
model.safetensors}, and result.json and report.html of the whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from weft.core.decision import RUNNING
from weft.core.errors import SpecError, TrainingError
from weft.core.event import Event
from weft.core.files import fcntl, write_json, write_text
from weft.core.plan import Plan
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.version import __version__
from weft.core.wording import option, switch
from weft.engine.result import FORMAT, RESULT_FILES, Result, check_format, write_reason
from weft.engine.sweep_result import SweepResult, folder_names
from weft.graph.graph import Graph
from weft.runtime.checkpoint import FILE, Checkpoint, check_same_task, read_checkpoint, write_checkpoint
from weft.runtime.group import GroupRun
from weft.runtime.modules.convert import described

# ---- One run at a time writes into a folder. The system releases the lock however the run ends. Files are replaced in
# one piece (:mod:`weft.core.files`), so that an interrupted run leaves a folder that can be read.

LOCK_FILE = ".lock"


class FolderLock:
    """A lock on ``folder``, held from :meth:`take` to :meth:`release`."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / LOCK_FILE
        self._handle: int | None = None

    def take(self) -> None:
        """Acquire the lock; :class:`SpecError` if another run holds it. Without locks on this system: do nothing."""
        while fcntl is not None and self._handle is None:
            handle = os.open(self._file, os.O_CREAT | os.O_RDWR, 0o644)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # If its holder has just removed the file, a lock on that would exclude no other run: try again.
                if os.path.samestat(os.fstat(handle), os.stat(self._file)):
                    self._handle = handle
                    return
            except BlockingIOError:
                where = f"{option('out', self._folder)}: another run is writing there"
                raise SpecError(f"{where}; wait for it, or choose another {option('out')}") from None
            except FileNotFoundError:
                pass
            except OSError:  # a file system without locks
                return
            finally:
                if self._handle is None:
                    os.close(handle)

    def release(self) -> None:
        """Let others in."""
        if self._handle is not None:
            with suppress(OSError):
                self._file.unlink()
            os.close(self._handle)
            self._handle = None


# ---- Extend a run that is in a folder by seeds, settings or epochs, without repeating what is there.
#
# The members of the former run must be among those of the new one; they keep their weights and histories, and train on
# if they are to have more epochs. What a member ends with is what it would have had in one run, to the rounding of
# stacks.

MAY_DIFFER = ("name", "epochs")


def former_members(saved: Sequence[Mapping[str, Any]], tasks: Sequence[Task], file: Path) -> list[Task]:
    """For every task of the former run the one of ``tasks`` that has its settings, maybe with more epochs."""
    described = [(task, task.to_dict()) for task in tasks]
    members = []
    for entry in saved:
        for task, now in described:
            keys = [key for key in now if key not in MAY_DIFFER]
            if all(entry.get(key) == now[key] or (key not in entry and not now[key]) for key in keys):
                members.append(task)
                break
        else:
            raise SpecError(
                f"{file}: {entry.get('name') or entry['model']!r} is not in this sweep; extending keeps what is there, "
                f"so give all settings, the former ones too, or choose another {option('out')}"
            )
    return members


def lengthened(checkpoint: Checkpoint, tasks: Sequence[Task], place: Path) -> Checkpoint:
    """The checkpoint of a group whose ``tasks`` have as many epochs as before, or more."""
    saved = checkpoint.about.get("tasks", [])
    if len(saved) != len(tasks) or [entry["epochs"] for entry in saved] == [task.epochs for task in tasks]:
        return checkpoint
    tensors, members = dict(checkpoint.tensors), [dict(member) for member in checkpoint.about["members"]]
    length = max(task.epochs for task in tasks)
    for index, (entry, task) in enumerate(zip(saved, tasks, strict=True)):
        history = tensors[f"{index}.history"]
        more = history.new_full((max(length - history.shape[0], 0), history.shape[1]), torch.nan)
        tensors[f"{index}.history"] = torch.cat([history, more])
        if task.epochs != entry["epochs"] and members[index]["status"] in (RUNNING, "finished"):
            _check_more_epochs(task, entry["epochs"], int(checkpoint.about["epoch"]), members[index]["status"], place)
            members[index]["status"] = RUNNING
            tensors[f"{index}.end"] = torch.full_like(tensors[f"{index}.end"], task.epochs)
    described = [{**entry, "epochs": task.epochs} for entry, task in zip(saved, tasks, strict=True)]
    about = {**checkpoint.about, "tasks": described, "members": members, "finished": False}
    return replace(checkpoint, tensors=tensors, about=about)


def _check_more_epochs(task: Task, before: int, trained: int, status: str, place: Path) -> None:
    """A :class:`SpecError` where a longer training would not begin as this one did."""
    start = f"{place}: task {task.label!r} cannot go from {before} to {task.epochs} epochs: "
    if task.epochs < before:
        raise SpecError(f"{start}it has trained them already; give at least {before}")
    if task.schedule != "constant":
        raise SpecError(f"{start}schedule={task.schedule!r} depends on how many there are; start afresh")
    if before % task.eval_every:
        raise SpecError(
            f"{start}it was evaluated after the last one, which eval_every={task.eval_every} would not do on the way; "
            "start afresh"
        )
    if status == "finished" and trained != before:
        raise SpecError(f"{start}its group trained {trained} and it has left the step; start afresh")


REPORT, SWEEP, JOURNAL, CALLS = "report.html", "sweep.json", "events.jsonl", "tuner.jsonl"
FILES = (JOURNAL, FILE, *RESULT_FILES, REPORT, SWEEP, CALLS)
INSIDE = (f"groups/*/{FILE}", *(f"tasks/*/{name}" for name in RESULT_FILES))

MOST_UNWRITTEN = 10_000  # lines of a journal that are kept while the disk is full

Groups = list[tuple[str, Plan]]  # what to train: a key that names the folder of the checkpoint, and the plan


def holds_run(path: Path) -> bool:
    """Whether there is something in ``path`` that a new run there would delete."""
    return any((path / name).exists() for name in FILES) or any(any(path.glob(pattern)) for pattern in INSIDE)


class RunFolder:
    """The folder of one task. Nothing in it is touched before :meth:`open`, when the run is known to be sound.

    ``extends``: the run there may have had fewer epochs, or fewer members. ``former_task``: settings of the task there,
    once its groups are read: what it leaves open is not decided anew.
    """

    def __init__(self, path: Path, extends: bool = False) -> None:
        self.path, self._extends = path, extends
        self.former_task: dict[str, Any] = {}
        self.opened = False  # whether this run writes here: something has begun
        self._renamed: dict[str, str] = {}  # members of a run that is extended, to the names that they have now
        self._lock = FolderLock(path)
        self._unwritten: list[str] = []  # lines of the journal: from before it was opened, or that found a full disk
        there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
        if not there.is_dir():
            raise SpecError(f"{option('out', path)}: cannot be made a folder ({there} is a file); choose another one")
        if not os.access(there, os.W_OK | os.X_OK):
            raise SpecError(f"{option('out', path)}: {there} cannot be written to; choose another folder")

    def open(self, afresh: bool) -> None:
        """Make the folder; ``afresh`` removes what a former run left, so that nothing is taken for this one's."""
        if self.opened:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.take()
            if afresh:
                for name in FILES:
                    (self.path / name).unlink(missing_ok=True)
                for pattern in INSIDE:
                    for file in self.path.glob(pattern):
                        file.unlink()
                        if not any(file.parent.iterdir()):
                            file.parent.rmdir()
            path = self.path / JOURNAL
            if path.exists():
                text = path.read_bytes()
                if not text.endswith(b"\n"):
                    os.truncate(path, text.rfind(b"\n") + 1)
        except OSError as error:
            where = option("out", self.path)
            raise SpecError(f"{where}: cannot be written to ({error.strerror}); choose another") from None
        self.opened = True
        self._write_journal()

    def check_free(self) -> None:
        """Refuse a folder that holds a run: another one that writes there, or one that this would delete."""
        if (self.path / LOCK_FILE).exists():
            self._lock.take()
            self._lock.release()
        if holds_run(self.path):
            raise SpecError(
                f"{option('out', self.path)}: holds a run already; go on with it ({switch('resume')}), "
                f"add to it ({switch('extend')}), delete it ({switch('overwrite')}), or choose another {option('out')}"
            )

    def close(self) -> None:
        """Let other runs in."""
        self._lock.release()

    def journal(self, event: Event) -> None:
        """Append one line; what cannot be written now is, in order, with a later one."""
        self._unwritten.append(event.to_json() + "\n")
        del self._unwritten[:-MOST_UNWRITTEN]
        if self.opened:
            self._write_journal()

    def _write_journal(self) -> None:
        path, whole = self.path / JOURNAL, 0
        try:
            whole = path.stat().st_size if path.exists() else 0
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(self._unwritten)
        except OSError:  # a full disk must not end a training, nor leave half a line
            with suppress(OSError):
                os.truncate(path, whole)
        else:
            self._unwritten.clear()

    def last_stamp(self) -> tuple[str, int]:
        """The id of the run in this folder and the number of its last event; ``""`` and 0 if there is none."""
        with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
            last = json.loads(self._journal_lines()[-1])
            return str(last["run"]), int(last["seq"])
        return "", 0

    def _journal_lines(self) -> list[bytes]:
        return (self.path / JOURNAL).read_bytes().split(b"\n")[:-1]  # what follows the last newline is torn

    def former_events(self) -> list[Event]:
        """What the journal has of the run in this folder."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return [Event.from_dict(json.loads(line)) for line in self._journal_lines()]
        return []

    def sent(self) -> dict[tuple[str, str], int]:
        """The last epoch of every member that the journal has, by kind of event and the names that members have now."""
        sent: dict[tuple[str, str], int] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            for line in self._journal_lines():
                if not line.startswith((b'{"event": "rows"', b'{"event": "log"')):
                    continue
                event = json.loads(line)
                for part in event.get("members", [event]):
                    last = part["first"] - 1 + len(part["rows"]) if "rows" in part else part["epoch"]
                    key = (event["event"], self._renamed.get(part["task"], part["task"]))
                    sent[key] = max(sent.get(key, 0), last)
        return sent

    # ---- what a former run left ----------------------------------------------------------------------

    def saved_groups(self) -> Groups | None:
        """The groups to go on with, where a former run left something to go on with."""
        if (self.path / SWEEP).exists():
            raise SpecError(
                f"{self.path}: holds a sweep, not one task; resume with its settings, or choose another {option('out')}"
            )
        checkpoint = read_checkpoint(self.path)
        if checkpoint is None:
            return None
        for task in checkpoint.about.get("tasks", [])[:1]:
            self.former_task = {**task, "mode": "sampled" if task.get("mode") == "sampled" else "full"}
        return []

    def checkpoint_of(self, key: str, tasks: Sequence[Task]) -> Checkpoint | None:
        """The checkpoint to resume the group ``key`` from; refuses one of other tasks."""
        folder = self.place(key)
        checkpoint = read_checkpoint(folder)
        if checkpoint is not None and self._extends:
            checkpoint = lengthened(checkpoint, tasks, folder / FILE)
        if checkpoint is not None:
            saved, file = checkpoint.about.get("tasks", []), folder / FILE
            if len(saved) != len(tasks):
                raise SpecError(f"{file}: holds {len(saved)} tasks, not {len(tasks)}; choose another {option('out')}")
            for entry, task in zip(saved, tasks, strict=True):
                check_same_task(entry, task.to_dict(), file)
        return checkpoint

    def has_checkpoint(self, key: str) -> bool:
        """Whether there is one of the group ``key``."""
        return (self.place(key) / FILE).exists()

    def place(self, key: str) -> Path:
        """The folder of a group's checkpoint."""
        return self.path

    def of_member(self, name: str) -> Path:
        """The folder of a member's result and weights."""
        return self.path

    # ---- what this run leaves ------------------------------------------------------------------------

    def save_groups(self, groups: Groups) -> None:
        """A task is its own group: nothing to write down."""

    def save_state(self, key: str, group: GroupRun, about: dict[str, Any]) -> Path:
        """Write the group's state as it is now."""
        about = {"tasks": [task.to_dict() for task in group.tasks], "epoch": group.epoch, **about}
        about |= {"graph": group.graph.stats().to_dict(), **described(group.built)}
        about["sampler"] = group.plan.places.sampler
        with self.writing():
            return write_checkpoint(self.place(key), group.tensors(), about)

    def save_members(self, results: Sequence[Result]) -> None:
        """Write what the task left behind."""
        (result,) = results
        with self.writing():
            result.write(self.path)
        self.save_report(result)

    def save_report(self, result: Result) -> None:
        """Write the page about the training, over or not; there is nothing to show before its first epoch."""
        from weft.engine.page import render_report

        if result.history and "metric" in result.metrics:
            with self.writing():
                write_text(self.path / REPORT, render_report(result))

    def check_data(self, checkpoint: Checkpoint, graph: Graph, sampler: str) -> None:
        """Refuse a checkpoint of another graph, by sizes, splits and degrees, or of batches of another ``sampler``."""
        if (drawn := checkpoint.about.get("sampler", "default")) != sampler:
            raise SpecError(f"{self.path}: batches were drawn by sampler={drawn!r}, not {sampler!r}; resume with that")
        before, now = checkpoint.about.get("graph"), json.loads(json.dumps(graph.stats().to_dict()))
        # What only one of two versions of Weft wrote down says nothing of the graph.
        if before is not None and any(before[name] != now[name] for name in before.keys() & now.keys()):
            raise SpecError(
                f"{self.path}: was trained on another graph {graph.name!r} ({before['num_nodes']:,} nodes, "
                f"{before['num_edges']:,} edges) than is there now ({graph.num_nodes:,} nodes, {graph.num_edges:,} "
                f"edges, or other degrees or splits); bring it back, or choose another {option('out')} to start afresh"
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A full disk, or one taken away, is one sentence."""
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"cannot write to {self.path}: {write_reason(error)}; every file there is whole: free space, then "
                f"{switch('resume')}"
            ) from error


class SweepFolder(RunFolder):
    """The folder of a sweep."""

    def __init__(self, path: Path, sweep: Sweep, extends: bool = False) -> None:
        super().__init__(path, extends)
        self._sweep = sweep
        self._former: list[Path] = []  # folders of members that have other names now
        names = [task.label for task in sweep]
        self._names = dict(zip(names, folder_names(names), strict=True))

    def place(self, key: str) -> Path:
        return self.path / "groups" / key

    def of_member(self, name: str) -> Path:
        return self.path / "tasks" / self._names[name]

    def saved_groups(self) -> Groups | None:
        file = self.path / SWEEP
        if not file.exists():
            if (self.path / FILE).exists():
                raise SpecError(f"{self.path}: holds the run of one task, not a sweep; choose another {option('out')}")
            return None
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            check_format(data, file)
            saved, groups = data["tasks"], [(entry["key"], Plan.from_dict(entry["plan"])) for entry in data["groups"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecError(f"{file}: damaged ({error}); remove it to start afresh") from None
        tasks = self._sweep.tasks()
        if self._extends:
            # Members of the former run go by the names that they have now.
            before = [entry.get("name") or entry["model"] for entry in saved]
            labels = (task.label for task in former_members(saved, tasks, file))
            now, names = dict(zip(before, labels, strict=True)), set(self._names.values())
            self._renamed = now
            self._former = [self.path / "tasks" / name for name in folder_names(before) if name not in names]
            return [(key, replace(plan, members=tuple(now[name] for name in plan.members))) for key, plan in groups]
        if len(saved) != len(tasks):
            raise SpecError(
                f"{file}: has {len(saved)} tasks, but this sweep has {len(tasks)}; "
                f"resume with the same settings, or choose another {option('out')} to start afresh"
            )
        for entry, task in zip(saved, tasks, strict=True):
            check_same_task(entry, task.to_dict(), file)
        return groups

    def open(self, afresh: bool) -> None:
        """As :meth:`RunFolder.open`; members that have another name now are written under it."""
        super().open(afresh)
        for folder in self._former:
            shutil.rmtree(folder, ignore_errors=True)

    def save_groups(self, groups: Groups) -> None:
        """Write down who trains with whom, so that a later run finds their checkpoints."""
        data = {
            "format": FORMAT,
            "version": __version__,
            "sweep": self._sweep.to_dict(),
            "tasks": [task.to_dict() for task in self._sweep],
            "groups": [{"key": key, "plan": plan.to_dict()} for key, plan in groups],
        }
        with self.writing():
            write_json(self.path / SWEEP, data)

    def save_members(self, results: Sequence[Result]) -> None:
        """Write what the members of a group left behind."""
        with self.writing():
            for result in results:
                result.write(self.of_member(result.name))

    def save_sweep(self, result: SweepResult) -> None:
        """Write what the sweep left behind as a whole."""
        with self.writing():
            write_json(self.path / "result.json", result.to_dict())
        self.save_report(result)

    def save_report(self, result: SweepResult) -> None:  # type: ignore[override]
        """Write the page about the sweep, over or not."""
        from weft.engine.page import render_sweep_report

        with self.writing():
            write_text(self.path / REPORT, render_sweep_report(result))
