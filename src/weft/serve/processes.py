"""What a worker and the processes that its model has started hold and compute, as Linux says in /proc."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path

SHARED = Path("/dev/shm")


def children(pid: int) -> set[int]:
    """The processes whose parent is ``pid``."""
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found.update(map(int, file.read_text().split()))
    return found


def computing(worker: int) -> tuple[list[int], float]:
    """A worker and all processes below it, and the seconds that they have computed."""
    pids, ticks = [worker], 0
    for pid in pids:  # grows
        pids += children(pid)
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return pids, ticks / os.sysconf("SC_CLK_TCK")


def held_bytes(pids: list[int]) -> int:
    """The bytes that a worker, the first of ``pids``, and the processes below it hold together.

    Of memory that a worker shares with its children each page counts once. Shared memory counts also if none of them
    maps it, as far as it is in segments that are named after the worker. Reading it takes 3 ms per 100 MiB of children.
    """
    own, shared, segments = 0, 0, 0
    for pid in pids:
        with suppress(OSError):
            text = Path(f"/proc/{pid}/{'status' if pid == pids[0] else 'smaps_rollup'}").read_text()
            sizes = {name: int(words[0]) << 10 for name, *words in map(str.split, text.splitlines()) if "kB" in words}
            own += sizes.get("RssAnon:", 0) + sizes.get("Pss_Anon:", 0)
            shared += sizes.get("RssShmem:", 0) + sizes.get("Pss_Shmem:", 0)
    for file in SHARED.glob(f"{_prefix(pids[0])}*"):
        with suppress(OSError):
            segments += file.stat().st_blocks * 512
    return own + max(shared, segments)


def give_way(pids: list[int]) -> None:
    """Let all others compute first; Linux shares cores among sessions, then among the processes of each."""
    for pid in pids:
        with suppress(OSError):
            os.setpriority(os.PRIO_PGRP, os.getpgid(pid), 19)
            Path(f"/proc/{pid}/autogroup").write_text("19")


# ---- Segments of shared memory are named after their worker, so that they are counted with it and removed after it.


def name_segments() -> None:
    """Name those that this process and its forks make from now on."""
    prefix = _prefix(os.getpid())
    shared_memory._make_filename = lambda: f"/{prefix}{secrets.token_hex(8)}"  # type: ignore[attr-defined]


def remove_segments() -> None:
    """Remove those of workers that have ended."""
    for file in SHARED.glob(f"{_prefix('*')}*"):
        if not os.path.exists(f"/proc/{file.name.split('-')[2]}"):
            file.unlink(missing_ok=True)


def _prefix(pid: int | str) -> str:
    space = Path("/proc/self/ns/pid")  # containers may share the folder, and each has numbers of its own
    return f"weft-{space.stat().st_ino if space.exists() else 0}-{pid}-"
