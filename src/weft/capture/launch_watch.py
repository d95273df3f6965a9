"""Report kernel launches instead of making them, so that launchers can be dry-run on meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from weft.ops.launch.hooks import intercepted

Seen = Callable[[str, list[Tensor]], None]


def watched_launches(seen: Seen) -> AbstractContextManager[None]:
    """Inside, and in this thread, a launch calls ``seen(name, tensor arguments)`` and does nothing else."""

    def watch(kernel: Any, grid: Any, launch: Callable[..., Any]) -> Callable[..., None]:
        def note(*args: Any, **options: Any) -> None:
            handed = [*args, *options.values()]
            seen(kernel.fn.__name__, [value for value in handed if isinstance(value, Tensor)])

        return note

    return intercepted(watch)
