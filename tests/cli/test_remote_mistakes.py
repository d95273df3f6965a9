"""The commands of a queue's server as a user meets them: mistakes, deadlines, times of day, and tables that fit."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime, timedelta
from typing import ClassVar

import pytest

from weft.cli import format as task_table
from weft.cli import remote
from weft.cli.format import local_time, parse_deadline, terminal_width, with_local_times
from weft.core.errors import InputError, SpecError

NAME, DONE, OTHER = "3f2a9c41d0be", "0123456789ab", "aaaaaaaaaaaa"
LONG = "a" * 256
NOON = datetime(2026, 11, 17, 12, 0).timestamp()


class Server:
    """Answers as a server would."""

    submitted: ClassVar[dict] = {}

    def __init__(self, *_):
        pass

    def cancel(self, task):
        return {"state": "done" if task == DONE else "cancelled"}

    def pause(self, task):
        if task == DONE:
            raise InputError(f"task {task!r} has ended already (done); it cannot become paused")
        return {"state": "paused"}

    def logs(self, _):
        return f"{time.time():.1f} queued\n{time.time():.1f} note 1794935442.8 was the time\n1794935442.8 mine\n"

    def show(self, task):
        return {"id": task, "state": "done", "updated": 20.0, "deadline": 10.0, "late": True, "budget": 1 << 30}

    def tasks(self, *_):
        about = {"user": "anna", "bytes": 1 << 30, "seconds": 1.0, "score": 0.5, "error": None}
        task = {"graph": "demo", "model": "gcn"}
        return [{"id": NAME, "state": "queued", "name": "n" * 100, "why": "w" * 200, "task": task, **about}]

    def submit(self, _, **more):
        Server.submitted = more
        return [{"id": NAME, "state": "queued", "name": "one"}]


@pytest.fixture
def served(monkeypatch):
    monkeypatch.setattr(remote, "_client", Server)


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "one.toml"
    path.write_text('graph = "demo"\nmodel = "gcn"\n')
    return path


@pytest.fixture
def nobody(monkeypatch):
    """An address at which nothing answers: what gets there is no longer refused as a mistake."""
    monkeypatch.setenv("WEFT_SERVER", "http://127.0.0.1:9")
    monkeypatch.delenv("WEFT_TOKEN", raising=False)


# ---- mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["submit", "--infer", NAME, "--latency-target", "nan"], "--latency-target nan must be a number of seconds"),
        (["submit", "--infer", NAME, "--latency-target", "inf"], "--latency-target inf must be a number of seconds"),
        (["submit", "--infer", "../x"], "there is no task '../x'"),
        (["submit", "--infer", NAME, "--deadline", "2h"], "--deadline 2h is for trainings"),
        (["submit", "SPEC", "--priority", "9" * 20], f"--priority {'9' * 20} must be a whole number from -1000"),
        (["submit", "SPEC", "--budget", "nan"], "--budget nan is not an amount of memory"),
        (["submit", "SPEC", "--budget", "1e30"], "--budget 1e30 is more memory than there is"),
        (["submit", "SPEC", "--deadline", "nan"], "--deadline nan: expected a time"),
        (["submit", "SPEC", "--after", "x"], "there is no task 'x'"),
        (["logs", "../../x"], "there is no task '../../x'"),
        (["queue", "show", "nobody"], "there is no task 'nobody'"),
        (["cancel", "nobody"], "there is no task 'nobody'"),
        (["watch", "../x"], "there is no task '../x'"),
        (["fetch", "../x"], "there is no task '../x'"),
        (["queue", "list", "--server", "http://127.0.0.1:port"], "expected an address"),
    ],
)
def test_mistakes_are_one_sentence(weft, nobody, spec, command, message):
    code, out, err = weft(*[spec if word == "SPEC" else word for word in command])
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize("graph", [LONG, f"./{LONG}", f"{LONG}.npz", f"x.{LONG}"])
def test_a_name_that_is_too_long_for_a_file(weft, spec, monkeypatch, command, graph):
    monkeypatch.chdir(spec.parent)
    code, _, err = weft(command, spec, "--set", f"graph={graph}")
    assert code == 2
    assert "there is no graph" in err or "does not exist" in err
    assert err.count("\n") == 1


def test_a_graph_whose_name_is_too_long_is_left_to_the_server(weft, served, spec):
    assert weft("submit", spec, "--set", f"graph={LONG}") == (0, f"{NAME}  queued  one\n", "")


@pytest.mark.parametrize("command", ["run", "plan", "submit"])
@pytest.mark.parametrize("ending", ["toml", "json"])
def test_a_spec_whose_name_is_too_long(weft, nobody, command, ending):
    code, _, err = weft(command, f"{LONG}.{ending}")
    assert code == 2
    assert err.count("\n") == 1
    assert "internal" not in err


# ---- tasks that have ended -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["cancel", "pause"])
def test_a_task_that_has_ended(weft, served, command):
    code, out, err = weft(command, DONE)
    assert (code, out) == (2, "")
    assert f"task '{DONE}' has ended already (done); it cannot" in err


@pytest.mark.parametrize("command", ["cancel", "pause"])
def test_the_others_are_changed_all_the_same(weft, served, command):
    code, out, err = weft(command, DONE, NAME, DONE, OTHER)
    assert code == 2
    assert out.splitlines() == [f"{name}  {'cancelled' if command == 'cancel' else 'paused'}" for name in (NAME, OTHER)]
    assert err.count("has ended already") == 2


# ---- times ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("2h", 7200),
        ("1.5 m", 90),
        ("3d", 3 * 86_400),
        ("18:30", 6.5 * 3600),
        ("11:00", 23 * 3600),
        ("12:00:05", 5),
        ("2026-11-17T13:00", 3600),
        ("2026-11-18 12:00", 86_400),
        (str(NOON + 5), 5),
    ],
)
def test_deadlines(text, seconds):
    assert parse_deadline(text, NOON) - NOON == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["nan", "inf", "-5", "", "soon", "25:00", "2026-13-01", "9" * 400, "1e400", "2w"])
def test_what_is_no_time(text):
    with pytest.raises(SpecError, match=r"--deadline .*: expected a time: 2h from now"):
        parse_deadline(text, NOON)


def test_a_deadline_that_has_passed():
    with pytest.raises(SpecError, match="has passed already; for seconds from now write 3600s"):
        parse_deadline("3600", NOON)
    with pytest.raises(SpecError, match=r"--deadline 2026-11-17T11:59: 11:59:00 has passed already$"):
        parse_deadline("2026-11-17T11:59", NOON)


def test_a_deadline_is_sent_as_seconds_since_1970(weft, served, spec):
    assert weft("submit", spec, "--deadline", "2h", "--budget", "1GiB")[0] == 0
    assert Server.submitted["deadline"] == pytest.approx(time.time() + 7200, abs=60)
    assert weft("submit", spec)[0] == 0
    assert Server.submitted["deadline"] is None


def test_show_says_whether_a_deadline_was_missed(weft, served):
    shown = json.loads(weft("queue", "show", DONE)[1])
    assert (shown["deadline"], shown["budget"], shown["late"]) == (10.0, 1 << 30, True)


def test_times_of_a_log_are_local(weft, served):
    lines = weft("logs", DONE)[1].splitlines()
    assert re.fullmatch(r"(\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d queued", lines[0])
    assert lines[1].endswith(" note 1794935442.8 was the time")
    assert lines[2] == "1794935442.8 mine"


def test_a_time_of_another_day_has_its_date():
    assert local_time(NOON, NOON) == "12:00:00"
    assert local_time(NOON - timedelta(days=1).total_seconds(), NOON) == "2026-11-16 12:00:00"
    assert with_local_times(f"{NOON - 1e8:.1f} done") == f"{local_time(NOON - 1e8)} done"


# ---- tables --------------------------------------------------------------------------------------------------


def test_the_table_is_whole_in_a_pipe(weft, served, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    line = weft("queue", "list")[1].splitlines()[1]
    assert "n" * 100 in line
    assert line.endswith("w" * 200)


@pytest.mark.parametrize("width", [120, 160, 250])
def test_the_table_is_as_wide_as_the_terminal(weft, served, monkeypatch, width):
    monkeypatch.setattr(remote, "terminal_width", lambda: width)
    head, line = weft("queue", "list")[1].splitlines()
    assert len(line) == width
    assert len(head) <= width
    assert line.endswith("w…")
    assert NAME in line
    assert "1.00 GiB" in line


def test_the_table_is_not_cut_where_there_is_room(weft, served, monkeypatch):
    monkeypatch.setattr(remote, "terminal_width", lambda: 500)
    assert "…" not in weft("queue", "list")[1]


def test_ids_are_never_cut(weft, served, monkeypatch):
    monkeypatch.setattr(remote, "terminal_width", lambda: 20)
    assert NAME in weft("queue", "list")[1]


def test_the_width_of_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "77")
    assert terminal_width() is None
    monkeypatch.setattr(task_table.sys.stdout, "isatty", lambda: True, raising=False)
    assert terminal_width() == 77


def test_what_can_be_fetched_is_fetched_and_the_rest_is_told(weft, monkeypatch):
    class Client:
        def fetch(self, task, _out):
            if task == "b":
                raise InputError("task 'b' was cancelled, so it has no result.json")
            return f"results/{task}"

        def show(self, _task):
            return {"state": "done"}

    monkeypatch.setattr(remote, "_client", lambda *_given: Client())
    code, out, err = weft("fetch", "a", "b", "c")
    assert (code, out) == (2, "results/a\nresults/c\n")
    assert "task 'b' was cancelled" in err
