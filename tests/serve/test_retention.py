"""What retention removes from the disk: folders of tasks that are gone and no others; checkpoints of what has ended."""

from __future__ import annotations

import time

import pytest

from tests.serve.direct_queue import DirectQueue, delete_ended, problems
from tests.serve.serving import Queue
from weft.serve import retention as queue_retention
from weft.serve.queue_db import Group, Submission, take_queue
from weft.serve.retention import clean_up, clock_trouble, drop_checkpoints

A, B, C, G = "a" * 12, "b" * 12, "c" * 12, "0123456789ab"
LATER = 1e12


@pytest.fixture
def queue(tmp_path):
    with DirectQueue(tmp_path / "queue.db") as opened:
        yield opened
        assert problems(opened) == []


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "queue.db.runs"
    folder.mkdir()
    (folder / "workers.log").write_text("log")
    return folder


def folder(runs, name, *checkpoints):
    for place in (runs / name, *(runs / name / "groups" / one for one in checkpoints)):
        place.mkdir(parents=True, exist_ok=True)
        (place / "checkpoint.safetensors").write_text("state")
    (runs / name / "model.safetensors").write_text("weights")
    return runs / name


def submit(queue, *names, **more):
    queue.submit_many([Submission({"task": {}}, id=name, **more) for name in names])
    queue.plan_many([(name, {"bytes": 1}) for name in names])


def group_of(queue, *names, state="ended"):
    """A group that ran in a folder of its own; its tasks are running."""
    group = Group(G, "cpu", "w", names, f"group-{G}", 2, 1.0, "why", 5.0)
    queue.claim_all(names, "w", 1e6, group)
    if state != "running":
        queue.end_group(G, state)
    return group


def finish(queue, name, place):
    queue.finish(name, "w", queue.get(name).attempts, {"folder": place})


def left(runs):
    return sorted(one.name for one in runs.iterdir() if one.is_dir())


def test_folders_of_deleted_tasks_go_and_others_stay(queue, runs):
    submit(queue, A, B)
    queue.cancel(A)
    for name in (A, B, "notes", "group-mine"):
        folder(runs, name)
    assert clean_up(queue, LATER, runs) == 1
    assert left(runs) == [B, "group-mine", "notes"]
    assert (runs / "workers.log").read_text() == "log"


def test_a_task_with_a_name_of_its_own(queue, runs):
    submit(queue, "mine", "..", "../../x")
    for name in ("mine", "..", "../../x"):
        queue.cancel(name)
    folder(runs, "mine")
    outside = folder(runs.parent.parent, "x")
    assert clean_up(queue, LATER, runs) == 3
    assert left(runs) == []
    assert (outside / "model.safetensors").exists()


def test_the_folder_of_a_group_goes_with_its_last_task(queue, runs):
    submit(queue, A, B)
    group_of(queue, A, B)
    place = folder(runs, f"group-{G}")
    finish(queue, A, f"group-{G}/tasks/a")
    assert clean_up(queue, LATER, runs) == 1
    assert place.exists(), "B has not ended"
    finish(queue, B, f"group-{G}/tasks/b")
    assert clean_up(queue, 0.0, runs) == 0
    assert place.exists(), "B is still known"
    assert clean_up(queue, LATER, runs) == 1
    assert left(runs) == []
    assert queue.groups() == []


def test_a_group_that_only_its_tasks_name_is_kept(queue, runs):
    """Where an earlier Weft has forgotten the group."""
    submit(queue, A, B)
    group_of(queue, A, B)
    folder(runs, f"group-{G}")
    folder(runs, f"group-{C}")
    finish(queue, A, f"group-{G}/tasks/a")
    queue.replan(B, {"bytes": 1, "from": f"group-{C}"})
    queue.connection.execute("DELETE FROM groups")
    clean_up(queue, 0.0, runs)
    assert left(runs) == sorted([f"group-{G}", f"group-{C}"])


@pytest.mark.parametrize("state", ["running", "preempted"])
def test_members_of_a_group_that_goes_on_are_kept(queue, runs, state):
    submit(queue, A, B)
    group_of(queue, A, B, state=state)
    queue.cancel(A)
    folder(runs, f"group-{G}")
    assert clean_up(queue, LATER, runs) == 0
    assert queue.get(A).state == "cancelled"
    assert left(runs) == [f"group-{G}"]


def test_a_crash_after_the_deletion_is_made_up_for(queue, runs, monkeypatch):
    submit(queue, A)
    queue.cancel(A)
    folder(runs, A)

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(queue_retention, "remove_unused", crash)
        with pytest.raises(KeyboardInterrupt):
            clean_up(queue, LATER, runs)
    assert (queue.tasks(), left(runs)) == ([], [A])
    assert clean_up(queue, 0.0, runs) == 0
    assert left(runs) == []


def test_a_deletion_that_fails_removes_no_folder(queue, runs, monkeypatch):
    submit(queue, A)
    queue.cancel(A)
    folder(runs, A)
    monkeypatch.setattr(queue_retention, "_DELETE_GROUPS", "DELETE FROM nothing WHERE ?")
    with pytest.raises(Exception, match="nothing"):
        clean_up(queue, LATER, runs)
    assert (queue.get(A).state, left(runs)) == ("cancelled", [A])


def test_links_are_not_followed(queue, runs, tmp_path):
    submit(queue, A, B)
    queue.cancel(A)
    queue.cancel(B)
    outside = folder(tmp_path, "outside")
    (runs / A).symlink_to(outside)
    (folder(runs, B) / "link").symlink_to(outside)
    clean_up(queue, LATER, runs)
    assert (outside / "model.safetensors").read_text() == "weights"
    assert (runs / A).is_symlink()
    assert not (runs / B).exists()


def test_a_queue_that_has_run_nothing(queue, tmp_path):
    assert clean_up(queue, LATER, tmp_path / "nowhere") == 0


def test_groups_are_forgotten_with_their_last_task(queue):
    submit(queue, A)
    group_of(queue, A)
    finish(queue, A, A)
    assert delete_ended(queue, 0.0) == 0
    assert len(queue.groups()) == 1
    assert delete_ended(queue, LATER) == 1
    assert queue.groups() == []


def checkpoints(runs):
    return sorted(str(path.relative_to(runs)) for path in runs.rglob("checkpoint.safetensors"))


def test_checkpoints_of_a_group_go_when_all_members_have_ended(queue, runs, tmp_path):
    submit(queue, A, B, C)
    group = group_of(queue, A, B)
    folder(runs, f"group-{G}", "1", "2")
    folder(runs, C)
    finish(queue, A, f"group-{G}/tasks/a")
    drop_checkpoints(queue, runs, group)
    assert len(checkpoints(runs)) == 4
    queue.cancel(B)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "checkpoint.safetensors").write_text("not ours")
    (runs / f"group-{G}" / "groups" / "3").symlink_to(tmp_path / "elsewhere")
    drop_checkpoints(queue, runs, group)
    assert checkpoints(runs) == [f"{C}/checkpoint.safetensors"]
    assert (tmp_path / "elsewhere" / "checkpoint.safetensors").exists()
    assert (runs / f"group-{G}" / "model.safetensors").exists()


def test_checkpoints_that_a_task_goes_on_from_stay(queue, runs):
    """A member of a dissolved group goes on alone; what it has ended takes the group's checkpoints with it."""
    submit(queue, A, B)
    group_of(queue, A, B, state="dissolved")
    folder(runs, f"group-{G}", "1")
    finish(queue, A, f"group-{G}/tasks/a")
    queue.replan(B, {"bytes": 1, "from": f"group-{G}"})
    alone = Group(C, "cpu", "w", (B,), B, 2, 1.0, "why", 5.0)
    folder(runs, B)
    before = checkpoints(runs)
    drop_checkpoints(queue, runs, alone)
    assert checkpoints(runs) == before
    finish(queue, B, B)
    delete_ended(queue, 0.0)
    drop_checkpoints(queue, runs, alone)
    assert checkpoints(runs) == []


def test_a_server_removes_folders_and_checkpoints(tmp_path):
    opened = Queue(tmp_path, checkpoint_seconds=0.0)
    try:
        names = opened.submit({"seed": 1}, {"seed": 2}) + opened.submit({"hidden": 5})
        ended = opened.wait(names)
        assert {task.state for task in ended} == {"done"}
        opened.until(lambda: not checkpoints(opened.options.runs))
        assert all((opened.options.runs / one.result["folder"] / "model.safetensors").exists() for one in ended)
    finally:
        opened.close()
    again = Queue(tmp_path, keep_seconds=1e-3)
    try:
        again.until(lambda: not again.db.tasks() and not left(again.options.runs))
    finally:
        again.close()


DAY = 86_400.0


@pytest.mark.parametrize(
    ("days", "keep_days", "trusted"),
    [
        (0.5, 30, True),
        (6, 30, True),
        (8, 30, False),
        (365, 30, False),
        (2, 1, False),
        (-0.01, 30, True),
        (-1, 30, False),
    ],
)
def test_nothing_is_deleted_by_a_clock_that_is_far_off(tmp_path, days, keep_days, trusted):
    with DirectQueue(tmp_path / "queue.db", lambda: 1e9) as queue:
        submit(queue, A)
    take_queue(tmp_path / "queue.db")
    with DirectQueue(tmp_path / "queue.db", lambda: 1e9 + days * DAY) as queue:
        submit(queue, B)  # the server's own events say nothing about its clock
        for _ in range(2):
            trouble = clock_trouble(queue, keep_days * DAY, 1e9 + days * DAY)
            assert (not trouble) == trusted
        if not trusted:
            assert "and was 2001-09-09 before; set the clock, or if it is right start the server once" in trouble
            assert not clock_trouble(queue, keep_days * DAY, 1e9 + 60)  # the clock was set
            assert not clock_trouble(queue, None, 1e9 + days * DAY)  # the remedy
            assert not clock_trouble(queue, keep_days * DAY, 1e9 + days * DAY + 60)


@pytest.mark.rest
def test_a_server_with_a_clock_that_is_far_ahead_says_so_once_and_deletes_nothing(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr("weft.serve.supervisor.CLEAN_SECONDS", 0.2)
    with DirectQueue(tmp_path / "queue.db", lambda: time.time() - 365 * DAY) as queue:
        submit(queue, A)
        queue.cancel(A)
    take_queue(tmp_path / "queue.db")
    server = Queue(tmp_path, keep_seconds=30 * DAY)
    try:
        server.wait(server.submit({"seed": 1}))
    finally:
        server.close()
    assert capfd.readouterr().err.count("--keep-days deletes nothing") == 1
    with DirectQueue(tmp_path / "queue.db") as queue:
        assert queue.get(A).state == "cancelled"
