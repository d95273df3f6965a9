"""FolderLock: one run at a time writes into a folder. The system lets go of it however the run ends."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from weft.core.errors import SpecError

try:
    import fcntl
except ImportError:  # Windows: nobody is kept out
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
        handle = os.open(self._folder / FILE, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise SpecError(
                f"--out {self._folder}: another run is writing there; wait for it, or choose another --out"
            ) from None
        except OSError:  # a file system without locks: as before there were any
            os.close(handle)
            return
        self._handle = handle

    def release(self) -> None:
        """Let others in."""
        if self._handle is not None:
            with suppress(OSError):
                (self._folder / FILE).unlink()
            os.close(self._handle)
            self._handle = None
