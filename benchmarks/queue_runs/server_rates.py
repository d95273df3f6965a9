"""How fast the queue's server takes tasks, lists them and decides: on this machine, over HTTP on loopback.

    python -m benchmarks.queue_runs.server_rates

Prints submissions per second from several clients (each waits for its answer, which comes after the commit), the
server's processor time per submission, the time to list 10,000 tasks, and the time of a decision per task of 1,000
that wait.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.recorder import print_table
from weft.planner.machine_profiles import profile
from weft.sched.policies import find_policy
from weft.sched.queue_state import DeviceState, MachineState
from weft.sched.queues import random_queue

CLIENTS, EACH, LISTED, WAITING = 8, 100, 10_000, 1_000
JSON = {"Content-Type": "application/json"}
TASK = {"graph": "demo", "model": "gcn", "hidden": 8, "epochs": 100_000}


def main() -> None:
    """Start a server, ask it, and print a table."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server, port = start(Path(folder))
        try:
            rows = [*submitting(server.pid, port), listing(port)]
        finally:
            server.terminate()
            server.wait(30)
    rows.append(["decision per waiting task, ms", deciding()])
    print_table(["what", "figure"], [*rows, ["load of this machine", os.getloadavg()[0]]])


def start(folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """``weft serve`` on a free port, once it answers and its first task runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": paths, "WEFT_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "weft", "serve", "--db", str(folder / "q.db"), "--bind", f"127.0.0.1:{port}"]
    more = ["--devices", "cpu", "--no-auth", "--quota", "1000000"]
    server = subprocess.Popen([*command, *more], env=environment, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        time.sleep(0.1)
        try:
            ask(connect(port), "POST", "/api/tasks", {"task": {**TASK, "seed": -1 % 2**31}})
            break
        except OSError:
            continue
    while json.loads(ask(connect(port), "GET", "/api/state"))["counts"]["running"] == 0 and time.monotonic() < until:
        time.sleep(0.1)
    return server, port


def connect(port: int) -> http.client.HTTPConnection:
    """A connection that stays."""
    return http.client.HTTPConnection("127.0.0.1", port, timeout=60)


def ask(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> bytes:
    """The answer to a request that must succeed."""
    connection.request(method, path, None if body is None else json.dumps(body), JSON)
    answer = connection.getresponse()
    text = answer.read()
    if answer.status >= 400:
        raise RuntimeError(f"{method} {path}: {answer.status} {text[:200]!r}")
    return text


def processor_seconds(pid: int) -> float:
    """What a process has used of the processor."""
    parts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")


def submitting(pid: int, port: int) -> list[list[Any]]:
    """Single submissions by several clients at once."""

    def client(number: int) -> None:
        connection = connect(port)
        for place in range(EACH):
            ask(connection, "POST", "/api/tasks", {"task": {**TASK, "seed": number * EACH + place}})

    used, begin = processor_seconds(pid), time.perf_counter()
    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, count = time.perf_counter() - begin, CLIENTS * EACH
    used = processor_seconds(pid) - used
    return [["submissions per second", count / seconds], ["processor ms per submission", 1e3 * used / count]]


def listing(port: int) -> list[Any]:
    """The best of three lists of 10,000 tasks."""
    connection = connect(port)
    for first in range(0, LISTED, 2_500):
        tasks = [{**TASK, "seed": 10_000 + first + place} for place in range(2_500)]
        ask(connection, "POST", "/api/tasks", {"tasks": tasks})
    time.sleep(3.0)
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        text = ask(connect(port), "GET", f"/api/tasks?limit={LISTED}")
        seconds.append(time.perf_counter() - begin)
    assert len(json.loads(text)["tasks"]) == LISTED
    return ["ms to list 10,000 tasks", 1e3 * min(seconds)]


def deciding() -> float:
    """Milliseconds of one decision from scratch, per waiting task."""
    tasks = random_queue(WAITING, 1, profile("h200"))
    machine = MachineState((DeviceState("cuda:0", 26 << 30, workers=3),))
    begin = time.perf_counter()
    find_policy("backfill").schedule(tasks, [], machine)
    return 1e3 * (time.perf_counter() - begin) / WAITING


if __name__ == "__main__":
    main()
