"""Submissions that arrive while one is written are written together: one commit, and one wait for the disk, for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

Request = TypeVar("Request")
MOST_AT_ONCE = 256


class GroupCommit:
    """``write(requests)`` answers each request with a result or the error that is its own; it runs in ``pool``.

    Used from one event loop. Nobody is answered before the commit that their request is in.
    """

    def __init__(self, pool: Executor, write: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._pool, self._write = pool, write
        self._waiting: list[tuple[Any, asyncio.Future[Any]]] = []
        self._writer: asyncio.Task[None] | None = None

    async def put(self, request: Any) -> Any:
        """The result for ``request``, once it is on the disk."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_all())
        return await answer

    async def _write_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting[:MOST_AT_ONCE], self._waiting[MOST_AT_ONCE:]
            try:
                found = await loop.run_in_executor(self._pool, self._write, [request for request, _ in batch])
            except Exception as error:  # none of them was written
                found = [error] * len(batch)
            for (_, answer), result in zip(batch, found, strict=True):
                _answer(answer, result)


def _answer(answer: asyncio.Future[Any], result: Any) -> None:
    if answer.done():  # whoever asked has gone
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)
