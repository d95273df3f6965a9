"""Write the file of ``--out FILE``."""

from __future__ import annotations

from pathlib import Path

from weft.core.errors import SpecError
from weft.core.files import write_text


def check_file(path: Path) -> None:
    """Refuse a file that could not be written, before anything is worked out for it."""
    if path.is_dir():
        raise SpecError(f"--out {path}: is a folder; give a file")


def write_file(path: Path, text: str) -> None:
    """Write ``text`` in one piece, making folders on the way."""
    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise SpecError(f"--out {path}: cannot be written ({error.strerror}); choose another place") from None
