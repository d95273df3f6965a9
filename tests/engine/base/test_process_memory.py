"""What a process on a CPU takes: predicted with everything in it, measured, and told beside a budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import weft
from weft.core.program import Operator, Program, Value
from weft.engine.memory import base_bytes, give_back_heap, status_bytes, watch_peak
from weft.planner.cost.memory import KINDS, PROCESS_BYTES, process_bytes

MIB = 1 << 20
pytestmark = pytest.mark.skipif(status_bytes("VmRSS") is None, reason="the system does not say")


def test_the_peak_is_that_since_it_was_watched():
    if not watch_peak():
        pytest.skip("the peak cannot be reset here")
    before = status_bytes("VmHWM")
    block = np.ones(64 * MIB, dtype=np.uint8)
    del block
    assert status_bytes("VmHWM") >= before + 60 * MIB
    watch_peak()
    assert status_bytes("VmHWM") < before + 60 * MIB
    assert base_bytes() >= status_bytes("VmRSS") - 8 * MIB


def test_small_blocks_leave_holes_and_large_ones_do_not():
    def program(size):
        values = (Value(MIB, "weight"), Value(size, "activation"))
        return Program(values, (Operator("one", "forward", (0,), (1,)),), (0,))

    small, middle, mapped = (times for *_, times in KINDS)
    assert middle > small > mapped
    assert process_bytes(program(10 * MIB)) == PROCESS_BYTES + MIB + int(small * 10 * MIB)
    assert process_bytes(program(20 * MIB)) == PROCESS_BYTES + MIB + int(middle * 20 * MIB)
    assert process_bytes(program(64 * MIB)) == PROCESS_BYTES + MIB + int(mapped * 64 * MIB)
    assert process_bytes(program(MIB), program(9 * MIB)) == PROCESS_BYTES + MIB + int(small * 9 * MIB)


def test_a_heap_stays_beside_what_is_mapped_later():
    values = (Value(MIB, "weight"), Value(20 * MIB, "activation"), Value(64 * MIB, "activation"))
    first, then = Operator("one", "forward", (0,), (1,)), Operator("two", "forward", (0,), (2,))
    _, middle, mapped = (times for *_, times in KINDS)
    found = process_bytes(Program(values, (first, then), (0,)))  # the two are never alive together
    assert found == PROCESS_BYTES + MIB + int(middle * 20 * MIB + mapped * 64 * MIB)


def test_freed_memory_is_given_back():
    parts = [np.ones(MIB // 2, dtype=np.uint8) for _ in range(200)]
    kept = parts[::50]
    before = status_bytes("VmRSS")
    del parts
    give_back_heap()
    assert len(kept) == 4
    assert status_bytes("VmRSS") <= before


CHILD = """
import json, sys
import weft
settings = json.loads(sys.argv[1])
sweep = weft.Sweep(settings.pop("graph"), epochs=2, **settings)
cost = max(group.cost.process_bytes for group in weft.plan(sweep).groups)
result = weft.run(sweep, device="cpu", progress=False)
print(json.dumps([cost, max(plan.measured["process_bytes"] for plan in result.plan)]))
"""


def predicted_and_taken(settings):
    done = subprocess.run([sys.executable, "-c", CHILD, json.dumps(settings)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "settings",
    [
        {"graph": "demo", "model": "gat", "hidden": 64, "seed": [0, 1]},
        {"graph": "shape:pubmed", "model": "gcn", "layers": 3, "seed": [0, 1, 2, 3]},
    ],
)
def test_a_process_takes_what_was_predicted(settings):
    found = predicted_and_taken(settings)
    if found[1] > 1.10 * found[0]:  # the first process that needs a kernel also holds its compiler
        found = predicted_and_taken(settings)
    assert 0.75 * found[0] <= found[1] <= 1.10 * found[0]


def test_a_budget_on_a_cpu_is_told_for_what_it_is():
    notes = []

    def listen(event):
        if event.kind == "note":
            notes.append(event.data["message"])

    weft.run(weft.Task(graph="demo", epochs=1, hidden=8), device="cpu", budget="64MiB", progress=False, on_event=listen)
    assert "covers what training adds; the process will take about" in notes[0]
    notes.clear()
    weft.run(weft.Task(graph="demo", epochs=1, hidden=8), device="cpu", budget="64GiB", progress=False, on_event=listen)
    assert not any("budget" in note for note in notes)


def test_a_plan_for_a_cpu_says_it():
    report = weft.plan(weft.Task(graph="demo"), machine="cpu")
    assert "resident, Python, torch and kernels included" in str(report)
    assert "resident" not in str(weft.plan(weft.Task(graph="demo"), machine="h200"))


def test_freed_memory_is_kept_for_the_next_step_unless_the_user_said_how():
    code = (
        "import ctypes, sys, types\n"
        "from weft.engine import memory\n"
        "calls = []\n"
        "library = types.SimpleNamespace(mallopt=lambda *given: calls.append(given))\n"
        "memory.ctypes = types.SimpleNamespace(CDLL=lambda name: library)\n"
        "memory.keep_heap(); memory.keep_heap(); print(calls)"
    )

    def calls(**more):
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | more
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert calls() == "[(-1, 2147483647), (-3, 33554432)]"
    assert calls(MALLOC_TRIM_THRESHOLD_="1000000") == "[]"
    assert calls(GLIBC_TUNABLES="glibc.malloc.trim_threshold=1") == "[]"
