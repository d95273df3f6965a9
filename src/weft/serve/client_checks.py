"""What a user gives to the client, checked before anything is sent: ids, numbers, nodes, work, address and token."""

from __future__ import annotations

import math
import numbers
import operator
import os
import re
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.errors import InputError
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.units import parse_bytes
from weft.core.wording import option

AN_ID = re.compile(r"[0-9a-f]{1,64}")
LARGEST_PRIORITY = 1000
LARGEST = 2**63 - 1  # a number that the queue can hold
LARGEST_NODE = 2**62 - 1
SHOWN = 80  # characters of a value in a message
EXAMPLE = "http://127.0.0.1:8787"

TaskId = str | Mapping[str, Any]


def named(name: str, value: object) -> str:
    """``latency_target=nan``, in a shell ``--latency-target nan``; a long value is cut."""
    shell = option(name.replace("_", "-"))
    text = str(value) if shell.startswith("-") else repr(value)
    text = text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
    return f"{shell} {text}" if shell.startswith("-") else f"{name}={text}"


# ---- tasks -------------------------------------------------------------------------------------------------


def task_id(task: TaskId) -> str:
    """The id of a task, given as such or as the task that the server showed."""
    name = task.get("id") if isinstance(task, Mapping) else task
    if not isinstance(name, str):
        what = "a dict without an id" if isinstance(task, Mapping) else _kind(task)
        raise InputError(f"expected the id of a task, or a task as submit returns it, not {what}")
    if not AN_ID.fullmatch(name):
        raise InputError(f"there is no task {name[:SHOWN]!r}; ids are hexadecimal, such as 3f2a9c41d0be")
    return name


def task_ids(tasks: TaskId | Iterable[TaskId] | None) -> list[str]:
    """The ids of several tasks; one task is a list of one."""
    if tasks is None:
        return []
    if isinstance(tasks, (str, Mapping)):
        return [task_id(tasks)]
    if not isinstance(tasks, Iterable):
        raise InputError(f"expected ids of tasks, not {_kind(tasks)}")
    return [task_id(task) for task in tasks]


def work_of(work: Task | Sweep | Iterable[Task]) -> Task | Sweep | list[Task]:
    """``work``, if it is a task, a sweep or tasks."""
    if isinstance(work, (Task, Sweep)):
        return work
    expected = "expected a weft.Task, a weft.Sweep or a list of tasks"
    if isinstance(work, (str, bytes, Mapping)) or not isinstance(work, Iterable):
        hint = '; write it as weft.Task(graph="demo", model="gcn")' if isinstance(work, (str, Mapping)) else ""
        raise InputError(f"{expected}, not {_kind(work)}{hint}")
    tasks = list(work)
    for place, task in enumerate(tasks):
        if not isinstance(task, Task):
            raise InputError(f"{expected}; the one at place {place} is {_kind(task)}")
    return tasks


def one_task(task: Task | None) -> Task | None:
    """``task``, if it is one."""
    if task is not None and not isinstance(task, Task):
        raise InputError(f"task: expected a weft.Task, not {_kind(task)}")
    return task


def _kind(value: object) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


# ---- numbers -----------------------------------------------------------------------------------------------


def check_priority(priority: int) -> int:
    """A whole number that the server takes."""
    whole = _whole(priority)
    if whole is None or abs(whole) > LARGEST_PRIORITY:
        least = -LARGEST_PRIORITY
        raise InputError(f"{named('priority', priority)} must be a whole number from {least} to {LARGEST_PRIORITY}")
    return whole


def check_deadline(deadline: float | None) -> float | None:
    """A time."""
    if deadline is not None and not _is_finite(deadline):
        raise InputError(
            f"{named('deadline', deadline)} must be a time in seconds since 1970, such as time.time() + 3600"
        )
    return None if deadline is None else float(deadline)


def check_latency(seconds: float | None) -> float | None:
    """Seconds to an answer."""
    if seconds is not None and not (_is_finite(seconds) and seconds > 0):
        raise InputError(f"{named('latency_target', seconds)} must be a number of seconds above 0")
    return None if seconds is None else float(seconds)


def check_budget(budget: str | int | None) -> str | int | None:
    """An amount of memory, as it was given."""
    if budget is None:
        return None
    try:
        amount = parse_bytes(budget)
    except OverflowError:
        amount = LARGEST + 1
    if amount > LARGEST:
        raise InputError(f"{named('budget', budget)} is more memory than there is; write it like 24GiB")
    return budget


def check_nodes(nodes: str | Sequence[int] | None) -> str | list[int] | None:
    """The name of a split, or ids of nodes as plain numbers."""
    if nodes is None or isinstance(nodes, str):
        return nodes
    expected = "expected all, train, val, test, or ids such as [3, 5, 8]"
    if not isinstance(nodes, Iterable) or isinstance(nodes, (bytes, Mapping)):
        raise InputError(f"{named('nodes', nodes)}: {expected}")
    found = []
    for node in nodes:
        whole = _whole(node)
        if whole is None or not 0 <= whole <= LARGEST_NODE:
            raise InputError(f"nodes: {str(node)[:SHOWN]!r} is no id of a node; {expected}")
        found.append(whole)
    return found


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _whole(value: object) -> int | None:
    """``value`` as a plain whole number, also one of numpy or torch; None if it is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


# ---- where ---------------------------------------------------------------------------------------------------


def check_server(server: str) -> str:
    """The host of a server's address."""
    expected = f"server {str(server)[:SHOWN]!r}: expected an address such as {EXAMPLE}"
    if not isinstance(server, str) or not server.isprintable() or " " in server:
        raise InputError(expected)
    try:
        parts = urllib.parse.urlsplit(server)
        host, _ = parts.hostname, parts.port
    except ValueError as error:  # what stands for the port, or an open bracket
        raise InputError(f"{expected} ({error})") from None
    if parts.scheme not in ("http", "https") or not host:
        raise InputError(expected)
    return host


def read_token(given: str | os.PathLike[str] | None) -> str:
    """The token itself: of a file, the last word of its first line. Messages do not show it."""
    if given is None or given == "":
        return ""
    text = os.fspath(given) if isinstance(given, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise InputError(f"token: expected the token or the path of a file with one, not {_kind(given)}")
    if "\n" not in text.strip() and (os.sep in text or os.path.isfile(text)):
        return _usable(_in_file(text), f"token file {text}")
    return _usable(text.strip(), "token")


def _in_file(path: str) -> str:
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
        return next(line.split()[-1] for line in lines if line.strip() and not line.startswith("#"))
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"token file {path}: cannot be read ({error})") from None
    except StopIteration:
        raise InputError(f"token file {path}: has no token; `weft serve` writes one") from None


def _usable(token: str, what: str) -> str:
    """``token``, if a header of HTTP can hold it."""
    if any(character.isspace() or not character.isprintable() or ord(character) > 255 for character in token):
        raise InputError(f"{what}: has characters that no token has; it is one word of letters, digits, - and _")
    return token


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """A folder to write to, which may have to be made."""
    try:
        return Path(folder)
    except TypeError:
        raise InputError(f"folder: expected the path of a folder, not {_kind(folder)}") from None
