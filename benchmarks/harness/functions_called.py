"""Count the distinct functions of Weft that a run calls: before its first epoch, before its first progress, in all.

``python -m benchmarks.harness.functions_called examples/demo.toml [--device cpu]``. A function is a code object of
``src/weft`` that has local variables and a name (no module, class body or lambda); what a dataclass generates is not
counted, nor what runs when ``weft.cli.main`` is imported.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import weft
from weft.cli.main import main
from weft.core.event import Event

SOURCES = str(Path(weft.__file__).parent)
IS_FUNCTION = 0x1  # CO_OPTIMIZED: not set for modules and class bodies
called: set[CodeType] = set()
marks: dict[str, int] = {}


def note_call(frame: FrameType, event: str, _argument: Any) -> None:
    """A profile function (``sys.setprofile``) that remembers every function of Weft that is called."""
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(SOURCES):
        return
    if code.co_name == "_one_epoch":
        marks.setdefault("first epoch", len(called))
    if code.co_flags & IS_FUNCTION and not code.co_name.startswith("<"):
        called.add(code)


def note_progress(event: Event) -> None:
    """Remember how many functions had been called at the first ``progress`` event."""
    if event.kind == "progress":
        marks.setdefault("first progress", len(called))


def count(arguments: list[str]) -> None:
    """Run ``weft run`` with ``arguments`` in an empty folder and print the counts."""
    sys.argv = ["weft", "run", *arguments, "--out", str(Path(tempfile.mkdtemp()) / "run")]
    make = Event.__init__

    def init(self: Event, *values: Any, **named: Any) -> None:
        make(self, *values, **named)
        note_progress(self)

    Event.__init__ = init  # type: ignore[method-assign]
    threading.setprofile(note_call)
    sys.setprofile(note_call)
    try:
        main()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        Event.__init__ = make  # type: ignore[method-assign]
    print({**marks, "in all": len(called)}, file=sys.stderr)


if __name__ == "__main__":
    count(sys.argv[1:])
