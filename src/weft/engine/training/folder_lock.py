"""FolderLock: one run at a time writes into a folder. The system releases it however the run ends."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from weft.core.errors import SpecError
from weft.core.wording import option

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None  # type: ignore[assignment]

FILE = ".lock"


class FolderLock:
    """A lock on ``folder``, held from :meth:`take` to :meth:`release`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle: int | None = None

    def take(self) -> None:
        """Keep others out; :class:`SpecError` where another run is at it."""
        if fcntl is None or self._handle is not None:
            return
        while not self._try():
            pass  # its holder has just removed the file: a lock on that would exclude no other run

    def refuse_if_taken(self) -> None:
        """:class:`SpecError` where another run is at it; leaves everything as it is."""
        if fcntl is not None and self._handle is None and (self._folder / FILE).exists():
            self.take()
            self.release()

    def _try(self) -> bool:
        """Lock the file; False if it no longer exists."""
        handle = os.open(self._folder / FILE, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise SpecError(
                f"{option('out', self._folder)}: another run is writing there; "
                f"wait for it, or choose another {option('out')}"
            ) from None
        except OSError:  # a file system without locks: as before there were any
            os.close(handle)
            return True
        if not self._is_there(handle):
            os.close(handle)
            return False
        self._handle = handle
        return True

    def _is_there(self, handle: int) -> bool:
        """Whether ``handle`` is the file that others would open."""
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self._folder / FILE))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let others in."""
        if self._handle is not None:
            with suppress(OSError):
                (self._folder / FILE).unlink()
            os.close(self._handle)
            self._handle = None
