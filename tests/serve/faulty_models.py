"""Models of a user that go wrong in every way, for the tests of the queue."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import shared_memory
from pathlib import Path

import torch
from torch import nn

import weft


class Plain(nn.Module):
    """A model that works."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.conv = weft.nn.GCNConv(in_features, out_features)

    def forward(self, x, adj):
        return self.fault(self.conv(x, adj))

    def fault(self, y):
        """What goes wrong in a forward pass; nothing in a dry run, which has no data."""
        return y if y.is_meta else self.go_wrong(y)

    def go_wrong(self, y):
        return y


class Slow(Plain):
    """Takes longer than predicted."""

    def go_wrong(self, y):
        time.sleep(0.08)
        return y


class CountsFrozen(Plain):
    """Says how many objects Python's garbage collections leave out."""

    def go_wrong(self, y):
        print("frozen", gc.get_freeze_count())
        return y


class Counts(Plain):
    """Counts its steps in an attribute, and depends on how many there were."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.steps = 0

    def go_wrong(self, y):
        self.steps += self.training
        return y / (1 + self.steps)


class Raises(Plain):
    def go_wrong(self, y):
        print("about to raise")
        raise ValueError("on purpose")


class TurnsNaN(Plain):
    def go_wrong(self, y):
        return y * float("nan")


class NoMemory(Plain):
    def go_wrong(self, y):
        raise torch.OutOfMemoryError("no memory, on purpose")


class NoMemoryOnce(Plain):
    """Runs out of memory until a file is there that the first failure makes."""

    def go_wrong(self, y):
        path = Path(os.environ["WEFT_TEST_FOLDER"]) / "failed-once"
        if not path.exists():
            path.touch()
            raise torch.OutOfMemoryError("no memory, on purpose")
        return y


class Leaks(Plain):
    kept: list[torch.Tensor] = []  # noqa: RUF012

    def go_wrong(self, y):
        Leaks.kept.append(torch.ones(64 << 20, dtype=torch.uint8))
        time.sleep(0.1)
        return y


class LeaksSmall(Plain):
    """Small tensors only: each is far below what an allocator asks the system for at once."""

    kept: list[torch.Tensor] = []  # noqa: RUF012

    def go_wrong(self, y):
        try:
            LeaksSmall.kept += [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(1_000)]
        except (MemoryError, RuntimeError):
            LeaksSmall.kept.clear()  # what is held on a busy machine until this is reported would be ended by the watch
            raise
        return y


class LeaksSmallOnDevice(Plain):
    kept: list[torch.Tensor] = []  # noqa: RUF012

    def go_wrong(self, y):
        LeaksSmallOnDevice.kept += [torch.ones(64 << 10, dtype=torch.uint8, device=y.device) for _ in range(6_400)]
        return y


class LeavesBehind(Plain):
    """Trains well, and leaves 300 MiB on the device, where nobody looks for what a model keeps."""

    def go_wrong(self, y):
        if not hasattr(sys, "left_by_a_model"):
            sys.left_by_a_model = torch.ones(300 << 20, dtype=torch.uint8, device=y.device)
        return y


class BreaksDevice(Plain):
    """An index out of range, which a GPU finds in a kernel: from then on every call to it fails in this process."""

    def go_wrong(self, y):
        return y + y[torch.full((y.shape[0],), 1 << 30, device=y.device)]


class UsesRelu(Plain):
    def forward(self, x, adj):
        return nn.functional.relu(self.conv(x, adj)) - 0.1


class ChangesDefaultDtype(Plain):
    def go_wrong(self, y):
        torch.set_default_dtype(torch.float64)
        return y


class ChangesDefaultDtypeWhenBuilt(Plain):
    """Does so wherever it is built, the planner included."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        torch.set_default_dtype(torch.float64)


class ReplacesRelu(Plain):
    def go_wrong(self, y):
        nn.functional.relu = torch.relu = lambda x, inplace=False: x
        return y


class TurnsGradientsOff(Plain):
    def go_wrong(self, y):
        torch.set_grad_enabled(False)
        return y.detach().requires_grad_()


class LowersLimits(Plain):
    def go_wrong(self, y):
        resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
        sys.setrecursionlimit(120)
        return y


def nothing(*_, **__):
    """A function that is no good as anything, and does no harm."""


class Hangs(Plain):
    def go_wrong(self, y):
        while True:
            time.sleep(0.1)


class HangsWhenPlanned(Plain):
    """Never returns from a dry run, which is what a planner makes of it."""

    def fault(self, y):
        while y.is_meta:
            time.sleep(0.1)
        return y


class HangsInSecondCall(Plain):
    """Returns once, wherever it is called."""

    calls = 0

    def fault(self, y):
        HangsInSecondCall.calls += 1
        if HangsInSecondCall.calls > 1:
            time.sleep(1000.0)
        return y


class Exits(Plain):
    def go_wrong(self, y):
        os._exit(7)


def leave_children() -> None:
    """A process in the session of this one, and one that has left it; both write down who they are and wait."""
    for leaves in (False, True):
        if os.fork() == 0:
            if leaves:
                os.setsid()
            (Path(os.environ["WEFT_TEST_FOLDER"]) / f"child-{os.getpid()}").touch()
            time.sleep(1000.0)
            os._exit(0)
    while len(list(Path(os.environ["WEFT_TEST_FOLDER"]).glob("child-*"))) < 2:
        time.sleep(0.01)


class ForksAndExits(Plain):
    def go_wrong(self, y):
        leave_children()
        os._exit(7)


class ForksAndHangs(Plain):
    def go_wrong(self, y):
        leave_children()
        while True:
            time.sleep(0.1)


class ForksAndReturns(Plain):
    def go_wrong(self, y):
        leave_children()
        ForksAndReturns.go_wrong = lambda self, y: y
        return y


class GoesOnInAChild(Plain):
    """Both processes train on: two would report on one task."""

    def go_wrong(self, y):
        os.fork()
        GoesOnInAChild.go_wrong = lambda self, y: y
        return y


class WritesToThePipe(Plain):
    """Writes the line of a file to every pipe of its process, as if its worker had."""

    def go_wrong(self, y):
        file = Path(os.environ["WEFT_TEST_FOLDER"]) / "line"
        while not file.exists():
            time.sleep(0.01)
        line = file.read_bytes() + b"\n"
        for name in os.listdir("/proc/self/fd"):
            place = Path("/proc/self/fd", name)
            if int(name) > 2 and os.path.lexists(place) and os.readlink(place).startswith("pipe:"):
                with suppress(OSError):
                    os.write(int(name), line)
        time.sleep(0.5)
        return y


def parent_of(pid: int) -> int:
    """The process that started another."""
    return int(Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])


def kill_server() -> None:
    """Kill the parent of the spawner that this process was forked from."""
    os.kill(parent_of(os.getppid()), signal.SIGKILL)
    time.sleep(1000.0)


class KillsServer(Plain):
    def go_wrong(self, y):
        kill_server()


class KillsServerWhenPlanned(Plain):
    def fault(self, y):
        return kill_server() if y.is_meta else y


class LeavesPython(Plain):
    def go_wrong(self, y):
        raise SystemExit("had enough")


class LeavesPythonWhenBuilt(Plain):
    def __init__(self, in_features: int, out_features: int) -> None:
        raise SystemExit("had enough")


class Crashes(Plain):
    def go_wrong(self, y):
        os.kill(os.getpid(), signal.SIGSEGV)


def exits_when_built(in_features: int, out_features: int) -> nn.Module:
    """Ends the process that builds it, the planner's included."""
    os._exit(8)


class NamesAFile(Plain):
    """Raises an error that names a file whose name is no Unicode."""

    def go_wrong(self, y):
        raise ValueError("cannot read " + os.fsdecode(b"caf\xe9.txt"))


class Prints(Plain):
    """Prints 8 MiB, then waits until a file is there."""

    def go_wrong(self, y):
        for _ in range(128):
            os.write(1, b"x" * (1 << 16))
        while not (Path(os.environ["WEFT_TEST_FOLDER"]) / "go").exists():
            time.sleep(0.01)
        return y


class HangsInC(Plain):
    """Ignores signals, and never returns from a call that holds Python's lock."""

    def go_wrong(self, y):
        (Path(os.environ["WEFT_TEST_FOLDER"]) / "hangs").touch()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ctypes.PyDLL(None).sleep(1000)


class StartsThreads(Plain):
    def go_wrong(self, y):
        for _ in range(4):
            threading.Thread(target=time.sleep, args=(1000.0,)).start()
        return y


class ClosesFiles(Plain):
    def go_wrong(self, y):
        os.closerange(0, 256)
        return y


class WritesGarbage(Plain):
    """Writes what is no message to every file that its process has open."""

    def go_wrong(self, y):
        for number in range(3, 64):
            with suppress(OSError):
                os.set_blocking(number, False)
                os.write(number, b"garbage\n")
        return y


class FillsOutput(Plain):
    def go_wrong(self, y):
        for _ in range(64):
            print("x" * (1 << 16))
        return y


class TakesSharedMemory(Plain):
    def go_wrong(self, y):
        shared_memory.SharedMemory(create=True, size=32 << 20)
        return y


class HangsWhenBuilt(Plain):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        time.sleep(1000.0)


class StopsItself(Plain):
    def go_wrong(self, y):
        os.kill(os.getpid(), signal.SIGSTOP)


class KillsSpawner(Plain):
    def go_wrong(self, y):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000.0)


class KillsSpawners(Plain):
    """Kills every spawner of the server that it belongs to, as soon as there is one."""

    def go_wrong(self, y):
        server = parent_of(os.getppid())
        while True:
            for folder in Path("/proc").glob("[0-9]*"):
                with suppress(OSError, IndexError):
                    spawns = b"weft.serve.spawner" in (folder / "cmdline").read_bytes()
                    if spawns and parent_of(int(folder.name)) == server and int(folder.name) != os.getpid():
                        os.kill(int(folder.name), signal.SIGKILL)
            time.sleep(0.02)


class ChangesFolder(Plain):
    def go_wrong(self, y):
        os.chdir("/")
        return y


class ChangesEnvironment(Plain):
    def go_wrong(self, y):
        os.environ.clear()
        return y


class IgnoresSignals(Plain):
    def go_wrong(self, y):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            with suppress(ValueError):
                signal.signal(number, signal.SIG_IGN)
        return y


class DeletesItsFolder(Plain):
    def go_wrong(self, y):
        log = Path(os.readlink("/proc/self/fd/1"))
        if log.name == "log.txt":
            shutil.rmtree(log.parent, ignore_errors=True)
        return y


class SeedsTorch(Plain):
    def go_wrong(self, y):
        torch.manual_seed(0)
        return y


class ChangesThreads(Plain):
    def go_wrong(self, y):
        torch.set_num_threads(7)
        torch.use_deterministic_algorithms(True)
        return y


class EmptiesModules(Plain):
    def go_wrong(self, y):
        sys.modules.clear()
        return y


class Recurses(Plain):
    def go_wrong(self, y):
        return self.go_wrong(y)


class ReturnsNothing(Plain):
    def go_wrong(self, y):
        return None


class ReturnsOtherShape(Plain):
    def go_wrong(self, y):
        return y[:3]


def spin(seconds: float) -> None:
    """Compute without Python's lock."""
    end, x = time.monotonic() + seconds, torch.ones(200, 200)
    while time.monotonic() < end:
        x = x @ x * 0.0


class SpinsInThreads(Plain):
    """Far more threads that compute than there are cores, for as long as it trains."""

    def go_wrong(self, y):
        SpinsInThreads.go_wrong = lambda self, y: (time.sleep(0.3), y)[1]
        for _ in range(64):
            threading.Thread(target=spin, args=(20.0,), daemon=True).start()
        return y


class SpinsInChildren(Plain):
    def go_wrong(self, y):
        SpinsInChildren.go_wrong = lambda self, y: (time.sleep(0.3), y)[1]
        for _ in range(16):
            if os.fork() == 0:
                end = time.monotonic() + 20.0
                while time.monotonic() < end:
                    pass
                os._exit(0)
        return y


class SpinsInSessions(Plain):
    """Children that compute, each in a session of its own, so that no scheduler counts them together."""

    def go_wrong(self, y):
        SpinsInSessions.go_wrong = lambda self, y: (time.sleep(0.3), y)[1]
        for _ in range(16):
            if os.fork() == 0:
                os.setsid()
                end = time.monotonic() + 20.0
                while time.monotonic() < end:
                    pass
                os._exit(0)
        return y


class ForksMany(Plain):
    def go_wrong(self, y):
        ForksMany.go_wrong = lambda self, y: (time.sleep(0.3), y)[1]
        for _ in range(300):
            if os.fork() == 0:
                time.sleep(20.0)
                os._exit(0)
        return y


MOST_BLOCKS, BLOCK = 12, 256 << 20  # 3 GiB: a machine survives it, also if nothing ends the model


class FillsSharedMemory(Plain):
    """Segments that nobody unlinks, none of which stays mapped; once per process."""

    def go_wrong(self, y):
        FillsSharedMemory.go_wrong = lambda self, y: y
        for _ in range(MOST_BLOCKS):
            segment = shared_memory.SharedMemory(create=True, size=BLOCK)
            segment.buf[:] = bytes(BLOCK)
            segment.close()
            time.sleep(0.05)
        return y


class LeavesSharedMemory(Plain):
    """A segment that nobody unlinks, in a process that is killed."""

    def go_wrong(self, y):
        segment = shared_memory.SharedMemory(create=True, size=8 << 20)
        (Path(os.environ["WEFT_TEST_FOLDER"]) / "segment").write_text(segment.name)
        os.kill(os.getpid(), signal.SIGKILL)


class FillsMemoryOfChildren(Plain):
    """Children that each keep below the limit on a process, which they have inherited."""

    def go_wrong(self, y):
        FillsMemoryOfChildren.go_wrong = lambda self, y: (time.sleep(1.0), y)[1]
        for _ in range(7):
            if os.fork() == 0:
                kept = b"x" * (400 << 20)
                time.sleep(8.0)
                os._exit(not kept)
            time.sleep(0.4)  # so that it is noticed before all is taken: a second attempt may have what the first held
        return y


class FillsUnnamedMemory(Plain):
    """A file of memory that has no name in any folder."""

    def go_wrong(self, y):
        FillsUnnamedMemory.go_wrong = lambda self, y: y
        file = os.memfd_create("mine")
        os.ftruncate(file, MOST_BLOCKS * BLOCK)
        FillsUnnamedMemory.kept = mmap.mmap(file, MOST_BLOCKS * BLOCK)
        for _ in range(MOST_BLOCKS):
            FillsUnnamedMemory.kept.write(bytes(BLOCK))
            time.sleep(0.05)
        return y


class RaisesItsPriority(Plain):
    def go_wrong(self, y):
        RaisesItsPriority.go_wrong = lambda self, y: (spin(0.2), y)[1]
        with suppress(OSError):
            os.nice(-20)
        return y


class PinsItself(Plain):
    def go_wrong(self, y):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        spin(0.2)
        return y


class StopsItsParent(Plain):
    def go_wrong(self, y):
        os.kill(os.getppid(), signal.SIGSTOP)
        return y


class AsksItsParentToEnd(Plain):
    def go_wrong(self, y):
        os.kill(os.getppid(), signal.SIGTERM)
        return y


class WritesFiles(Plain):
    """Many files, and removes them again."""

    def go_wrong(self, y):
        folder = Path(os.environ["WEFT_TEST_FOLDER"]) / f"files-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        for number in range(2_000):
            (folder / str(number)).write_bytes(b"x" * 4096)
        shutil.rmtree(folder)
        return y


# What waits for a file of its test, counts, trains well, or takes more memory than a shared machine has to spare.
NEED_MORE = ("Plain", "CountsFrozen", "Counts", "UsesRelu", "WritesToThePipe", "NoMemoryOnce", "Leaks", "LeaksSmall")
NEED_MORE += ("LeaksSmallOnDevice", "LeavesBehind", "Prints")
