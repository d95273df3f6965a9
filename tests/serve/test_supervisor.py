"""The supervisor with worker processes: what runs, what fails, and what survives it."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from dataclasses import replace

import pytest
import torch

import weft
from tests.serve.direct_queue import problems
from tests.serve.serving import FAULTY, TASK, Queue, history_of
from weft.core.errors import WeftError
from weft.engine.estimator import Estimator
from weft.engine.learning import observation_of
from weft.engine.machine import machine_with
from weft.serve.queue_db import ENDED, Submission
from weft.serve.worker import log_error

LONG = {"epochs": 120}
KILLS = int(os.environ.get("WEFT_KILL_ROUNDS", "3"))


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    opened = Queue(tmp_path_factory.mktemp("queue"))
    yield opened
    opened.close()
    assert opened.supervisor.error == ""


def own(name: str, **more):
    return {"model": f"{FAULTY}:{name}", "graph": "demo", "epochs": 5, **more}


def submit_own(queue, *tasks, **more):
    found = queue.db.submit_many([Submission({"task": task}, **more) for task in tasks])
    queue.supervisor.wake()
    return [task.id for task in found]


def result_of(queue, name: str) -> dict:
    """What a task left in its file."""
    return json.loads((queue.options.runs / queue.db.get(name).result["folder"] / "result.json").read_text())


def same(one: dict, two: dict) -> bool:
    """Equal bit for bit; an epoch that was not measured is null in a file."""
    plain = {k: [None if v is None or math.isnan(v) else v for v in values] for k, values in two.items()}
    return {key: list(values) for key, values in one.items()} == plain


def test_tasks_of_one_kind_are_joined_and_have_the_numbers_of_a_sweep(queue):
    names = queue.submit(*({"seed": seed} for seed in range(6)))
    done = queue.wait(names)
    assert [task.state for task in done] == ["done"] * 6
    queue.until(lambda: not queue.db.groups("running"))
    group = next(one for one in queue.db.groups("ended") if names[0] in one.members)
    assert sorted(group.members) == sorted(names)
    settings = {task.id: task.spec["task"] for task in done}
    expected = history_of([weft.Task(**settings[name], name=name) for name in group.members])
    assert all(same(queue.history(name), expected[name]) for name in names)


def test_a_task_alone_has_the_numbers_of_a_run(queue):
    [name] = queue.submit({"model": "sage", "layers": 3})
    queue.wait([name])
    assert same(queue.history(name), history_of(weft.Task(**{**TASK, "model": "sage", "layers": 3}))["sage"])


@pytest.mark.parametrize("twin", [{"seed": 0, "hidden": 4}, {"hidden": 4}, {"hidden": 4, "dropout": 0.5}])
def test_twins_are_trained_in_different_groups(queue, twin):
    """Also where one of them leaves the usual values out."""
    names = queue.submit({"seed": 0, "hidden": 4}, {"seed": 1, "hidden": 4}, twin)
    assert [(task.state, task.attempts) for task in queue.wait(names)] == [("done", 1)] * 3
    losses = [queue.history(name)["train_loss"] for name in names]
    assert losses[0] == pytest.approx(losses[2], rel=1e-3)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("model", "told"), [("Raises", "on purpose"), ("TurnsNaN", "loss"), ("NoMemory", "memory"), ("Missing", "Missing")]
)
def test_a_model_that_goes_wrong_fails_with_the_reason_and_harms_nobody(queue, model, told):
    bad = submit_own(queue, own(model))
    good = queue.submit({"seed": 1})
    [failed], [done] = queue.wait(bad), queue.wait(good)
    assert (failed.state, done.state) == ("failed", "done")
    assert told in failed.error


@pytest.mark.parametrize("model", ["LeavesPython", "LeavesPythonWhenBuilt"])
def test_a_model_that_calls_exit_fails_once_with_the_reason(queue, model):
    lost = queue.supervisor.state.counters["workers_lost"]
    [task] = queue.wait(submit_own(queue, own(model)))
    assert (task.state, task.attempts <= 1) == ("failed", True)
    assert "SystemExit: had enough" in task.error
    assert queue.supervisor.state.counters["workers_lost"] == lost


def test_what_a_model_prints_is_in_its_log(queue):
    names = submit_own(queue, own("Raises", seed=1))
    queue.wait(names)
    assert "about to raise" in (queue.options.runs / names[0] / "log.txt").read_text()


@pytest.mark.parametrize("model", ["TurnsNaN", "Missing"])
def test_the_log_of_a_mistake_that_weft_names_is_that_sentence(queue, model):
    [task] = queue.wait(submit_own(queue, own(model, seed=2)))
    log = (queue.options.runs / task.id / "log.txt").read_text().strip()
    assert log == task.error


def test_the_log_of_an_error_in_a_model_has_the_sentence_and_the_frames_of_the_model(queue):
    [task] = queue.wait(submit_own(queue, own("Raises", seed=3)))
    log = (queue.options.runs / task.id / "log.txt").read_text()
    sentence, *frames = log.rpartition("about to raise\n")[2].strip().splitlines()
    assert sentence == task.error
    files = [line.split('"')[1] for line in frames if line.startswith("  File")]
    assert len(files) == 3
    assert all(file.endswith("faulty_models.py") for file in files)
    assert (frames[0], frames[-1]) == ("Traceback (most recent call last):", "ValueError: on purpose")


def test_a_fault_that_nobody_foresaw_has_its_whole_traceback(capsys):
    try:
        json.loads("[")
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next  # as if no line of a user's were on the way
        log_error(error)
    sentence, begin, first, *_ = capsys.readouterr().err.splitlines()
    assert "JSONDecodeError: " in sentence
    assert begin == "Traceback (most recent call last):"
    assert "json" in first


def test_a_result_has_the_name_that_its_user_gave_and_the_id_beside_it(queue):
    names = queue.submit(*({"name": f"seed={seed}", "seed": seed, "hidden": 10} for seed in (1, 2)), {"model": "sage"})
    tasks = queue.wait(names)
    found = [result_of(queue, task.id) for task in tasks]
    assert [(one["id"], one["task"]["name"]) for one in found] == list(
        zip(names, ["seed=1", "seed=2", None], strict=True)
    )
    loaded = [weft.read(queue.options.runs / task.result["folder"]) for task in tasks]
    assert [one.name for one in loaded] == ["seed=1", "seed=2", "sage"]


def test_results_of_a_server_can_be_learned_from_whatever_their_names(queue):
    tasks = queue.wait(queue.submit(*({"seed": seed, "hidden": 14} for seed in (1, 2)), {"model": "sage", "seed": 5}))
    estimator = Estimator(machine_with(torch.device("cpu")))
    fused, alone = [result_of(queue, task.id) for task in tasks[:2]], [result_of(queue, tasks[2].id)]
    assert len(fused[0]["plan"]["members"]) == 2
    assert all(observation_of(results, estimator, "").usable for results in (fused, alone))


def test_what_a_worker_has_loaded_is_left_out_of_garbage_collections(queue):
    names = submit_own(queue, own("CountsFrozen"))
    queue.wait(names)
    said = (queue.options.runs / names[0] / "log.txt").read_text().splitlines()
    assert max(int(line.split()[1]) for line in said if line.startswith("frozen")) > 100_000  # torch's own


def test_memory_that_was_not_enough_is_learned_from_once(queue):
    names = submit_own(queue, own("NoMemoryOnce"))
    [task] = queue.wait(names)
    assert (task.state, task.attempts) == ("done", 2)
    estimates = [e.data for e in queue.db.events(task=task.id, limit=1000) if e.kind == "queued"]
    assert "the estimate is now" in estimates[1]["error"]
    assert task.plan["memory_errors"] == 1
    starts = sorted((group.started, group.bytes) for group in queue.db.groups(limit=10) if task.id in group.members)
    assert starts[1][1] > starts[0][1]
    again = submit_own(queue, own("NoMemory", seed=1))
    [task] = queue.wait(again)
    assert (task.state, task.attempts) == ("failed", 2)


def test_a_task_over_its_own_budget_is_refused(queue):
    task = queue.db.submit(Submission({"task": TASK, "budget": 1000}))
    queue.supervisor.wake()
    [task] = queue.wait([task.id])
    assert (task.state, task.attempts) == ("failed", 0)
    assert "0.98 KiB is below the weights and optimizer state of task" in task.error


def test_a_model_that_leaks_is_ended_and_its_neighbours_are_not(queue):
    bad = submit_own(queue, own("Leaks", epochs=1000))
    good = queue.submit({"seed": 2, "hidden": 4})
    [failed], [done] = queue.wait(bad), queue.wait(good)
    assert (failed.state, failed.attempts, done.state) == ("failed", 2, "done")
    assert "out of memory" in failed.error


def test_small_tensors_over_the_budget_are_an_error_of_that_task_alone(queue):
    before = queue.supervisor.state.counters["memory_errors"]
    bad = submit_own(queue, own("LeaksSmall", epochs=1000))
    good = queue.submit({"seed": 4, "hidden": 4})
    [failed], [done] = queue.wait(bad), queue.wait(good)
    assert (failed.state, failed.attempts, done.state) == ("failed", 2, "done")
    assert "the device ran out of memory" in failed.error  # raised inside the task; its process was not ended for it
    assert queue.supervisor.state.counters["memory_errors"] == before + 2
    assert same(queue.history(done.id), history_of(weft.Task(**{**TASK, "seed": 4, "hidden": 4}))["gcn"])


def test_a_worker_that_ends_is_replaced_and_its_task_given_up_after_some_attempts(queue):
    workers = queue.supervisor.pool.workers
    queue.until(lambda: "cpu/0" in workers and workers["cpu/0"].idle)  # one that ran out of memory before is replaced
    lost = queue.supervisor.state.counters["workers_lost"]
    [task] = queue.wait(submit_own(queue, own("Exits"), max_attempts=2))
    assert (task.state, task.attempts) == ("failed", 2)
    assert "exit code 7 (attempt 2 of 2)" in task.error.replace("its worker ended (exit code 7)", "exit code 7")
    assert queue.supervisor.state.counters["workers_lost"] == lost + 2


def test_a_crash_leaves_the_place_in_the_log_of_its_task(queue):
    workers = queue.supervisor.pool.workers
    queue.until(lambda: "cpu/0" in workers and workers["cpu/0"].idle)
    [task] = queue.wait(submit_own(queue, own("Crashes"), max_attempts=1))
    assert task.state == "failed"
    assert "SIGSEGV" in task.error
    log = (queue.options.runs / task.id / "log.txt").read_text()
    assert "Segmentation fault" in log
    assert "faulty_models.py" in log
    assert "in go_wrong" in log
    assert "frame #0" not in log


@pytest.mark.parametrize(("attempts", "times"), [(3, 3), (1, 2)])
def test_a_model_that_ends_the_planner_is_refused(queue, attempts, times):
    bad = submit_own(queue, own("exits_when_built"), max_attempts=attempts)
    good = queue.submit({"seed": 5, "layers": 4})
    [failed], [done] = queue.wait(bad), queue.wait(good)
    assert (failed.state, done.state) == ("failed", "done")
    assert f"ended the planner {times} times" in failed.error


def test_a_model_that_hangs_is_ended(queue, monkeypatch):
    names = submit_own(queue, own("Hangs"), max_attempts=1)
    queue.until(lambda: queue.db.get(names[0]).state == "running")
    monkeypatch.setattr(queue.supervisor.state, "options", replace(queue.options, hang_seconds=2.0))
    [task] = queue.wait(names)
    assert task.state == "failed"
    assert "made no progress for 2 s" in task.error


def test_cancelling_a_member_leaves_the_others(queue):
    names = queue.submit(*({"seed": seed, **LONG} for seed in range(3)))
    queue.until(lambda: queue.epoch(names[0]) > 0)
    queue.db.cancel(names[1])
    queue.supervisor.wake()
    assert [task.state for task in queue.wait(names)] == ["done", "cancelled", "done"]


def test_a_task_that_is_paused_goes_on_with_the_same_numbers(queue):
    [name] = queue.submit({"hidden": 12, **LONG})
    queue.until(lambda: queue.epoch(name) > 0)
    queue.db.pause(name)
    queue.supervisor.wake()
    queue.until(lambda: not queue.supervisor.state.active)
    assert queue.db.get(name).state == "paused"
    assert not queue.supervisor.state.resumable
    queue.db.resume(name)
    queue.supervisor.wake()
    [task] = queue.wait([name])
    assert task.state == "done"
    assert same(queue.history(name), history_of(weft.Task(**{**TASK, "hidden": 12, **LONG}))["gcn"])


def test_a_member_that_is_paused_goes_on_alone_and_the_others_as_a_group(queue):
    names = queue.submit(*({"seed": seed, "hidden": 20, **LONG} for seed in range(3)))
    queue.until(lambda: queue.epoch(names[0]) > 0)
    queue.db.pause(names[1])
    queue.supervisor.wake()
    first = queue.wait([names[0], names[2]])
    assert [task.state for task in first] == ["done", "done"]
    assert queue.db.get(names[1]).state == "paused"
    group = next(one for one in queue.db.groups() if names[0] in one.members)
    settings = {task.id: task.spec["task"] for task in map(queue.db.get, names)}
    expected = history_of([weft.Task(**settings[name], name=name) for name in group.members])
    assert same(queue.history(names[0]), expected[names[0]])
    queue.db.resume(names[1])
    queue.supervisor.wake()
    [task] = queue.wait([names[1]])
    assert task.state == "done"
    assert any("resumed after epoch" in str(e.data.get("message")) for e in queue.db.events(task=task.id, limit=5000))
    alone, fused = queue.history(names[1])["val_loss"], expected[names[1]]["val_loss"]
    assert alone == pytest.approx(fused, rel=1e-3)


def test_a_task_starts_after_what_it_depends_on(queue):
    [first] = queue.submit({"seed": 7})
    [second] = queue.submit({"seed": 8}, after=(first,))
    one, two = queue.wait([first, second])
    assert (one.state, two.state) == ("done", "done")
    started = {name: min(g.started for g in queue.db.groups() if name in g.members) for name in (first, second)}
    assert started[second] > started[first]


def test_killed_workers_cost_nothing_but_time(queue):
    """A task alone goes on from its checkpoint, bit for bit; the queue keeps every promise."""
    draw = random.Random(0)
    [name] = queue.submit({"hidden": 24, "epochs": 250}, max_attempts=KILLS + 2)
    queue.until(lambda: queue.epoch(name) > 0)
    for _ in range(KILLS):
        target = queue.epoch(name) + draw.randrange(1, 50)
        queue.until(lambda target=target: queue.epoch(name) >= target or queue.db.get(name).state in ENDED)
        if queue.db.get(name).state in ENDED:
            break
        attempts = queue.db.get(name).attempts
        os.kill(queue.worker_pid(), signal.SIGKILL)
        queue.until(  # it may have ended a moment before
            lambda attempts=attempts: queue.db.get(name).attempts > attempts or queue.db.get(name).state in ENDED
        )
    [task] = queue.wait([name])
    assert task.state == "done"
    assert task.attempts > 1
    assert same(queue.history(name), history_of(weft.Task(**{**TASK, "hidden": 24, "epochs": 250}))["gcn"])
    assert problems(queue.db) == []


def test_a_group_whose_worker_is_killed_goes_on_one_by_one(queue):
    names = queue.submit(*({"seed": seed, "hidden": 28, **LONG} for seed in range(3)))
    queue.until(lambda: queue.epoch(names[0]) > 0)
    os.kill(queue.worker_pid(), signal.SIGKILL)
    done = queue.wait(names)
    assert [task.state for task in done] == ["done"] * 3
    group = next(one for one in queue.db.groups() if set(names) <= set(one.members))
    assert group.state == "dissolved"
    settings = {task.id: task.spec["task"] for task in done}
    expected = history_of([weft.Task(**settings[name], name=name) for name in group.members])
    for name in names:
        assert queue.history(name)["val_loss"] == pytest.approx(expected[name]["val_loss"], rel=1e-3)
        notes = [str(e.data.get("message")) for e in queue.db.events(task=name, limit=5000) if e.kind == "note"]
        assert any("resumed after epoch" in note for note in notes)


def test_a_torn_checkpoint_is_dropped(queue):
    [name] = queue.submit({"hidden": 36, **LONG})
    queue.until(lambda: queue.epoch(name) > 0)
    queue.db.pause(name)
    queue.supervisor.wake()
    queue.until(lambda: not queue.supervisor.state.active)
    path = queue.options.runs / name / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    queue.db.resume(name)
    queue.supervisor.wake()
    [task] = queue.wait([name])
    assert task.state == "done"
    assert same(queue.history(name), history_of(weft.Task(**{**TASK, "hidden": 36, **LONG}))["gcn"])


def test_a_result_that_could_not_be_written_is_not_lost(queue, monkeypatch):
    """As on a full disk: it is written when there is room, which costs the task no attempt."""
    finish, refused = queue.supervisor.state.db.finish, []

    def full(*arguments):
        if not refused:
            refused.append(arguments)
            raise WeftError("the queue could not be written (database or disk is full); nothing was changed")
        return finish(*arguments)

    monkeypatch.setattr(queue.supervisor.state.db, "finish", full)
    monkeypatch.setattr(queue.supervisor.state, "options", replace(queue.options, lease_seconds=1.5))
    [name] = queue.submit({"seed": 9, "hidden": 6})
    [task] = queue.wait([name])
    assert (task.state, task.attempts, len(refused)) == ("done", 1, 1)
    assert queue.supervisor.is_alive()


def test_the_queue_kept_every_promise(queue):
    assert problems(queue.db) == []


def test_a_task_of_higher_priority_preempts_and_the_other_goes_on_bit_for_bit(queue):
    [slow] = queue.submit({"hidden": 20, "epochs": 1500, "seed": 8})
    queue.until(lambda: queue.epoch(slow) > 0)
    active = next(one for one in queue.supervisor.state.active.values() if slow in one.members)
    active.group = replace(active.group, seconds=3600.0)  # by the estimate it would be done too soon to preempt
    [quick] = queue.submit({"seed": 9}, priority=5)
    done, task = queue.wait([quick, slow], 240.0)
    assert (done.state, task.state) == ("done", "done")
    assert done.updated < task.updated
    assert "preempted" in [event.data.get("error") for event in queue.db.events(task=slow, limit=100_000)]
    expected = history_of(weft.Task(**{**TASK, "hidden": 20, "epochs": 1500, "seed": 8}))["gcn"]
    assert same(queue.history(slow), expected)
