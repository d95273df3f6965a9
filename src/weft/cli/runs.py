"""``weft ls``: the runs in a folder, from their files alone."""

from __future__ import annotations

import json as jsonlib
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.format import aligned, plain_line
from weft.cli.options import Json
from weft.core.errors import SpecError

RESULT, SWEEP, JOURNAL = "result.json", "sweep.json", "events.jsonl"
COLUMNS = ("run", "model", "graph", "done", "best", "ended")


def ls(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to look, with all folders in it.")] = Path(
        "runs"
    ),
    json: Json = False,
) -> None:
    """List the runs in FOLDER: model and graph, tasks done, the best settings by their mean over seeds, and when."""
    if not folder.is_dir():
        raise SpecError(f"{folder}: no such folder; give the one that --out of your runs lies in")
    journals = sorted(file for file in folder.rglob(JOURNAL) if "tasks" not in file.relative_to(folder).parts)
    runs = [_describe(file.parent) for file in journals]
    if json:
        for run in runs:
            print(jsonlib.dumps(run))
    elif not runs:
        print(f"no runs in {folder}")
    else:
        print("\n".join(aligned([COLUMNS, *([plain_line(str(run[key])) for key in COLUMNS] for run in runs)])))


def _describe(folder: Path) -> dict[str, Any]:
    """One run as a row; what cannot be read is said in place of the best settings."""
    when = datetime.fromtimestamp((folder / JOURNAL).stat().st_mtime)
    row = dict.fromkeys(COLUMNS, "") | {"run": str(folder), "ended": f"{when:%Y-%m-%d %H:%M}"}
    try:
        data = _read(folder / RESULT)
        several = data if "sweep" in data else _read(folder / SWEEP)
        tasks = [data["task"]] if "task" in data else (_read(folder / SWEEP) or several).get("tasks", [])
        for key in ("model", "graph"):
            row[key] = ", ".join(sorted({str(task[key]) for task in tasks}))
        ended = len(list(folder.glob(f"tasks/*/{RESULT}"))) if several else int("task" in data)
        row["done"] = f"{ended} of {len(tasks) or 1}"
        if "task" in data:
            metrics = data["metrics"]
            score = metrics.get(f"val_{metrics.get('metric')}")
            row["best"] = "" if score is None else f"val {metrics['metric']} {score:.3f}"
        elif data:
            parts = data["graphs"]
            words = {name: part["best_settings"] or "none" for name, part in parts.items()}
            row["best"] = "; ".join(words[name] if len(parts) == 1 else f"{name}: {words[name]}" for name in parts)
        else:
            row["best"] = "not ended; --resume continues it"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        row["best"] = f"cannot be read ({type(error).__name__}: {error})"
    return row


def _read(file: Path) -> dict[str, Any]:
    return dict(jsonlib.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}
