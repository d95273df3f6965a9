"""How a queue server answers under load: many watchers, the largest requests, a hung model, half-open connections.

    python -m benchmarks.queue_runs.load --out load.json        about four minutes; --only watchers,largest for less

Every part starts a real ``weft serve`` with one worker on loopback, and real clients: the watchers are a process of
their own with a socket each. A wait is the time from opening a connection to the last byte of the answer. Other work on
the machine makes the figures worse; the load average before and after a part is beside them.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

import weft
from benchmarks.harness.recorder import ROOT, Recorder, common_arguments, listed
from weft.serve.queue_db import QueueDB

HERE = "benchmarks.queue_runs.load"
SMALL = {"graph": "demo", "model": "gcn", "hidden": 8, "epochs": 5}
BODY_BYTES = 4 << 20  # the longest body that is read
EVENT_ID = re.compile(rb"^id: (\d+)$", re.MULTILINE)
TARGETS = {"health_p99_ms": 50.0, "submit_p99_ms": 300.0, "list_p99_ms": 300.0, "longest_wait_ms": 200.0}


class Hangs(nn.Module):
    """A model that never returns from training."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.conv = weft.nn.GCNConv(in_features, out_features)

    def forward(self, x: torch.Tensor, adj: Any) -> torch.Tensor:
        """The layer's output in a dry run, which has no data; else nothing, ever."""
        y = self.conv(x, adj)
        while not y.is_meta:
            time.sleep(0.1)
        return y


# ---- a server, and requests to it --------------------------------------------------------------------------


class Server:
    """``weft serve --no-auth`` with one worker on a CPU, unless ``more`` options say otherwise, as a process."""

    def __init__(self, folder: Path, *more: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.db, self.log = folder / "queue.db", folder / "serve.log"
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        own = {"PYTHONPATH": paths, "WEFT_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        options = ["--db", str(self.db), "--bind", f"127.0.0.1:{self.port}", "--no-auth", "--devices", "cpu"]
        options += ["--quota", "1000000", "--allow-model", f"{HERE}:*", *more]
        with open(self.log, "ab") as log:
            words = [sys.executable, "-m", "weft", "serve", *options]
            self.process = subprocess.Popen(words, env={**os.environ, **own}, stdout=log, stderr=log)
        end = time.monotonic() + 60.0
        while not self._works():
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(self.log.read_text()[-500:])
            time.sleep(0.1)

    def _works(self) -> bool:
        with suppress(OSError):
            return any(worker["ready"] for worker in self.get("/api/state")["workers"] if worker["name"] != "planner")
        return False

    def ask(self, method: str, path: str, body: bytes | None = None, seconds: float = 120.0) -> tuple[int, bytes]:
        """Status and body of the answer to a request on a connection of its own."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=seconds)
        try:
            link.request(method, path, body, {} if body is None else {"Content-Type": "application/json"})
            answer = link.getresponse()
            return answer.status, answer.read()
        finally:
            link.close()

    def get(self, path: str) -> Any:
        """What a path shows."""
        return json.loads(self.ask("GET", path)[1])

    def submit(self, tasks: Sequence[Mapping[str, Any]], **more: Any) -> list[dict[str, Any]]:
        """Queue tasks."""
        status, text = self.ask("POST", "/api/tasks", json.dumps({"tasks": tasks, **more}).encode())
        if status != 201:
            raise RuntimeError(text[:300].decode())
        return json.loads(text)["tasks"]

    def usage(self) -> dict[str, float]:
        """Memory in MiB and open files of the server's own process."""
        about = Path(f"/proc/{self.process.pid}")
        pages = int((about / "statm").read_text().split()[1])
        return {"mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20, "files": len(os.listdir(about / "fd"))}

    def stop(self) -> None:
        """End it, by force if it must be."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def served(*options: str) -> Iterator[Server]:
    """A new server with more ``options`` in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), *options)
        try:
            yield server
        finally:
            server.stop()


class Probe:
    """Sends a request ``rate`` times per second in a thread, as far as answers come; ``waits`` in milliseconds."""

    def __init__(self, rate: float, send: Callable[[], tuple[int, bytes]], expected: int = 200) -> None:
        self.waits: list[float] = []
        self.failures: list[str] = []
        self._rate, self._send, self._expected, self._stop = rate, send, expected, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            begin = time.perf_counter()
            try:
                status, text = self._send()
                if status != self._expected:
                    self.failures.append(f"{status} {text[:80]!r}")
            except OSError as error:
                self.failures.append(str(error))
            self.waits.append(1e3 * (time.perf_counter() - begin))
            self._stop.wait(max(1.0 / self._rate - (time.perf_counter() - begin), 0.0))

    def end(self) -> list[float]:
        """The waits, sorted, once the last answer is here; an error if one was not as expected."""
        self._stop.set()
        self._thread.join(150.0)
        if self.failures or self._thread.is_alive():
            raise RuntimeError(f"{len(self.failures)} requests failed, first {self.failures[:1]}")
        return sorted(self.waits)


def probes(server: Server, health: float = 20.0, submit: float = 5.0) -> dict[str, Probe]:
    """Health and the submission of a small task."""
    body = json.dumps({"task": {**SMALL, "name": "probe"}}).encode()
    return {
        "health": Probe(health, lambda: server.ask("GET", "/health")),
        "submit": Probe(submit, lambda: server.ask("POST", "/api/tasks", body), 201),
    }


def spread(name: str, waits: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile, most and number of the waits of a kind of request."""
    at = {"p50": len(waits) // 2, "p99": min(int(0.99 * len(waits)), len(waits) - 1), "max": len(waits) - 1}
    return {f"{name}_{figure}_ms": round(waits[place], 1) for figure, place in at.items()} | {name: len(waits)}


def loads() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


# ---- watchers ------------------------------------------------------------------------------------------------


def watch(port: int, count: int, stop: Any, answer: Any) -> None:
    """Follow all events from the first one on by ``count`` connections, until ``stop``; tells what came."""
    chooser, last, seen = selectors.DefaultSelector(), {}, 0
    for number in range(count):
        link = socket.create_connection(("127.0.0.1", port), 60.0)
        link.sendall(b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        link.setblocking(False)
        chooser.register(link, selectors.EVENT_READ, number)
        last[number] = 0
    answer.send("connected")
    while not stop.is_set():
        for key, _ in chooser.select(0.2):
            chunk = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            seen += len(chunk)
            if ids := EVENT_ID.findall(chunk[-4000:]):
                last[key.data] = int(ids[-1])
            if not chunk:
                chooser.unregister(key.fileobj)
                last[key.data] = -1
    answer.send({"mib": seen / 2**20, "last": sorted(last.values())})


def watchers(args: Any) -> dict[str, Any]:
    """Waits while many follow a long queue from its first event on, and one worker works on it."""
    with served() as server:
        for user in range(10):
            tasks = [{**SMALL, "seed": seed} for seed in range(args.tasks // 10)]
            server.submit(tasks, user=f"user-{user}")
        context = multiprocessing.get_context("fork")
        stop, (ours, theirs) = context.Event(), context.Pipe()
        follower = context.Process(target=watch, args=(server.port, args.watchers, stop, theirs), daemon=True)
        before, done = loads(), server.get("/api/state")["counts"]["done"]
        follower.start()
        running = probes(server)
        for name, limit, rate in (("list", 5_000, 3.0), ("page", 10_000, 1.0)):  # as weft queue list, the dashboard
            running[name] = Probe(rate, lambda limit=limit: server.ask("GET", f"/api/tasks?limit={limit}"))
        most: dict[str, float] = {}
        for _ in range(int(args.seconds)):
            time.sleep(1.0)
            most = {name: max(value, most.get(name, 0.0)) for name, value in server.usage().items()}
        waits = {name: probe.end() for name, probe in running.items()}
        state = server.get("/api/state")
        time.sleep(2.0)
        stop.set()
        connected, followed = ours.recv(), ours.recv() if ours.poll(120.0) else {"mib": 0.0, "last": [-1]}
        follower.join(30.0)
    waits["list"] = sorted(waits["list"] + waits.pop("page"))
    found = {name: value for kind, many in waits.items() for name, value in spread(kind, many).items()}
    behind = sum(last < state["last_seq"] for last in followed["last"])
    about = {"watchers": args.watchers, "behind": behind, "sent_mib": round(followed["mib"]), "tasks": args.tasks}
    ended = {"done": state["counts"]["done"] - done, "server_mib": round(most["mib"]), "files": most["files"]}
    return {**found, **about, **ended, "connected": connected, "load_before": before, "load_after": loads()}


# ---- the largest requests --------------------------------------------------------------------------------------


def large_requests(server: Server) -> dict[str, tuple[str, str, bytes | None]]:
    """Method, path and body by name: all that is allowed, and what is refused after it was read."""
    first = server.submit([{**SMALL, "seed": seed} for seed in range(1000)])
    names = [task["id"] for task in first]
    needed = server.submit([{**SMALL, "epochs": 100_000, "name": "needed"}])[0]["id"]
    for _ in range(5):
        server.submit([SMALL] * 2000, after=[needed])
    folder = server.db.with_name(f"{server.db.name}.runs") / names[0]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.txt").write_bytes(b"0123456789abcde\n" * (1 << 16))
    with QueueDB(server.db) as db:
        for _ in range(20):
            db.record([(names[0], "progress", {"epoch": 1, "epochs": 9, "loss": [0.1] * 8}) for _ in range(1000)])
    bodies: dict[str, Any] = {
        "10,000 tasks": {"tasks": [{**SMALL, "seed": seed} for seed in range(10_000)]},
        "10,000 dependencies": {"tasks": [SMALL] * 10, "after": names},
        "settings of 4 MiB": {"task": {**SMALL, "model_args": {"x": "x" * (BODY_BYTES - 1000)}}},
        "4 MiB of names": {"task": {f"{n:06d}": n for n in range(BODY_BYTES // 24)}},
        "inference of 100,000 nodes": {"infer": {"of": names[0], "nodes": list(range(100_000))}},
    }
    found = {name: ("POST", "/api/tasks", json.dumps(body).encode()) for name, body in bodies.items()}
    nested = b"[" * 30 + b"]" * 30 + b","
    found["4 MiB of brackets"] = ("POST", "/api/tasks", b'{"task": [' + nested * (BODY_BYTES // 61 - 2) + b"0]}")
    paths = {
        "list of 10,000": "/api/tasks?limit=10000", "log of 1 MiB": f"/api/tasks/{names[0]}/logs",
        "curve of 20,000": f"/api/tasks/{names[0]}/curve", "state": "/api/state", "metrics": "/metrics",
    }  # fmt: skip
    found |= {name: ("GET", path, None) for name, path in paths.items()}
    return found | {"cancel of what 10,000 wait for": ("POST", f"/api/tasks/{needed}/cancel", b"{}")}


def largest(server: Server, request: tuple[str, str, bytes | None]) -> dict[str, Any]:
    """The longest wait for health and for a small submission while one large request is answered."""
    before, running = loads(), probes(server, 100.0, 100.0)
    time.sleep(1.0)
    idle = {name: max(probe.waits) for name, probe in running.items()}
    for probe in running.values():
        probe.waits.clear()
    begin = time.perf_counter()
    status, text = server.ask(*request)
    took = time.perf_counter() - begin
    time.sleep(0.3)
    waits = {f"{name}_max_ms": round(probe.end()[-1], 1) for name, probe in running.items()}
    about = {"request_status": status, "request_seconds": round(took, 3), "answer_mib": round(len(text) / 2**20, 2)}
    idle = {f"idle_{name}_max_ms": round(value, 1) for name, value in idle.items()}
    return {**waits, **idle, **about, "longest_wait_ms": max(waits.values()), "load_before": before}


# ---- a hung model, and half-open connections ---------------------------------------------------------------------


def worker_group(server: Server) -> str:
    """The group that the only worker has; "" if it is free."""
    return next(worker["group"] for worker in server.get("/api/state")["workers"] if worker["name"] != "planner")


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Seconds until ``condition`` holds."""
    begin = time.monotonic()
    while not condition():
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"{seconds:g} s were not enough")
        time.sleep(0.05)
    return time.monotonic() - begin


def hung(args: Any) -> dict[str, Any]:
    """Seconds from cancelling a model that never returns until a task that waited behind it is done."""
    with served() as server:
        [task] = server.submit([{"graph": "demo", "model": f"{HERE}:Hangs", "epochs": 3}])
        until(lambda: server.get(f"/api/tasks/{task['id']}")["state"] == "running", 60.0)
        time.sleep(2.0)
        [behind] = server.submit([SMALL])
        before, held = loads(), worker_group(server)
        server.ask("POST", f"/api/tasks/{task['id']}/cancel", b"{}")
        free = until(lambda: worker_group(server) != held, 900.0)
        done = free + until(lambda: server.get(f"/api/tasks/{behind['id']}")["state"] == "done", 60.0)
    return {"free_seconds": round(free, 1), "next_done_seconds": round(done, 1), "load_before": before}


def half_open(args: Any) -> dict[str, Any]:
    """Waits, ended tasks, memory and files of a server to which half-open connections are made all the time."""
    with served() as server:
        first, before = server.usage(), loads()
        running = probes(server, 10.0, 1.0)
        links: list[socket.socket] = []
        begin, made, most, submitted = time.monotonic(), 0, dict(first), []
        while (passed := time.monotonic() - begin) < args.flood_seconds:
            while made < args.flood_rate * passed:
                link = socket.socket()
                link.setblocking(False)
                link.connect_ex(("127.0.0.1", server.port))
                links.append(link)
                made += 1
            for link in links[-args.flood_rate :: 7]:
                with suppress(OSError):
                    link.send(b"GET /api/tasks HTTP/1.1\r\nX: ")
            while len(links) > 5_000:  # more than the server has
                links.pop(0).close()
            if len(submitted) < passed / 5.0:
                submitted += server.submit([{**SMALL, "seed": len(submitted)}])
            most = {name: max(value, most[name]) for name, value in server.usage().items()}
            time.sleep(0.02)
        waits = {name: probe.end() for name, probe in running.items()}
        until(lambda: all(server.get(f"/api/tasks/{task['id']}")["state"] == "done" for task in submitted), 60.0)
        for link in links:
            link.close()
        logged = server.log.stat().st_size
    found = {name: value for kind, many in waits.items() for name, value in spread(kind, many).items()}
    sizes = {"mib_before": round(first["mib"]), "mib_most": round(most["mib"]), "files_most": most["files"]}
    about = {"connections": made, "done": len(submitted), "log_bytes": logged}
    return {**found, **about, **sizes, "load_before": before, "load_after": loads()}


def main() -> None:
    """Run the parts and print their figures."""
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--only", type=listed, default=["watchers", "largest", "hung", "half_open"])
    for name, default in (("watchers", 200), ("tasks", 20_000), ("seconds", 30), ("flood-rate", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--flood-seconds", type=int, default=60)
    parser.set_defaults(device="cpu")
    args = parser.parse_args()
    recorder = Recorder("load", args)
    for part in (watchers, hung, half_open):
        if part.__name__ in args.only:
            recorder.cell({"part": part.__name__}, lambda part=part: part(args))
    if "largest" in args.only:
        with served() as server:
            for name, request in (recorder.prepare("requests", lambda: large_requests(server)) or {}).items():
                recorder.cell({"part": "largest", "request": name}, lambda request=request: largest(server, request))
    recorder.save()
    print("\n| figure | ms | target |\n|---|---|---|")
    for cell in recorder.cells:
        for name, target in TARGETS.items():
            if name in cell:
                what = cell.get("request") or cell["part"]
                print(f"| {what}: {name} | {cell[name]:g} | {'' if cell[name] <= target else 'MISSED: '}{target:g} |")


if __name__ == "__main__":
    main()
