"""Connections to the server, bounded: so many at once, each with so long for its request.

Half of the files that the process may open stay free for the queue and the workers. Where all connections are taken,
the one that has waited longest without a whole request makes way, so that whoever sends one is answered.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

REQUEST_SECONDS = 20.0  # from the first byte of a request, or from the connection on, to its last byte
MOST_CONNECTIONS = 1_000
MOST_WAITING = 128  # that are accepted at once, before any of them is counted


def most_connections() -> int:
    """How many connections there may be now."""
    if resource is None:
        return MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(8, min(MOST_CONNECTIONS, files // 2))


def most_waiting() -> int:
    """How many connections may wait to be accepted."""
    return min(MOST_WAITING, most_connections() // 4)


class BoundedConnection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """A connection that is closed if its request does not come, or if it is in the way of others that come."""

    _deadline: asyncio.TimerHandle | None = None
    _since = 0.0
    _ended = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Take part, or be closed at once where every other connection has a request."""
        open_ones = [one for one in self.connections if not one._ended]
        super().connection_made(transport)
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self.end)
        if len(open_ones) >= most_connections():
            waiting = [one for one in open_ones if not one.has_request]
            min(waiting, key=lambda one: one._since, default=self).end()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        if self.has_request:
            self._stop_waiting()
        elif self._deadline is None and not self._ended:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self.end)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._stop_waiting()
        super().connection_lost(exc)

    @property
    def has_request(self) -> bool:
        """Whether a whole request has come that is not answered yet."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete and not cycle.more_body

    def end(self) -> None:
        """Close it at once."""
        self._ended = True
        self._stop_waiting()
        self.transport.abort()

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
