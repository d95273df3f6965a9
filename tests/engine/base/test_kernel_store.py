"""Kernels that are compiled are known, per kind of GPU; the plan counts what is missing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

import weft
from weft.core.host_memory import cpu_count
from weft.engine.home import COMPILE_SECONDS, KERNELS, home, missing_kernels, note_kernels, seconds_to_compile
from weft.planner.report.plan_report import PlanReport


def test_what_is_compiled_is_missing_only_if_its_folder_is_gone(tmp_path):
    assert missing_kernels(90, ["a", "b"]) == ["a", "b"]
    note_kernels(90, {"a": str(tmp_path / "a"), "b": str(tmp_path)})
    assert missing_kernels(90, ["a", "b"]) == ["a"]
    assert missing_kernels(90, ["a", "b", "c"]) == ["a", "c"]
    assert missing_kernels(80, ["b"]) == ["b"], "another kind of GPU"
    note_kernels(90, {"c": str(tmp_path)})
    assert missing_kernels(90, ["b", "c"]) == [], "what was noted before is still there"


def test_a_table_of_other_code_or_a_damaged_one_counts_for_nothing(tmp_path):
    note_kernels(90, {"a": str(tmp_path)})
    (path,) = (home() / KERNELS).glob("*.json")
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "digest": "other"}))
    assert missing_kernels(90, ["a"]) == ["a"]
    path.write_text("{")
    assert missing_kernels(90, ["a"]) == ["a"]


def test_seconds_to_compile_are_those_of_what_is_missing(tmp_path):
    wanted = [f"k{place}" for place in range(2 * cpu_count())]
    assert seconds_to_compile(wanted) == pytest.approx(2 * COMPILE_SECONDS)
    note_kernels(90, dict.fromkeys(wanted[: cpu_count()], str(tmp_path)))
    assert seconds_to_compile(wanted) == pytest.approx(COMPILE_SECONDS)
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
