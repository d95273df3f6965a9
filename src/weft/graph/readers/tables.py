"""Read tables of numbers in text, gzipped or not."""

from __future__ import annotations

import gzip
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from weft.core.errors import GraphError


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A text file, unpacked on the way, without the mark (BOM) that some editors begin it with.

    One that is damaged is one clear error.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        # gzip's own opener, because it also closes the file beneath.
        with gzip.open(path, "rt", encoding="utf-8-sig") if packed else path.open(encoding="utf-8-sig") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise GraphError(
            f"{path} ({path.stat().st_size} bytes) cannot be unpacked: {error}; it may be truncated or not "
            f"text, fetch or write it again"
        ) from None


def load_table(path: Path, dtype: Any, **options: Any) -> np.ndarray:
    """``np.loadtxt`` of such a file; a field that is no number raises ValueError."""
    with open_text(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*input contained no data")
        return np.loadtxt(file, dtype=dtype, **options)
