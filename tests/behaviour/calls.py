"""Every call of Weft whose keywords may move: tests and cases name an option, and this file knows where it belongs."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import weft

GROUPED = (("placement", "Placement"), ("options", "RunOptions"))  # keyword of run, and the class of its value
RENAMED = {"cache": "cache_bytes", "cache_policy": "policy"}  # as fields of a placement
DECISIONS = ("members", "join", "device", "replay", "first_layer", "row_order", "compiled", "threads", "mode", "shards")
BYTES = ("peak_bytes", "reserved_bytes", "total_bytes", "training_bytes")


def run(work: Any, **options: Any) -> Any:
    """``weft.run`` on the CPU without a live line, unless ``options`` say otherwise."""
    return weft.run(work, **_arranged(weft.run, {"device": "cpu", "progress": False, **options}))


def plan(work: Any, **options: Any) -> Any:
    """``weft.plan``."""
    return weft.plan(work, **_arranged(weft.plan, options))


def _arranged(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as keywords of ``function``, or as fields of the objects that it takes."""
    keywords = inspect.signature(function).parameters
    arranged = {name: value for name, value in options.items() if name in keywords}
    fields: dict[str, dict[str, Any]] = {}
    for name in options.keys() - arranged.keys():
        for keyword, kind in GROUPED:
            known = inspect.signature(getattr(weft, kind)).parameters if keyword in keywords else {}
            field = name if name in known else RENAMED.get(name)
            if field in known:
                fields.setdefault(keyword, {})[field] = options[name]
                break
        else:
            raise TypeError(f"{function.__name__} takes no option {name!r}, neither by itself nor in an object")
    kinds = dict(GROUPED)
    return arranged | {keyword: getattr(weft, kinds[keyword])(**values) for keyword, values in fields.items()}


def read(path: str | os.PathLike[str], kind: str, **objects: Any) -> Any:
    """A ``kind`` ("result", "plan" or "spec") from a file or folder."""
    names = {"result": "load_result", "plan": "read_plan", "spec": "read_spec"}
    return getattr(weft, names[kind] if hasattr(weft, names[kind]) else "read")(path, **objects)


def load(graph: str | os.PathLike[str]) -> Any:
    """A graph by its name or path."""
    return weft.open(graph) if hasattr(weft, "open") and os.path.exists(graph) else weft.load(graph)


def plan_data(report: Any) -> dict[str, Any]:
    """What a plan decided and its bytes: no sentences, digests, paths or seconds."""
    data = report.to_dict()
    groups = []
    for group in data["groups"]:
        chosen = group["plan"]
        where = chosen["placement"]
        groups.append(
            {
                **{name: chosen[name] for name in DECISIONS},
                "stacks": [len(stack) for stack in chosen["stacks"]],
                "stages": [(stage["name"], stage["resource"]) for stage in chosen["stages"]],
                "divided": chosen["division"] is not None,
                "placement": {name: where[name] for name in ("features", "topology", "policy", "evaluation")},
                "cache_bytes": where["cache_bytes"],
                "epochs": group["epochs"],
                "fits": group["fits"],
                **{name: group["cost"][name] for name in BYTES},
            }
        )
    tasks = [
        {
            **{name: task[name] for name in ("name", "epochs", "parameters", "group")},
            **({} if task["cost"] is None else {name: task["cost"][name] for name in BYTES}),
        }
        for task in data["tasks"]
    ]
    nearest = [{"changes": dict(one["changes"]), "tasks": list(one["tasks"])} for one in data["nearest"]]
    return {
        "fits": report.fits,
        "peak_bytes": report.peak_bytes,
        "budget_bytes": data["budget_bytes"],
        "groups": groups,
        "tasks": tasks,
        "nearest": nearest,
    }


def shell(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """``python -m weft ARGUMENTS`` in a process of its own, with the Weft of this one."""
    command = [sys.executable, "-m", "weft", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment(), timeout=120)


def environment() -> dict[str, str]:
    """The environment of processes that have the Weft of this one."""
    sources, tests = Path(weft.__file__).parents[1], Path(__file__).parents[2]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (sources, tests))), "OMP_NUM_THREADS": "1"}
