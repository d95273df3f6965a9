"""What the log of a task says of an error: the sentence first, then where in the user's own code it comes from."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import TextIO

from weft.core.errors import WeftError
from weft.runtime.user_modules.error_place import is_own_file


def log_error(error: BaseException, out: TextIO | None = None) -> None:
    """Write ``error`` to ``out`` (stderr): one sentence, and the traceback from the first line of the user's code on.

    An error of Weft's own has no traceback without such a line. One that nobody foresaw has all of it: that is a fault
    of Weft's.
    """
    out = sys.stderr if out is None else out
    sys.stdout.flush()  # what the model printed comes before
    print(_sentence(error), file=out)
    for one in _chain(error):
        if (first := _first_own(one.__traceback__)) is not None:
            traceback.print_exception(type(one), one, first, chain=False, file=out)
            break
    else:
        if not isinstance(error, WeftError):
            traceback.print_exception(error, file=out)
    out.flush()


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, WeftError) else "".join(traceback.format_exception_only(error)).strip()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what led to it, the latest first."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _first_own(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the user's own code on; None if there is none."""
    while frames is not None and not is_own_file(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return frames
