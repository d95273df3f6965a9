"""Launch: start the ranks of a run. This process is rank 0; the others are spawned, or torchrun has started them all.

A rank that dies is noticed by the ranks that wait for it (:mod:`weft.dist.peer_memory`) and named here with the reason.
Whatever happens, no process is left behind.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import current_process
from pathlib import Path
from typing import Any

import torch

from weft.core import errors
from weft.core.errors import SpecError, TrainingError, WeftError
from weft.core.host_memory import free_host_bytes
from weft.core.units import show_bytes
from weft.dist.peer_memory import RankLostError, check_peers
from weft.dist.ranks import TIMEOUT, RankAddress, Ranks

Worker = Callable[..., None]
JOIN_SECONDS = 5.0
RANK_BYTES = 290_000_000  # of its own that a process has after training a small graph; 10,000 such filled a host
STARTED_AGAIN = 87  # the exit code of a rank whose import of the user's script starts a run


def leave_if_imported_by_a_rank() -> None:
    """End this process if it is a rank that still imports the script that started it: the script has no guard."""
    process = current_process()
    if process.name.startswith("weft rank") and getattr(process, "_inheriting", False):
        raise SystemExit(STARTED_AGAIN)


def under_torchrun() -> bool:
    """Whether torchrun (or another launcher of its kind) started this process as one of several ranks."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def is_first_rank() -> bool:
    """Whether this process reports and saves: always, unless torchrun started it as another rank than 0."""
    return not under_torchrun() or os.environ["RANK"] == "0"


_CHOSEN: ContextVar[tuple[str, ...]] = ContextVar("devices of ranks", default=())


@contextmanager
def ranks_on(devices: tuple[str, ...]) -> Iterator[None]:
    """Runs inside have their ranks on ``devices``, one per rank; on a CPU each has the threads of this process."""
    chosen, threads = _CHOSEN.set(devices), torch.get_num_threads()
    torch.set_num_threads(threads * max(len(devices), 1))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _CHOSEN.reset(chosen)


def devices_for(ranks: int, device: torch.device) -> tuple[list[str], bool]:
    """The device of every rank, and whether no two share one. ``cuda`` spreads ranks over all GPUs, ``cuda:0`` not."""
    if chosen := _CHOSEN.get():
        return list(chosen), device.type == "cuda" and len(set(chosen)) == ranks > 1
    if device.type != "cuda" or device.index is not None:
        return [str(device)] * ranks, False
    count = torch.cuda.device_count()
    if not count:
        raise SpecError("device='cuda': no GPU is visible here; use device='cpu'")
    return [f"cuda:{rank % count}" for rank in range(ranks)], 1 < ranks <= count


@contextmanager
def start_ranks(
    count: int,
    device: torch.device,
    worker: Worker,
    arguments: tuple[Any, ...] = (),
    timeout: float = TIMEOUT,
    peers: str = "auto",
) -> Iterator[Ranks]:
    """This process as rank 0 of ``count``; the others run ``worker(ranks, *arguments)`` in processes of their own.

    ``peers``: the kind of memory that peers read (:data:`weft.dist.peer_memory.PEERS`).
    Inside torchrun the ranks are there already, and this process is the one that it was started as.
    """
    if under_torchrun():
        world, rank, where, distinct = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), str(device), False
        if count != world:
            raise SpecError(f"ranks={count}, but torchrun started {world}; request {world}, or start {count}")
        if device.type == "cuda":
            gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", rank))
            where, distinct = f"cuda:{local % max(gpus, 1)}", world <= gpus
        with Ranks(RankAddress(rank, world, "env://", where, distinct, timeout, peers=peers)) as ranks:
            yield ranks
        return
    if (count - 1) * RANK_BYTES > (free := free_host_bytes()):
        raise SpecError(
            f"ranks={count}: every rank is a process that takes at least {show_bytes(RANK_BYTES)} of host memory, and "
            f"{show_bytes(free)} are free; request at most {1 + free // RANK_BYTES}"
        )
    devices, distinct = devices_for(count, device)
    meeting = Path(tempfile.gettempdir()) / f"weft-ranks-{uuid.uuid4().hex}"
    check_peers(peers, device, distinct)  # before processes are started
    addresses = [
        RankAddress(rank, count, f"file://{meeting}", where, distinct, timeout, peers=peers)
        for rank, where in enumerate(devices)
    ]
    threads = torch.get_num_threads()
    children = _Children(addresses[1:], worker, arguments, max(1, threads // count))
    if device.type == "cpu":
        torch.set_num_threads(max(1, threads // count))
    try:
        with Ranks(addresses[0]) as ranks:
            yield ranks
            ranks.release()  # other ranks wait for this one to do so, and it must not wait for their ends before
            children.join()
    except (RankLostError, TrainingError) as error:
        raise children.explain(error) from None
    finally:
        torch.set_num_threads(threads)
        children.end()
        meeting.unlink(missing_ok=True)


class _Children:
    """The processes of the other ranks; a thread watches them, so that none stays a zombie that looks alive."""

    def __init__(self, addresses: list[RankAddress], worker: Worker, arguments: tuple[Any, ...], threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        try:
            payload = pickle.dumps(arguments)
        except Exception as error:
            raise SpecError(
                f"ranks: what is to be trained cannot be sent to other processes ({error}); give graphs by name or "
                "as a saved folder, and define models at the top level of a module"
            ) from None
        self._ranks, self._lines, self._processes = [a.rank for a in addresses], [], []
        for address in addresses:
            mine, theirs = context.Pipe(duplex=False)
            of_rank, name = (address, worker, payload, theirs, threads), f"weft rank {address.rank}"
            process = context.Process(target=_run_rank, args=of_rank, name=name, daemon=True)
            process.start()
            theirs.close()
            self._lines.append(mine)
            self._processes.append(process)
        for rank, mine, process in zip(self._ranks, self._lines, self._processes, strict=True):
            mine.poll(None)  # until it has started, or is gone
            try:
                mine.recv()
            except EOFError:
                process.join(JOIN_SECONDS)  # its own exit code, before the others are ended
                self.end_all()
                if (process.exitcode or 0) < 0:
                    reason = f"was killed before it had started (signal {-process.exitcode})"
                    raise RankLostError(f"rank {rank} of {len(addresses) + 1} {reason}", rank) from None
                raise SpecError(
                    f"ranks={len(addresses) + 1}: the processes of the other ranks import this script, which starts "
                    "the run again as they do; put what starts it under if __name__ == '__main__':"
                    if process.exitcode == STARTED_AGAIN
                    else f"{process.name} ended before it had started (exit code {process.exitcode})"
                ) from None
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="weft ranks", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            for process in self._processes:
                process.is_alive()  # takes note of the end of one

    def join(self) -> None:
        """Wait for the ends of all; an error if one failed."""
        # Two threads that wait for one process: the second may find no exit code although the process ended well.
        self._stop.set()
        self._watcher.join()
        for rank, process in zip(self._ranks, self._processes, strict=True):
            process.join(JOIN_SECONDS * 12)
            if process.exitcode != 0:
                raise RankLostError(f"rank {rank} did not end as it should", rank)

    def explain(self, error: TrainingError) -> WeftError:
        """``error``, or the error that a rank that failed first sent."""
        lost = error if isinstance(error, RankLostError) else None
        for line, process in zip(self._lines, self._processes, strict=True):
            try:
                seconds = 2.0 if lost is not None and process.exitcode is None else 0.0
                kind, message = line.recv() if line.poll(seconds) else ("", "")
            except (EOFError, OSError):
                continue
            if kind and kind != RankLostError.__name__:
                return getattr(errors, kind, TrainingError)(message)
        if lost is None:
            return error
        # Wait a moment for the exit code of a rank that is gone: another rank may have noticed before.
        gone = [process for number, process in zip(self._ranks, self._processes, strict=True) if number == lost.rank]
        until = time.monotonic() + JOIN_SECONDS
        while any(process.exitcode is None for process in gone) and time.monotonic() < until:
            time.sleep(0.02)
        for rank, process in zip(self._ranks, self._processes, strict=True):
            code = process.exitcode
            if code is not None and code < 0:
                name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
                return RankLostError(f"rank {rank} of {len(self._ranks) + 1} was killed ({name})", rank)
        return lost

    def end(self) -> None:
        """End every process that is still alive, and their watcher."""
        self.end_all()
        self._stop.set()
        self._watcher.join(JOIN_SECONDS)

    def end_all(self) -> None:
        """End every process that is still alive."""
        for process in self._processes:
            process.join(0.5)
            for end in (process.terminate, process.kill):
                if process.is_alive():
                    end()
                    process.join(JOIN_SECONDS)


def _run_rank(address: RankAddress, worker: Worker, payload: bytes, line: Any, threads: int) -> None:
    """The life of a rank that was spawned."""
    line.send("started")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what an interruption means
    if address.device == "cpu":
        torch.set_num_threads(threads)
    try:
        with Ranks(address) as ranks:
            worker(ranks, *pickle.loads(payload))
    except BaseException as error:
        expected = isinstance(error, WeftError)
        message = str(error) if expected else f"rank {address.rank}: {type(error).__name__}: {error}"
        line.send((type(error).__name__, message))
        if not expected and not isinstance(error, KeyboardInterrupt):
            traceback.print_exc(file=sys.stderr)
        os._exit(1)  # no clean-up that would wait for ranks that are gone
