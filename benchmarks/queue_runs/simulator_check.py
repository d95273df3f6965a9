"""The simulator's makespan against the measured one: one small queue, run for real under every policy, and simulated.

    python -m benchmarks.queue_runs.simulator_check --out check.json     about a minute on two cores
    python -m benchmarks.queue_runs.simulator_check --sleeping           tasks that wait, whatever else the machine does
    weft queue simulate --file check-queue.json                          the same simulations, from what was recorded

Every round runs the queue one task at a time, pairs of tasks side by side, the queue under each policy, and one at a
time again. The server is told the seconds and shares that the first two measured, as a prediction that is exact would
tell it. What a policy is simulated from is its own round: seconds alone are the means of both runs one at a time (the
second alone predicts the first), and interference is fitted to the pairs of all rounds. Nothing of a run that is
predicted goes into its prediction. The error of a policy is the median over the rounds: load of others that changes
from round to round changes both sides of a comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness.recorder import print_table
from benchmarks.queue_runs.interference_fit import Fit, Pair, alone, calibrated, fit
from benchmarks.queue_runs.queue_server import QueueRun, QueueServer
from weft.sched.policies import find_policy
from weft.sched.queue_state import DeviceState, QueuedTask
from weft.sched.recorded_queue import RecordedQueue
from weft.sched.simulator import Conditions, simulate

ONE = "pipeswitch"  # one task at a time
POLICIES = ("backfill", "lmcf", "bmc", "base", "mps")
GIB = 1 << 30
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


def seconds_alone(runs: Sequence[QueueRun]) -> list[QueuedTask]:
    """The tasks with the means of their seconds alone and of the time until a worker has the next one."""
    gaps = [max(run.outcome.makespan - sum(d["seconds"] for d in run.details.values()), 0.0) for run in runs]
    gap = fmean(gaps) / max(len(runs[0].details), 1)
    found = []
    for task in runs[0].tasks:
        took = [fmean(run.details[task.id][key] for run in runs) for key in ("seconds", "trained_seconds")]
        found.append(alone(task, took[0], took[1], gap))
    return found


@dataclass(frozen=True)
class Round:
    """What was measured in a round: tasks one at a time before and after, ends of pairs, makespans by policy."""

    before: QueueRun
    after: QueueRun
    pairs: Sequence[tuple[tuple[str, str], dict[str, float]]]
    makespans: Mapping[str, float]

    @property
    def known(self) -> list[QueuedTask]:
        """The tasks with their seconds alone."""
        return seconds_alone([self.before, self.after])

    def measured_pairs(self) -> list[Pair]:
        """The pairs as the fit takes them."""
        by_name = {task.id: task for task in self.known}
        return [Pair((by_name[one], by_name[two]), ends) for (one, two), ends in self.pairs]


def measure(server: QueueServer, tasks: Mapping[str, Settings]) -> Round:
    """One round."""
    names = sorted(tasks, key=lambda name: tasks[name]["epochs"])
    before = server.run(ONE, tasks)
    pairs = []
    for pair in ((names[-1], names[-2]), (names[0], names[1])):
        run = server.run("mps", {name: tasks[name] for name in pair})
        pairs.append((pair, {one.id: one.end for one in run.outcome.tasks}))
    first = Round(before, before, pairs, {})
    told = calibrated(first.known, fit(first.measured_pairs()))
    makespans = {name: server.run(name, tasks, told=told).outcome.makespan for name in POLICIES}
    after = server.run(ONE, tasks)
    return Round(before, after, pairs, {ONE: before.outcome.makespan, **makespans})


def check(server: QueueServer, tasks: Mapping[str, Settings], rounds: int) -> dict[str, Any]:
    """Measure, calibrate, simulate, compare; and the queue for ``weft queue simulate``."""
    found = []
    for number in range(rounds):
        found.append(measure(server, tasks))
        shown = {name: round(seconds, 2) for name, seconds in found[-1].makespans.items()}
        print(f"round {number + 1} of {rounds}: {shown}", flush=True)
    fitted = fit([pair for one in found for pair in one.measured_pairs()])
    device = server.device_state()
    rows = {name: compared(name, found, fitted, device) for name in (ONE, *POLICIES)}
    recorded = RecordedQueue(tuple(calibrated(found[-1].known, fitted)), device, fitted.interference)
    return {"policies": rows, "fit": vars(fitted), "queue": json.loads(recorded.to_json())}


def compared(name: str, rounds: Sequence[Round], fitted: Fit, device: DeviceState) -> dict[str, Any]:
    """A policy's simulated and measured makespan in each round."""
    errors, simulated = [], []
    for one in rounds:
        known = seconds_alone([one.after]) if name == ONE else one.known
        tasks, conditions = calibrated(known, fitted), Conditions(fitted.interference)
        simulated.append(simulate(find_policy(name), tasks, [device], conditions, name).metrics().makespan)
        errors.append(simulated[-1] / one.makespans[name] - 1)
    measured = [one.makespans[name] for one in rounds]
    return {"measured": measured, "simulated": simulated, "errors": errors, "error": median(errors)}


def main() -> None:
    """Print a table; write what was measured and the recorded queue."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sleeping", action="store_true", help="tasks that wait instead of computing")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begin = time.time()
    with tempfile.TemporaryDirectory(prefix="weft-check-", ignore_cleanup_errors=True) as place:
        sizes = 4 * GIB, GIB
        with QueueServer(Path(place), args.device, args.workers, *sizes) as server:
            tasks = (sleeping_queue if args.sleeping else queue)(args.tasks, args.epochs)
            server.warm_up([{**one, "epochs": 2} for one in tasks.values()], 60.0)
            found = check(server, tasks, args.rounds)
    found |= {"load": os.getloadavg()[0], "cores": os.cpu_count(), "seconds": time.time() - begin}
    rows = [
        [name, median(one["measured"]), median(one["simulated"]), one["error"], min(one["errors"]), max(one["errors"])]
        for name, one in found["policies"].items()
    ]
    print_table(["policy", "makespan s", "simulated s", "error", "least", "most"], rows)
    print(f"interference {found['fit']}, load {found['load']:.1f} on {found['cores']} cores, {found['seconds']:.0f} s")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
        args.out.with_name(f"{args.out.stem}-queue.json").write_text(json.dumps(found["queue"]), encoding="utf-8")


if __name__ == "__main__":
    main()
