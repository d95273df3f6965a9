"""Figures of a server in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTERS = {
    "groups_started": "Groups started.",
    "tasks_started": "Tasks started, retries included.",
    "workers_lost": "Workers that ended without being asked to.",
    "memory_errors": "Tasks that ran out of memory.",
    "tasks_requeued": "Tasks queued again after their worker was lost.",
    "graphs_ready": "Groups whose graph was on the device when they started.",
    "weights_ready": "Tasks whose initial weights were drawn before they started.",
    "checkpoints_ready": "Groups whose checkpoint was read before they went on.",
}


def metrics_text(view: Mapping[str, Any], counts: Mapping[str, int], requests: Mapping[int, int]) -> str:
    """All figures; ``view`` is the supervisor's, ``counts`` tasks per state, ``requests`` answers per HTTP status."""
    return "\n".join([*_tasks(counts), *_devices(view), *_workers(view), *_counted(view), *_requests(requests), ""])


def _tasks(counts: Mapping[str, int]) -> Iterator[str]:
    yield from _head("weft_tasks", "gauge", "Tasks in the queue by state.")
    for state, count in counts.items():
        yield f'weft_tasks{{state="{state}"}} {count}'


def _devices(view: Mapping[str, Any]) -> Iterator[str]:
    held: dict[str, int] = {}
    estimated: dict[str, int] = {}
    for group in view.get("running", ()):
        held[group["device"]] = held.get(group["device"], 0) + group["held"]
        estimated[group["device"]] = estimated.get(group["device"], 0) + group["bytes"]
    devices = view.get("devices", ())
    rows = {
        "weft_device_budget_bytes": ("Bytes that tasks may take.", {one["name"]: one["budget"] for one in devices}),
        "weft_device_held_bytes": (
            "Bytes held by running groups.",
            {d["name"]: held.get(d["name"], 0) for d in devices},
        ),
        "weft_device_estimated_bytes": (
            "Bytes set aside for running groups.",
            {d["name"]: estimated.get(d["name"], 0) for d in devices},
        ),
    }
    for name, (text, values) in rows.items():
        yield from _head(name, "gauge", text)
        for device, value in values.items():
            yield f'{name}{{device="{device}"}} {value}'


def _workers(view: Mapping[str, Any]) -> Iterator[str]:
    yield from _head("weft_worker_busy", "gauge", "1 for a worker that runs a group, or plans a task.")
    for worker in view.get("workers", ()):
        yield f'weft_worker_busy{{worker="{worker["name"]}"}} {int(bool(worker["group"]))}'


def _counted(view: Mapping[str, Any]) -> Iterator[str]:
    for name, text in COUNTERS.items():
        yield from _head(f"weft_{name}_total", "counter", text)
        yield f"weft_{name}_total {view.get('counters', {}).get(name, 0)}"


def _requests(requests: Mapping[int, int]) -> Iterator[str]:
    yield from _head("weft_http_requests_total", "counter", "HTTP answers by status.")
    for status, count in sorted(requests.items()):
        yield f'weft_http_requests_total{{status="{status}"}} {count}'


def _head(name: str, kind: str, text: str) -> Iterator[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
