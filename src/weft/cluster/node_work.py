"""What a node does: train a share in a folder of its own, and send events and checkpoints home while it does.

A checkpoint goes home as the bytes of the folder, so that another node can continue if this one is lost.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError
from weft.core.event import Event
from weft.core.task import Task
from weft.runtime.checkpoint import FILE

Send = Callable[[str, Any], None]  # kind ("event", "checkpoint"), and what it is


def train_share(
    tasks: Sequence[Task], send: Send, checkpoint: bytes | None, options: Mapping[str, Any]
) -> tuple[list[Any], str]:
    """Train ``tasks`` from ``checkpoint`` on, if there is one: their results, or none and what went wrong."""
    from weft.engine.run import run

    with tempfile.TemporaryDirectory(prefix="weft-share-") as place:
        folder = Path(place) / "run"
        if checkpoint is not None:
            unpack(checkpoint, folder)

        def on_event(event: Event) -> None:
            if event.kind == "checkpoint":
                send("checkpoint", pack(folder))
            send("event", event.to_dict())

        try:
            found = run(list(tasks), out=folder, resume=checkpoint is not None, on_event=on_event, **options)
        except WeftError as error:
            return [], f"{type(error).__name__}: {error}"
        return list(found), ""


def pack(folder: Path) -> bytes:
    """The settings and checkpoints in the folder of a run."""
    with io.BytesIO() as kept:
        with tarfile.open(fileobj=kept, mode="w") as archive:
            for path in (folder / "sweep.json", *folder.rglob(FILE)):
                if path.exists():
                    archive.add(path, str(path.relative_to(folder)))
        return kept.getvalue()


def unpack(data: bytes, folder: Path) -> None:
    """The inverse of :func:`pack`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        archive.extractall(folder, filter="data")
