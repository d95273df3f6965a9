"""``weft cache``: what is remembered between processes to save time, and ``--clear`` to remove it."""

from __future__ import annotations

import json as jsonlib
import re
import shutil
import time
from typing import Annotated

import typer

from weft.core.errors import SpecError
from weft.core.units import show_bytes
from weft.engine.base.home import STEPS, home
from weft.engine.forms.form_files import FormFiles


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it; the next runs make it again.")] = False,
    json: Annotated[bool, typer.Option("--json", help="A JSON line per form instead of a table.")] = False,
) -> None:
    """What is remembered between processes: forms of large graphs for training on a CPU, and captured steps.

    Forms take at most 16 GiB (WEFT_FORMS=4GiB: less, WEFT_FORMS=0: none are kept), the least recently used are removed
    first. What was measured of machines is not in it: `weft probe` shows and replaces that.
    """
    store, steps = FormFiles(), home() / STEPS
    if clear:
        try:
            freed = store.clear() + sum(file.stat().st_size for file in steps.glob("*"))
            shutil.rmtree(steps, ignore_errors=True)
        except OSError as error:
            raise SpecError(f"{error.filename} cannot be removed: {error.strerror}") from None
        print(f"removed {show_bytes(freed)} from {home()}")
        return
    found = store.entries()
    for entry in found:
        since = time.time() - entry.last_use
        line = f"{show_bytes(entry.bytes):>10}  {_ago(since):>8}  {entry.graph}: {_short(entry.form)}"
        print(jsonlib.dumps(entry.to_dict()) if json else f"{line} ({entry.seconds:.1f} s to make)")
    if not json:
        total = show_bytes(sum(entry.bytes for entry in found))
        count = sum(1 for _ in steps.glob("*.json.gz"))
        print(f"{len(found)} forms of graphs, {total} of at most {show_bytes(store.limit)}; {count} captured steps")
        print(f"in {home()}; `weft cache --clear` removes them")


def _short(form: str) -> str:
    """Without the digest of features and the marks of Python, which say nothing to people."""
    words = form.split(" ")
    return re.sub(r"[(),']+", "", " ".join(words[:-1] if len(words[-1]) == 64 else words)).strip()


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0.0):.0f} s"
