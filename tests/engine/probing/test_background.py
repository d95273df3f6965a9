"""A probe in the background: started once per machine, measures while nothing else runs, else gives up."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

import weft
from weft.cli.main import main
from weft.engine import background_probe as child
from weft.engine import background_probe as start
from weft.engine import machine as machines
from weft.engine import probe
from weft.engine.background_probe import LoadSample
from weft.engine.home import PROBE, STARTED, machine_folder, machine_name
from weft.planner.machine_profiles import profile

CPU = torch.device("cpu")


def folder():
    return machine_folder(machine_name("cpu"))


@pytest.fixture
def spawned(monkeypatch):
    """Commands that were to be run, instead of the processes."""
    commands = []
    monkeypatch.setenv(start.VARIABLE, "on")

    def run(command, **options):
        commands.append((command, options))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(start.subprocess, "run", run)
    return commands


SPEC = 'graph = "demo"\n[model]\nname = "gcn"\nhidden = 4\n[train]\nepochs = 1\n'


def weft_run(folder, monkeypatch, progress: str) -> int:
    """The exit code of the command."""
    spec = folder / "spec.toml"
    spec.write_text(SPEC, encoding="utf-8")
    words = ["run", spec, "--out", folder / "out", "--overwrite", "--progress", progress, "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["weft", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_it_is_started_once_at_a_terminal_and_said_in_one_line(spawned, tmp_path, monkeypatch, capsys):
    assert weft_run(tmp_path, monkeypatch, "live") == 0
    assert start.STARTED_WORDS in capsys.readouterr().err.splitlines()
    assert weft_run(tmp_path, monkeypatch, "live") == 0
    assert start.STARTED_WORDS not in capsys.readouterr().err
    [(command, options)] = spawned
    assert command[-2:] == [sys.executable, start.CHILD]
    assert options["start_new_session"]
    assert options["cwd"] == folder()


def test_scripts_are_left_no_process_behind(spawned, tmp_path, monkeypatch):
    assert weft_run(tmp_path, monkeypatch, "plain") == 0
    weft.run(weft.Task(graph="demo", hidden=4, epochs=1), device="cpu", progress=False)
    assert spawned == []


def test_one_that_was_lost_is_started_again(spawned):
    assert start.start_probe("cpu") == start.STARTED_WORDS
    assert start.start_probe("cpu") == ""
    before = time.time() - start.FORGOTTEN - 1
    os.utime(folder() / STARTED, (before, before))
    assert start.start_probe("cpu") == start.STARTED_WORDS
    assert len(spawned) == 2


def test_the_module_that_is_started_is_there_and_does_without_torch_until_it_measures():
    code = f"import sys, importlib; importlib.import_module({start.CHILD!r}); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_a_machine_that_was_measured_and_one_who_says_off_start_none(spawned, monkeypatch):
    machines.keep_probe(replace(profile("cpu"), name=machine_name("cpu")))
    assert start.start_probe("cpu") == ""
    (folder() / PROBE).unlink()
    monkeypatch.setenv(start.VARIABLE, "off")
    assert start.start_probe("cpu") == ""
    assert spawned == []


def test_another_word_than_on_or_off_is_refused_before_anything_is_trained(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(start.VARIABLE, "perhaps")
    assert weft_run(tmp_path, monkeypatch, "live") == 2
    assert "WEFT_PROBE='perhaps' must be on or off" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def idle_and_busy(monkeypatch, *others: float) -> None:
    """What other processes take in every later look, the last for ever."""
    waiting = list(others)

    def here():
        here.now += 1.0
        here.all += waiting.pop(0) if len(waiting) > 1 else waiting[0]
        return LoadSample(here.now, 0.0, here.all, 2)

    here.now = here.all = 0.0
    monkeypatch.setattr(LoadSample, "now", here)


@pytest.fixture
def measured(monkeypatch):
    """How often the machine is measured."""
    calls = []

    def measure(device):
        calls.append(device)
        return replace(profile("cpu"), name=machine_name("cpu"), measured=True)

    monkeypatch.setattr(probe, "probe", measure)
    monkeypatch.setattr(child.os, "nice", lambda more: more)
    folder().mkdir(parents=True)
    (folder() / STARTED).touch()
    return calls


def test_an_idle_machine_is_measured_and_later_plans_use_it(measured, monkeypatch):
    idle_and_busy(monkeypatch, 0.0)
    child.main(sleep=lambda seconds: None)
    assert measured == [CPU]
    assert machines.this_machine().measured


def test_what_was_measured_beside_another_process_is_not_kept(measured, monkeypatch):
    # Two looks while it waits and two around the measurement; the second pair of looks sees a busy machine.
    idle_and_busy(monkeypatch, 0.0, 0.0, 0.0, 1.9, 0.0)
    child.main(sleep=lambda seconds: None)
    assert measured == [CPU, CPU]
    assert (folder() / PROBE).exists()


def test_a_busy_machine_is_never_measured_and_the_next_run_may_try_again(measured, monkeypatch):
    idle_and_busy(monkeypatch, 1.9)
    monkeypatch.setattr(child, "PATIENCE_SECONDS", 0.05)
    child.main(sleep=lambda seconds: time.sleep(0.01))
    assert measured == []
    assert not (folder() / PROBE).exists()
    assert not (folder() / STARTED).exists()
