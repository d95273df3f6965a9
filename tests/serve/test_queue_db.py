"""The durable queue: transitions, keys, claims and leases, dependencies, events, retention."""

from __future__ import annotations

import multiprocessing
import sqlite3
import subprocess
import sys

import pytest

from tests.serve.direct_queue import DirectQueue, delete_ended, problems
from weft.serve.queue_db import NEXT_STATES, STATES, LostClaimError, QueueError, Submission


class Clock:
    """A clock that the test moves."""

    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def queue(tmp_path, clock):
    with DirectQueue(tmp_path / "queue.db", clock) as opened:
        yield opened
        assert problems(opened) == []


def planned(queue, *names, **more):
    for name in names:
        queue.submit(Submission({"model": "gcn"}, id=name, **more))
        queue.plan(name, {"join": "solo"})


def kinds(queue, task):
    return [event.kind for event in queue.events(task=task)]


def test_from_queued_to_done(queue, tmp_path):
    planned(queue, "a")
    [claimed] = queue.claim("w1", 10.0)
    assert (claimed.id, claimed.state, claimed.attempts, claimed.plan) == ("a", "running", 1, {"join": "solo"})
    done = queue.finish("a", "w1", 1, {"val_acc": 0.8})
    assert (done.state, done.result, done.worker) == ("done", {"val_acc": 0.8}, None)
    assert kinds(queue, "a") == ["queued", "planned", "running", "done"]
    with DirectQueue(tmp_path / "queue.db") as again:
        assert again.get("a") == done


def test_a_key_queues_once(queue):
    first = queue.submit(Submission({"lr": 0.1}, key="k"))
    assert queue.submit(Submission({"lr": 0.1}, key="k")) == first
    assert len(queue.tasks()) == len(queue.events()) == 1
    with pytest.raises(QueueError, match="another spec"):
        queue.submit(Submission({"lr": 0.2}, key="k"))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"priority": 5}, r"another priority \(0, not 5\)"),
        ({"after": ()}, r"another after \(first, not nothing\)"),
        ({"after": ("first", "second")}, "another after"),
        ({"spec": {"task": {}, "deadline": 2.0}}, "another deadline"),
        ({"spec": {"task": {}, "budget": 2}}, "another budget"),
        ({"spec": {"task": {}, "infer": {"latency_target": 1.0}}}, "another spec"),
    ],
)
def test_a_key_with_other_settings_is_refused(queue, other, told):
    queue.submit_many([Submission({}, id="first"), Submission({}, id="second")])
    same = {"spec": {"task": {}}, "key": "ann/k/0", "said_key": "k", "after": ("first",)}
    known = queue.submit(Submission(**same))
    assert queue.submit(Submission(**same)) == known
    with pytest.raises(QueueError, match=f"key='k' was used for task '{known.id}' with {told}"):
        queue.submit(Submission(**{**same, **other}))


@pytest.mark.parametrize(
    ("new", "told"),
    [
        (Submission({}, after=("a",)), "^after='a' is cancelled"),
        (Submission({}, id="x", after=("a",)), "^task 'x': after='a' is cancelled"),
        (Submission({"infer": {"of": "a"}}, after=("a",)), "^infer.of='a' is cancelled"),
    ],
)
def test_what_comes_after_a_cancelled_task_is_refused_by_the_name_that_was_given(queue, new, told):
    queue.submit(Submission({}, id="a"))
    queue.cancel("a")
    with pytest.raises(QueueError, match=told):
        queue.submit(new)


def test_the_file_is_for_its_owner_alone(tmp_path):
    path = tmp_path / "new.db"
    with DirectQueue(path) as opened:
        opened.submit(Submission({}))
        modes = {one.name: one.stat().st_mode & 0o777 for one in tmp_path.glob("new.db*")}
    assert modes == {"new.db": 0o600, "new.db-wal": 0o600, "new.db-shm": 0o600}
    path.chmod(0o640)
    DirectQueue(path).close()
    assert path.stat().st_mode & 0o777 == 0o640, "what the operator has changed stays"


def test_several_submissions_are_all_or_nothing(queue):
    with pytest.raises(QueueError, match="in the queue already"):
        queue.submit_many([Submission({}, id="a"), Submission({}, id="a")])
    assert queue.tasks() == []


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (Submission({}, after=("b",)), "not in the queue"),
        (Submission({"lr": float("nan")}), "not plain JSON"),
        (Submission({"f": print}), "not plain JSON"),
    ],
)
def test_bad_submissions(queue, new, message):
    with pytest.raises(QueueError, match=message):
        queue.submit(new)


def test_metacharacters_are_text(queue):
    name = "'; DROP TABLE tasks; --"
    queue.submit(Submission({"x": name}, id=name, user=name, key=name))
    assert queue.get(name).user == name
    assert [task.id for task in queue.tasks(user=name)] == [name]


def test_higher_priority_is_claimed_first_then_the_older(queue):
    planned(queue, "a", "b")
    planned(queue, "urgent", priority=5)
    assert [task.id for task in queue.claim("w", 10.0, limit=2)] == ["urgent", "a"]


def test_a_task_is_claimed_after_what_it_depends_on(queue):
    planned(queue, "a")
    planned(queue, "b", after=("a",))
    assert [task.id for task in queue.claim("w", 10.0, limit=9)] == ["a"]
    queue.finish("a", "w", 1, {})
    assert [task.id for task in queue.claim("w", 10.0, limit=9)] == ["b"]


@pytest.mark.parametrize("ending", ["failed", "cancelled"])
def test_what_depends_on_a_task_that_did_not_end_well_fails(queue, ending):
    planned(queue, "a")
    planned(queue, "b", after=("a",))
    planned(queue, "c", after=("b",))
    queue.claim("w", 10.0)
    queue.fail("a", "w", 1, "diverged") if ending == "failed" else queue.cancel("a")
    assert queue.get("a").state == ending
    assert queue.get("b").error == f"depends on 'a', which was {ending}"
    assert queue.get("c").state == "failed"
    with pytest.raises(QueueError, match="will never be done"):
        queue.submit(Submission({}, after=("a",)))


def test_a_dead_workers_task_is_queued_again_a_bounded_number_of_times(queue, clock):
    planned(queue, "a", max_attempts=2)
    queue.claim("w1", 10.0)
    clock.now += 9
    assert queue.requeue_expired() == []
    clock.now += 2
    assert [task.state for task in queue.requeue_expired()] == ["queued"]
    queue.plan("a", {})
    queue.claim("w2", 10.0)
    clock.now += 11
    [failed] = queue.requeue_expired()
    assert failed.state == "failed"
    assert failed.error == "worker 'w2' sent no heartbeat (attempt 2 of 2)"


def test_a_heartbeat_renews_and_names_what_is_still_held(queue, clock):
    planned(queue, "a", "b")
    queue.claim("w", 10.0, limit=2)
    queue.cancel("b")
    clock.now += 9
    assert queue.heartbeat("w", 10.0) == ["a"]
    clock.now += 9
    assert queue.requeue_expired() == []


def test_a_worker_that_was_taken_for_dead_cannot_complete(queue, clock):
    planned(queue, "a")
    queue.claim("w", 10.0)
    clock.now += 11
    queue.requeue_expired()
    queue.plan("a", {})
    queue.claim("w", 10.0)  # a new process of the same name
    with pytest.raises(LostClaimError, match="attempt 2"):
        queue.finish("a", "w", 1, {"stale": True})
    queue.finish("a", "w", 2, {})
    with pytest.raises(LostClaimError, match="is done"):
        queue.finish("a", "w", 2, {})
    assert kinds(queue, "a").count("done") == 1


def test_failing_with_and_without_another_try(queue):
    planned(queue, "a", "b")
    queue.claim("w", 10.0, limit=2)
    assert queue.fail("a", "w", 1, "out of memory", retry=True).state == "queued"
    assert queue.fail("b", "w", 1, "diverged").state == "failed"


def test_pause_and_resume(queue):
    planned(queue, "a", max_attempts=1)
    queue.claim("w", 10.0)
    assert queue.pause("a").worker is None
    with pytest.raises(LostClaimError, match="is paused"):
        queue.finish("a", "w", 1, {})
    with pytest.raises(QueueError, match="is paused and cannot become planned"):
        queue.plan("a", {})
    assert queue.resume("a").state == "queued"
    queue.plan("a", {})
    assert queue.claim("w", 10.0)[0].attempts == 2
    with pytest.raises(QueueError, match="is running, not paused"):
        queue.resume("a")


def test_cancelling_twice_is_no_error(queue):
    planned(queue, "a")
    assert queue.cancel("a") == queue.cancel("a")
    assert queue.claim("w", 10.0) == []
    with pytest.raises(QueueError, match="no task 'b'"):
        queue.cancel("b")


def test_every_state_has_its_changes():
    assert set(NEXT_STATES) == set(STATES)
    assert all(set(after) <= set(STATES) for after in NEXT_STATES.values())


def test_events_are_read_on_from_a_number(queue):
    planned(queue, "a", "b")
    last, text, _ = queue.events_as_text(0, 100, None, 3)
    assert last == 3
    assert text.count("id: ") == 3
    last, text, tasks = queue.events_as_text(3, 100, None, 1000)
    assert (last, tasks) == (4, {"b"})
    assert text.startswith("id: 4\nevent: planned\n")


def test_numbers_are_not_used_again_after_retention(queue, clock):
    planned(queue, "a")
    queue.cancel("a")
    clock.now += 100
    assert delete_ended(queue, before=clock.now - 50) == 1
    assert queue.tasks() == []
    planned(queue, "b")
    assert [event.seq for event in queue.events()] == [4, 5]


def test_retention_keeps_what_is_needed(queue, clock):
    planned(queue, "a")
    planned(queue, "b", after=("a",))
    queue.claim("w", 10.0)
    queue.finish("a", "w", 1, {})
    clock.now += 100
    assert delete_ended(queue, before=clock.now) == 0
    queue.claim("w", 10.0)
    queue.finish("b", "w", 1, {})
    assert delete_ended(queue, before=clock.now + 1) == 2


def test_listing(queue):
    queue.submit_many([Submission({}, id=f"t{i}", user=f"u{i % 2}") for i in range(6)])
    queue.plan("t3", {})
    assert [task.id for task in queue.tasks(state="planned")] == ["t3"]
    assert [task.id for task in queue.tasks(user="u1", limit=2)] == ["t1", "t3"]
    assert [task.id for task in queue.tasks(beyond=4)] == ["t4", "t5"]
    assert queue.counts() == {**dict.fromkeys(STATES, 0), "queued": 5, "planned": 1}


def test_ten_thousand_queued_tasks_are_listed_by_index(queue):
    queue.submit_many([Submission({"i": i}) for i in range(10_000)])
    assert len(queue.tasks(state="queued", limit=10_000)) == 10_000
    for query in (
        "SELECT * FROM tasks WHERE state = 'queued' AND position > 5 ORDER BY position LIMIT 100",
        "SELECT * FROM tasks WHERE state = 'planned' ORDER BY priority DESC, position LIMIT 1",
        "SELECT * FROM tasks WHERE state = 'running' AND lease_until < 5",
        "SELECT * FROM events WHERE seq > 5 ORDER BY seq LIMIT 10",
    ):
        plan = " ".join(row["detail"] for row in queue.connection.execute(f"EXPLAIN QUERY PLAN {query}"))
        assert "SEARCH" in plan, plan
        assert "SCAN" not in plan, plan


def _submit_one(path, barrier):
    barrier.wait()
    with DirectQueue(path) as opened:
        opened.submit(Submission({}))


def test_several_processes_open_a_new_file_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    for attempt in range(3):
        path, barrier = tmp_path / f"{attempt}.db", context.Barrier(4)
        processes = [context.Process(target=_submit_one, args=(path, barrier)) for _ in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        with DirectQueue(path) as opened:
            assert len(opened.tasks()) == 4


def test_a_file_that_is_no_queue(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to look at" * 20)
    with pytest.raises(QueueError, match=r"notes\.txt: cannot be used as a queue"):
        DirectQueue(path)


def test_a_file_of_a_later_format(tmp_path):
    path = tmp_path / "queue.db"
    DirectQueue(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(QueueError, match="format is 99"):
        DirectQueue(path)


FIRST_FORMAT = """
CREATE TABLE tasks (
    position INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, key TEXT UNIQUE, state TEXT NOT NULL,
    user TEXT NOT NULL, priority INTEGER NOT NULL, spec TEXT NOT NULL, after TEXT NOT NULL, {attempts}
    max_attempts INTEGER NOT NULL, worker TEXT, lease_until REAL, created REAL NOT NULL, updated REAL NOT NULL{more}
);
CREATE INDEX tasks_by_user ON tasks (user, state, position);
CREATE TABLE dependencies (task TEXT NOT NULL, needs TEXT NOT NULL, PRIMARY KEY (task, needs)) WITHOUT ROWID;
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, kind TEXT NOT NULL, time REAL NOT NULL,
    data TEXT NOT NULL
);
INSERT INTO tasks (id, key, state, user, priority, spec, after, max_attempts, created, updated)
    VALUES ('old', 'monday', 'queued', 'anna', 7, '{{"model": "gcn"}}', '[]', 3, 1, 1);
INSERT INTO events (task, kind, time, data) VALUES ('old', 'queued', 1, '{{}}');
PRAGMA user_version={number};
"""
ATTEMPTS, MORE = "attempts INTEGER NOT NULL DEFAULT 0,", ", plan TEXT, result TEXT, error TEXT"


def _old_file(path, attempts=ATTEMPTS, more=MORE, number=1):
    connection = sqlite3.connect(path)
    connection.executescript(FIRST_FORMAT.format(attempts=attempts, more=more, number=number))
    connection.close()
    return path


@pytest.mark.parametrize(("attempts", "more", "number"), [(ATTEMPTS, MORE, 1), ("", ", plan TEXT", 1), ("", "", 3)])
def test_a_file_of_an_older_format_is_migrated(tmp_path, attempts, more, number):
    path = _old_file(tmp_path / "queue.db", attempts, more, number)
    for _ in range(2):
        with DirectQueue(path) as queue:
            if queue.get("old").state == "queued":
                queue.plan("old", {"bytes": 5})
            (task,) = queue.tasks()
            assert (task.id, task.user, task.priority, task.spec) == ("old", "anna", 7, {"model": "gcn"})
    with DirectQueue(path) as queue:
        (task,) = queue.claim("w", 60.0)
        assert task.attempts == 1
        assert task.plan == {"bytes": 5}
        done = queue.finish("old", "w", 1, {"val": 0.5})
        assert done.result == {"val": 0.5}
        assert done.error is None
        assert queue.groups() == []
        assert queue.shares() == []
        assert queue.sweeps(None, 10, 0) == []
        assert queue.submit(Submission({"model": "gcn"}, sweep={"name": "new"})).sweep == "new-1"
        assert problems(queue) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [(f"{MORE}, colour TEXT", "has the column colour, which this Weft"), (MORE, "lacks the column max_attempts")],
)
def test_a_file_that_cannot_be_migrated_is_refused_unchanged(tmp_path, more, message):
    path = _old_file(tmp_path / "queue.db", more=more)
    if "lacks" in message:
        connection = sqlite3.connect(path)
        connection.execute("ALTER TABLE tasks DROP COLUMN max_attempts")
        connection.close()

    def contents():
        connection = sqlite3.connect(path)
        try:
            return [*connection.iterdump(), connection.execute("PRAGMA user_version").fetchone()]
        finally:
            connection.close()

    before = contents()
    with pytest.raises(QueueError, match=rf"queue\.db: has format 1, whose table tasks {message}.*name a new file"):
        DirectQueue(path)
    assert contents() == before


def test_a_database_of_another_program_is_refused(tmp_path):
    path = tmp_path / "notes.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE notes (text TEXT)")
    connection.close()
    with pytest.raises(QueueError, match=r"notes\.db: is a database of another program"):
        DirectQueue(path)


def test_the_queue_needs_no_torch():
    code = "import sys, weft.serve.retention, weft.sched.simulator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": "src"}).returncode == 0


def test_a_repeated_submission_is_within_the_quota(tmp_path):
    with DirectQueue(tmp_path / "q.db") as db:
        new = [Submission({"task": {"graph": "demo"}}, user="anna", key=f"anna/monday/{place}") for place in range(2)]
        db.submit_many(new)
        assert db.known_keys([one.key for one in new]) == 2
        assert db.known_keys(["anna/tuesday/0", "anna/monday/1"]) == 1
        assert db.known_keys([]) == 0


def test_a_long_log_ends_with_what_came_last(tmp_path):
    with DirectQueue(tmp_path / "q.db") as db:
        task = db.submit(Submission({"task": {"graph": "demo"}})).id
        db.record([(task, "progress", {"epoch": place}) for place in range(30)] + [(task, "note", {"message": "m"})])
        db.cancel(task)
        assert [event.data["epoch"] for event in db.last_events(task, ("progress",), 5)] == [25, 26, 27, 28, 29]
        assert [event.kind for event in db.last_events(task, ("note", "cancelled"), 5)] == ["note", "cancelled"]


def test_sweeps_have_names_with_numbers(queue):
    def name(given):
        return queue.submit_many([Submission({"lr": lr}, sweep={"name": given}) for lr in (1, 2)])[1].sweep

    names = ["rates", "rates", "rates-1", "../x y", None, "\u00e4", "a" * 300]
    assert [name(given) for given in names] == [
        "rates-1",
        "rates-2",
        "rates-1-1",
        "x_y-1",
        "sweep-1",
        "sweep-2",
        f"{'a' * 80}-1",
    ]
    assert [sweep["name"] for sweep in queue.sweeps(None, 2, 2)] == ["rates-1-1", "x_y-1"]
    assert queue.sweeps(name="rates") == []


def test_a_sweep_is_changed_in_one_transaction(queue):
    first, second, third = queue.submit_many([Submission({"lr": lr}, sweep={"name": "s"}) for lr in (1, 2, 3)])
    later = queue.submit(Submission({"model": "gcn"}, after=(third.id,)))
    queue.plan(first.id, {"join": "solo"})
    queue.claim("w", 60.0)
    queue.cancel(second.id)
    assert queue.change_sweep("s-1", "pause", "anna") == [first.id, third.id]
    assert queue.get(first.id).max_attempts == 4  # a pause is no failed attempt
    assert queue.get(third.id).max_attempts == 3
    assert queue.change_sweep("s-1", "resume", "anna") == [first.id, third.id]
    assert queue.change_sweep("s-1", "cancel", "anna") == [first.id, third.id]
    assert queue.sweeps(name="s-1")[0]["counts"] == {"cancelled": 3}
    assert "which was cancelled" in queue.get(later.id).error
    assert [event.data for event in queue.events(task=first.id)][-3:] == [{"by": "anna"}] * 3


def test_a_sweep_is_deleted_with_its_last_task(queue, clock):
    tasks = queue.submit_many([Submission({"lr": lr}, sweep={"name": "s"}) for lr in (1, 2)])
    queue.cancel(tasks[0].id)
    clock.now += 100
    delete_ended(queue, clock.now - 50)
    assert queue.sweeps(name="s-1")[0]["counts"] == {"queued": 1}
    queue.cancel(tasks[1].id)
    clock.now += 100
    delete_ended(queue, clock.now - 50)
    assert queue.sweeps(None, 10, 0) == []


def test_a_sweep_whose_name_ends_in_a_number_leaves_the_numbers_of_others_alone(tmp_path):
    with DirectQueue(tmp_path / "names.db") as queue:

        def name_of(given: str | None) -> str | None:
            return queue.submit(Submission({"task": {}}, sweep={"name": given})).sweep

        names = ["sweep-999999999999999999", "sweep", None, "--wait", "sweep-1"]
        assert [name_of(name) for name in names] == [
            "sweep-999999999999999999-1",
            "sweep-1",
            "sweep-2",
            "wait-1",
            "sweep-1-1",
        ]
