"""Run a CPU kernel on several threads that share its rows.

Kernels run without the GIL, so ordinary threads suffice, and they sleep between calls: numba's own pool would
spin beside torch's on the same cores. Handing work over costs about 30 us, so small work stays in the caller.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

WORK_OF_A_SHARE = 1 << 19  # multiply-adds, about 60 us
MOST_SHARES = 64


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads of a process; a forked child does not inherit them and gets its own."""
    return ThreadPoolExecutor(threads, thread_name_prefix="weft-cpu")


def count_shares(work: int) -> int:
    """Shares to split ``work`` multiply-adds into: by the work alone, so that results do not depend on threads."""
    return max(1, min(MOST_SHARES, work // WORK_OF_A_SHARE))


def run_shares(kernel: Callable[..., Any], arguments: Sequence[Any], shares: int) -> None:
    """Call ``kernel(*arguments, share, shares)`` for every share, on as many threads as torch would use."""
    helpers = min(torch.get_num_threads(), shares) - 1
    if helpers < 1:
        for share in range(shares):
            kernel(*arguments, share, shares)
        return
    todo = deque(range(shares))
    pool = _pool(os.getpid(), torch.get_num_threads())
    waiting = [pool.submit(_work_off, kernel, arguments, todo, shares) for _ in range(helpers)]
    _work_off(kernel, arguments, todo, shares)
    for future in waiting:
        future.result()


def _work_off(kernel: Callable[..., Any], arguments: Sequence[Any], todo: deque[int], shares: int) -> None:
    while True:
        try:
            share = todo.popleft()
        except IndexError:
            return
        kernel(*arguments, share, shares)
