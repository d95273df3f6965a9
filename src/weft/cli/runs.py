"""``weft ls`` and ``weft compare``: the runs on disk, from their files alone."""

from __future__ import annotations

import json as jsonlib
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli.format import aligned, check_file, plain_line, write_file
from weft.cli.options import Json
from weft.core.errors import InputError, SpecError

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
    files = [*folder.rglob(JOURNAL), *folder.rglob(RESULT)]  # what was fetched of one task has no journal
    places = {file.parent for file in files if "tasks" not in file.relative_to(folder).parts}
    runs = [_describe(place) for place in sorted(places) if not (place / "predictions.safetensors").exists()]
    if json:
        for run in runs:
            print(jsonlib.dumps(run))
    elif not runs:
        print(f"no runs in {folder}")
    else:
        print("\n".join(aligned([COLUMNS, *([plain_line(str(run[key])) for key in COLUMNS] for run in runs)])))


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or sweeps.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with tables and curves.")] = None,
    json: Json = False,
) -> None:
    """Compare runs: the best settings of each by their mean over seeds, and the settings in which the runs differ."""
    from weft.engine.comparison import comparable, read_run, render_comparison, table_of

    if out is not None:
        check_file(out)
    read, left_out = [], []
    for folder in dict.fromkeys(runs):
        try:
            read += read_run(folder)
        except InputError as error:
            left_out.append(f"left out: {error}")
    if not read:
        raise SpecError("; ".join(left_out))
    tables = comparable(read)
    if json:
        for run in (run for table in tables for run in table):
            print(jsonlib.dumps(run.row))
    else:
        for title, rows, lead in map(table_of, tables):
            lines = aligned([[plain_line(cell) for cell in row] for row in rows])
            print("\n".join([title, *lines, *([plain_line(lead)] if lead else []), ""]))
    print("".join(f"weft: {plain_line(words)}\n" for words in left_out), end="", file=sys.stderr)
    if out is not None:
        write_file(out, render_comparison(tables, left_out))
        print(f"page: {plain_line(str(out))}", file=sys.stderr)


def _describe(folder: Path) -> dict[str, Any]:
    """One run as a row; what cannot be read is said in place of the best settings."""
    file = next(folder / name for name in (JOURNAL, RESULT) if (folder / name).exists())
    when = datetime.fromtimestamp(file.stat().st_mtime)
    row = dict.fromkeys(COLUMNS, "") | {"run": str(folder), "ended": f"{when:%Y-%m-%d %H:%M}"}
    try:
        data = _read(folder / RESULT)
        several = data if "sweep" in data else _read(folder / SWEEP)
        begun = _read(folder / SWEEP)
        tasks = [data["task"]] if "task" in data else (begun or several).get("tasks", [])
        trials = begun.get("tuned", {}).get("trials")  # of which ``tasks`` are the kinds
        for key in ("model", "graph"):
            row[key] = ", ".join(sorted({str(task[key]) for task in tasks}))
        ended = len(list(folder.glob(f"tasks/*/{RESULT}"))) if several else int("task" in data)
        row["done"] = f"{ended} of {trials or len(tasks) or 1}"
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
