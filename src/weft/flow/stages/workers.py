"""Workers: a few daemon threads that run functions and hand back futures.

Unlike ``ThreadPoolExecutor``, threads that never return do not keep the process from ending.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any


class Workers:
    """``count`` threads named after ``name``."""

    def __init__(self, count: int, name: str) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = [Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """A future of ``work()``."""
        future: Future[Any] = Future()
        self._work.put((future, work))
        return future

    def stop(self) -> None:
        """End every thread after what is submitted already."""
        for _ in self._threads:
            self._work.put(None)

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            _fulfil(*task)
            del task  # an idle worker must not keep the last result's memory


def _fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
