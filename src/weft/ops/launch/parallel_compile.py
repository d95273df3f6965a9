"""Compile versions of kernels in several processes at once, into Triton's cache on disk.

A kernel takes about a second to compile, of which little can overlap in one process. The children are forks, so they
have everything imported; they touch no GPU and end without running anything of the parent's. A version that cannot be
compiled is left to its launch, which raises what is wrong.
"""

from __future__ import annotations

import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft.core.keyed_store import KeyedStore, files_digest
from weft.ops.launch.backend import have_triton
from weft.ops.launch.hooks import KernelVersion
from weft.ops.launch.triton_lang import make

STALLED_SECONDS = 120.0  # without a result: the children are killed
INDEX_BYTES = 2


@dataclass(frozen=True)
class Compiled:
    """A version that is in Triton's cache now: its index in the list, the folder there, and how long it took."""

    index: int
    folder: str
    seconds: float


Progress = Callable[[int, int], None]


def can_compile_in_parallel() -> bool:
    """True if processes can be forked here."""
    return hasattr(os, "fork")


def compile_versions(
    versions: Sequence[KernelVersion], arch: int, processes: int, progress: Progress = lambda done, total: None
) -> list[Compiled]:
    """Compile ``versions`` for GPUs of compute capability ``arch`` (90), with ``progress(done, total)``."""
    # Versions with much code come first, so that none of them is left to the end alone.
    order = sorted(range(len(versions)), key=lambda index: -len(versions[index].kernel.fn.__code__.co_code))
    prepare_fork(arch)
    jobs, write = os.pipe()  # every child takes the next index, until it is empty
    os.write(write, b"".join(index.to_bytes(INDEX_BYTES, "big") for index in order))
    os.close(write)
    results = os.pipe()
    children = [_start(jobs, results, versions, arch) for _ in range(max(1, min(processes, len(versions))))]
    os.close(results[1])
    os.close(jobs)
    compiled: list[Compiled] = []
    text, done = b"", 0
    try:
        while done < len(versions):
            ready, _, _ = select.select([results[0]], [], [], STALLED_SECONDS)
            chunk = os.read(results[0], 1 << 16) if ready else b""
            if not chunk:
                break
            *lines, text = (text + chunk).split(b"\n")
            for line in lines:
                index, seconds, folder = line.decode().split("\t")
                done += 1
                if folder:
                    compiled.append(Compiled(int(index), folder, float(seconds)))
            progress(done, len(versions))
        return compiled
    finally:
        os.close(results[0])
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def prepare_fork(arch: int) -> None:
    """Import what every child needs, once."""
    import triton.backends.nvidia.compiler
    import triton.compiler

    key = getattr(triton.runtime.cache, "triton_key", None)
    if key is not None:
        key()  # which reads all of Triton, once for all children
    driver = getattr(triton.backends.nvidia, "driver", None)
    with suppress(Exception):  # finds libcuda with a process of its own, and remembers it
        driver.library_dirs()  # type: ignore[union-attr]


def _start(jobs: int, results: tuple[int, int], versions: Sequence[KernelVersion], arch: int) -> int:
    """Fork a child that compiles until there are no more jobs; returns its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forks with threads: a child takes no lock of theirs
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.close(results[0])
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        while data := os.read(jobs, INDEX_BYTES):
            index, begin, folder = int.from_bytes(data, "big"), time.perf_counter(), ""
            with suppress(Exception):
                folder = compile_version(versions[index], arch)
            os.write(results[1], f"{index}\t{time.perf_counter() - begin:.4f}\t{folder}\n".encode())
        code = 0
    finally:
        os._exit(code)  # nothing of the parent's is cleaned up here


# ---- In a child


class CompileOnly:
    """A driver of Triton that knows its target and has no device."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        """What to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """The number of a device that is never used."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """The number of a stream that is never used."""
        return 0


def compile_version(version: KernelVersion, arch: int) -> str:
    """Compile one version in this process, and what launches it; the folder of Triton's cache that has it.

    Triton's driver is replaced for good: for children, and for machines without a GPU.
    """
    from triton.runtime import driver
    from triton.runtime.cache import get_cache_manager

    driver.set_active(CompileOnly(arch))
    make(version.kernel)
    compiled = version.kernel.run(*version.args, grid=(1,), warmup=True, **dict(version.options))
    with suppress(Exception):  # a small C module per signature, of versions of Triton that have that
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)
    return str(get_cache_manager(compiled.hash).cache_dir)


# ---- Keep the digest that every key of Triton's cache begins with.
#
# Every process that launches a kernel reads and hashes all of Triton for it, 400 MB: 0.3 to 1 second. It
# depends on Triton's files alone, so it is kept with a digest of their sizes and times.


def keep_triton_key(folder: Path) -> None:
    """Let Triton in this process use the digest that is kept in ``folder``; the first time it is computed and kept."""
    if not have_triton():
        return
    import triton.runtime.cache as cache

    compute = getattr(cache, "triton_key", None)
    if compute is None or getattr(compute, "weft_kept", False):  # another version of Triton, or done
        return
    spec = find_spec("triton")
    root = Path(spec.origin).parent if spec is not None and spec.origin else Path()
    store, key = KeyedStore(folder, files_digest(root, (".py", ".so"))), "triton_key.json"
    value = store.read(key, str)
    if value is None:
        value = compute()
        with suppress(OSError):
            store.write(key, value)

    def triton_key() -> str:
        return value

    triton_key.weft_kept = True  # type: ignore[attr-defined]
    cache.triton_key = triton_key
