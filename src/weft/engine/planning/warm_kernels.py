"""Compile the kernels of a group before it is built: all that are missing, at once, on all cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.base.host import cpu_count
from weft.engine.base.kernel_store import KernelStore, triton_folder
from weft.engine.planning.estimator import Estimator
from weft.ops.launch.backend import have_triton
from weft.ops.launch.parallel_compile import can_compile_in_parallel, compile_versions
from weft.ops.launch.triton_key import keep_triton_key

FEWEST = 2  # a single kernel is compiled as fast by its launch

Told = Callable[[int, int], None]


def warm_kernels(
    tasks: Sequence[Task], plan: Plan, estimator: Estimator, arch: int, told: Told, processes: int | None = None
) -> int:
    """Compile what ``tasks`` need as the group of ``plan`` on a GPU of capability ``arch``; how many were compiled.

    Nothing is done where that is not possible: launches compile what they lack.
    """
    if not have_triton() or not can_compile_in_parallel():
        return 0
    keep_triton_key(triton_folder())
    store = KernelStore(arch)
    missing = store.missing(estimator.kernels(tasks, plan))
    if len(missing) < FEWEST:
        return 0
    live = estimator.versions(tasks, plan)
    wanted = [live[digest] for digest in missing if digest in live]
    found = compile_versions(wanted, arch, processes or cpu_count(), told)
    with suppress(OSError):
        store.add({wanted[one.place].digest: (one.folder, one.seconds) for one in found})
    return len(found)
