"""The simulator's makespan against the measured one: one small queue, run for real under every policy, and simulated.

    python -m benchmarks.queue_runs.simulator_check --out check.json     about a minute on two cores
    python -m benchmarks.queue_runs.simulator_check --sleeping           tasks that wait, whatever else the machine does
    python -m benchmarks.queue_runs.simulator_check --trace check-trace.json    compare again what was measured
    weft queue simulate --file check-queue.json                          the same simulations, from what was recorded

Every round runs the queue one task at a time, pairs of tasks side by side, the queue under each policy, and one at a
time again. The server is told the seconds and shares that the first two measured, as a prediction that is exact would
tell it. Three errors of the makespan tell apart where a difference comes from:

- ``replayed``: every task takes the seconds that it took in the very run. What is left is scheduling: the order of
  starts, which worker has which task, the time between two of them.
- ``simulated``: every task takes what it took alone (means of both runs one at a time; the second alone predicts the
  first), less the time that it waited for a core, and tasks interfere as fitted to the pairs of all rounds. What others
  wanted of the processor during the run is known to the simulator. On a GPU a task keeps the device busy in its epochs,
  after a start that asks nothing of it, by a share that is fitted to the epochs of the pairs as well. Nothing else of
  the run goes into its prediction.
- ``predicted``: every task takes what the server predicts, with interference as assumed by default, beside the same
  others.

The error of a policy is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.recorder import print_table
from benchmarks.queue_runs.check_trace import Trace, TraceRound, TraceRun
from benchmarks.queue_runs.interference_fit import Fit, calibrated, replayed
from benchmarks.queue_runs.queue_server import QueueServer
from weft.sched.policies import find_policy
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.queues import RecordedQueue
from weft.sched.simulator import Conditions, simulate

ONE = "pipeswitch"  # one task at a time
POLICIES = ("backfill", "lmcf", "bmc", "base", "mps")
ERRORS = ("replayed", "simulated", "predicted")
GIB = 1 << 30
WANTED = 0.1
Settings = dict[str, Any]


def queue(count: int, epochs: int) -> dict[str, Settings]:
    """``count`` trainings of several models and lengths, none of which can be joined with another."""
    models = ("gcn", "sage", "gin")
    found = {}
    for place in range(count):
        length = epochs * (1 + place % 4) // 2
        found[f"t{place}"] = {
            "graph": "demo",
            "model": models[place % 3],
            "hidden": 16 + 8 * place,
            "epochs": length,
            "layers": 2 + place % 2,
            "seed": place,
        }
    return found


def sleeping_queue(count: int, epochs: int) -> dict[str, Settings]:
    """The same with models that sleep."""
    lengths = {f"t{place}": epochs * (1 + place % 4) // 2 for place in range(count)}
    model = {"graph": "demo", "model": "benchmarks.queue_runs.sleeping_model:Sleeping"}
    return {name: {**model, "epochs": length, "model_args": {"seconds": 0.02}} for name, length in lengths.items()}


def measure(server: QueueServer, tasks: Mapping[str, Settings], trace: Trace) -> Trace:
    """The trace with one more round."""
    names = sorted(tasks, key=lambda name: tasks[name]["epochs"])
    before = TraceRun.of(server.run(ONE, tasks))
    pairs = [
        TraceRun.of(server.run("mps", {name: tasks[name] for name in pair}))
        for pair in ((names[-1], names[-2]), (names[0], names[1]))
    ]
    first = replace(trace, rounds=[TraceRound(before, before, pairs, {})])
    told = calibrated(first.alone([before]), first.fit())
    runs = {name: TraceRun.of(server.run(name, tasks, told=told)) for name in POLICIES}
    after = TraceRun.of(server.run(ONE, tasks))
    made = TraceRound(before, after, pairs, {ONE: before, **runs})
    return replace(trace, rounds=[*trace.rounds, made], told=[*trace.told, told])


def measure_all(server: QueueServer, tasks: Mapping[str, Settings], rounds: int) -> Trace:
    """All rounds."""
    predicted = [QueuedTask.from_dict(task) for task in server.predicted(server.run(ONE, tasks))]
    trace = Trace(predicted, server.device_state(), os.cpu_count() or 1)
    for number in range(rounds):
        trace = measure(server, tasks, trace)
        shown = {name: round(run.makespan, 2) for name, run in trace.rounds[-1].policies.items()}
        print(f"round {number + 1} of {rounds}: {shown}", flush=True)
    return trace


def compared(name: str, trace: Trace, fitted: Fit) -> dict[str, Any]:
    """A policy's measured makespans, and those by the simulator from three sorts of seconds."""
    found: dict[str, list[float]] = {"measured": [], **{kind: [] for kind in ERRORS}}
    for place, one in enumerate(trace.rounds):
        run = one.policies[name]
        found["measured"].append(run.makespan)
        for kind in ERRORS:
            found[kind].append(makespan(kind, name, trace, place, fitted))
    errors = {kind: [s / m - 1 for s, m in zip(found[kind], found["measured"], strict=True)] for kind in ERRORS}
    return {**found, "errors": errors, "error": {kind: median(errors[kind]) for kind in ERRORS}}


def makespan(kind: str, name: str, trace: Trace, place: int, fitted: Fit) -> float:
    """The makespan of a policy's run in a round, simulated from seconds of a ``kind``."""
    one, told = trace.rounds[place], trace.told[place]
    run = one.policies[name]
    conditions = Conditions(fitted.interference, background=trace.others(run))
    if kind == "replayed":
        gap = one.after.gap()
        took = [replayed(task, run.tasks[task.id]["seconds"] + gap) for task in told]
        return simulated(name, told, trace.device, Conditions(), took)
    if kind == "simulated":
        known = trace.alone([one.after]) if name == ONE else trace.known(one)
        return simulated(name, told, trace.device, conditions, calibrated(known, fitted))
    assumed = Conditions(background=trace.others(run))
    return simulated(name, trace.tasks, trace.device, assumed, trace.tasks)


def simulated(
    name: str, tasks: Sequence[QueuedTask], device: DeviceState, conditions: Conditions, actual: Sequence[QueuedTask]
) -> float:
    """The makespan by the simulator."""
    return simulate(find_policy(name), tasks, [device], conditions, name, actual).metrics().makespan


def check(trace: Trace) -> dict[str, Any]:
    """Every policy compared; and the queue of the last round for ``weft queue simulate``."""
    fitted, last = trace.fit(), trace.rounds[-1]
    rows = {name: compared(name, trace, fitted) for name in (ONE, *POLICIES) if name in last.policies}
    backgrounds = [trace.others(run) for one in trace.rounds for run in one.policies.values()]
    recorded = RecordedQueue(
        tuple(trace.told[-1]),
        trace.device,
        fitted.interference,
        tuple(calibrated(trace.known(last), fitted)),
        median(backgrounds),
    )
    return {"policies": rows, "fit": vars(fitted), "queue": json.loads(recorded.to_json())}


def measured(args: argparse.Namespace) -> Trace:
    """A queue run for real."""
    begin = time.time()
    with tempfile.TemporaryDirectory(prefix="weft-check-", ignore_cleanup_errors=True) as place:
        sizes = 4 * GIB, GIB
        with QueueServer(Path(place), args.device, args.workers, *sizes) as server:
            tasks = (sleeping_queue if args.sleeping else queue)(args.tasks, args.epochs)
            server.warm_up([{**one, "epochs": 2} for one in tasks.values()], 60.0)
            trace = measure_all(server, tasks, args.rounds)
    return replace(trace, about={"load": os.getloadavg()[0], "seconds": time.time() - begin})


def show(found: Mapping[str, Any], trace: Trace) -> None:
    """A table of errors."""
    rows = []
    for name, one in found["policies"].items():
        many = one["errors"]["simulated"]
        errors = [one["error"][kind] for kind in ERRORS]
        rows.append([name, median(one["measured"]), median(one["simulated"]), *errors, min(many), max(many)])
    print_table(["policy", "makespan s", "simulated s", *ERRORS, "least", "most"], rows)
    others = [run.background for one in trace.rounds for run in one.policies.values()]
    print(f"interference {found['fit']}, others wanted {min(others):.0%} to {max(others):.0%} of {trace.cores} cores")
    print()
    print_table(["goal", "wanted", "worst", "of", "verdict"], [goal(found)])


def goal(found: Mapping[str, Any]) -> list[Any]:
    """Whether the simulator is near enough under every policy that runs several tasks at once."""
    errors = {name: abs(one["error"]["simulated"]) for name, one in found["policies"].items() if name != ONE}
    worst = max(errors, key=lambda name: errors[name])
    reached = "pass" if errors[worst] <= WANTED else "MISS"
    return ["simulated makespan off by, median of the rounds", f"<= {WANTED:g}", errors[worst], worst, reached]


def main() -> None:
    """Print a table; write what was measured and the recorded queue."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sleeping", action="store_true", help="tasks that wait instead of computing")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trace", type=Path, help="compare what was measured before, and run nothing")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trace = measured(args) if args.trace is None else Trace.read(args.trace)
    found = check(trace)
    show(found, trace)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**found, **trace.about}, indent=1), encoding="utf-8")
        beside = {"queue": json.dumps(found["queue"]), "trace": trace.to_json()}
        for kind, text in beside.items():
            args.out.with_name(f"{args.out.stem}-{kind}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
