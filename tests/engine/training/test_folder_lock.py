"""One at a time holds the lock of a folder, also where one lets go while another asks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from weft.core.errors import SpecError
from weft.engine.folder import LOCK_FILE, FolderLock

fcntl = pytest.importorskip("fcntl")


def test_a_lock_taken_while_another_lets_go_keeps_a_third_out(tmp_path, monkeypatch):
    first, second, flock = FolderLock(tmp_path), FolderLock(tmp_path), fcntl.flock
    first.take()

    def after_the_first_went(handle, how):
        first.release()
        flock(handle, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", after_the_first_went)
        second.take()
    with pytest.raises(SpecError, match="another run is writing there"):
        FolderLock(tmp_path).take()
    second.release()
    assert not (tmp_path / LOCK_FILE).exists()


def test_a_process_that_was_killed_keeps_nobody_out(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from weft.engine.folder import FolderLock;"
        "FolderLock(Path(sys.argv[1])).take(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == -9
    assert (tmp_path / LOCK_FILE).exists()
    lock = FolderLock(tmp_path)
    lock.take()
    lock.release()
