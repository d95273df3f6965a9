"""Kernels that are compiled are known, per kind of GPU; the plan counts what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

import weft
from weft.engine.home import home
from weft.engine.kernel_store import FOLDER, SECONDS_EACH, KernelStore, seconds_to_compile
from weft.engine.machine import cpu_count
from weft.planner.report.plan_report import PlanReport


def test_what_is_compiled_is_missing_only_if_its_folder_is_gone(tmp_path):
    store = KernelStore(90)
    assert store.missing(["a", "b"]) == ["a", "b"]
    store.add({"a": (str(tmp_path / "a"), 1.0), "b": (str(tmp_path), 2.0)})
    assert store.missing(["a", "b"]) == ["a"]
    assert KernelStore(90).missing(["a", "b", "c"]) == ["a", "c"]
    assert KernelStore(80).missing(["b"]) == ["b"], "another kind of GPU"


def test_a_table_of_other_code_or_a_damaged_one_counts_for_nothing(tmp_path):
    KernelStore(90).add({"a": (str(tmp_path), 1.0)})
    (path,) = (home() / FOLDER).glob("*.json")
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "code": "other"}))
    assert KernelStore(90).missing(["a"]) == ["a"]
    path.write_text("{")
    assert KernelStore(90).missing(["a"]) == ["a"]


def test_seconds_to_compile_are_those_of_what_is_missing(tmp_path):
    wanted = [f"k{place}" for place in range(2 * cpu_count())]
    assert seconds_to_compile(wanted) == pytest.approx(2 * SECONDS_EACH)
    KernelStore(90).add(dict.fromkeys(wanted[: cpu_count()], (str(tmp_path), 1.0)))
    assert seconds_to_compile(wanted) == pytest.approx(SECONDS_EACH)
    assert seconds_to_compile(wanted[: cpu_count()]) == 0


def test_a_plan_says_what_compiling_takes():
    report = weft.plan(weft.Task(graph="shape:cora"), machine="h200")
    assert report.compile_seconds == 0, "another machine: not known"
    from dataclasses import replace

    longer = replace(report, compile_seconds=3.3)
    assert "and 3.30 s once to compile kernels" in str(longer)
    assert PlanReport.from_dict(longer.to_dict()).compile_seconds == 3.3


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
def test_the_command_compiles_ahead_once(tmp_path):
    pytest.importorskip("triton")
    spec = tmp_path / "spec.toml"
    spec.write_text('graph = "demo"\n[model]\nname = "gcn"\nlayers = 1\n')
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "triton"), "WEFT_HOME": str(tmp_path / "home")}

    def warm(*words):
        command = [sys.executable, "-W", "ignore", "-m", "weft", "warm", *words]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    first = warm(str(spec), "--arch", "90")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("compiled ")
    assert first.stdout.endswith("kernels for sm_90\n")
    assert warm(str(spec), "--arch", "90").stdout == "nothing to compile for sm_90\n"
    shutil.rmtree(tmp_path / "triton")
    assert warm(str(spec), "--arch", "90").stdout == first.stdout


def test_the_command_says_what_it_needs():
    def warm(*words):
        command = [sys.executable, "-m", "weft", "warm", *words]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})

    assert warm("--set", "a=1").returncode == 2
    assert "there is no GPU here; --arch 90" in warm().stderr
