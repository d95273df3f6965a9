"""What a run takes can be submitted: every option of the table arrives, and is checked as a run checks it."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

import weft
from tests.serve.serving import TASK, Queue
from tests.serve.test_supervisor import same
from weft.core.errors import InputError
from weft.core.run_options import RunOptions, options_of
from weft.core.units import parse_bytes
from weft.serve.options import ServeOptions
from weft.serve.queue_db import Submission
from weft.serve.submissions import Registry, read_request, read_submissions

QUEUED = [row.name for row in options_of("queue")]
NOT_QUEUED = {"device": "cpu", "log": ("csv:a.csv",), "batches": [1], "hardware": None}
TWO = [{**TASK, "layers": 2}, {**TASK, "layers": 3}]


def another_value(row):
    """A value of an option that is not its default."""
    rule = row.metadata["rule"]
    if rule.choices:
        return next(choice for choice in reversed(rule.choices) if choice != row.default)
    if rule.parse is not None:
        return "3MiB" if rule.parse is parse_bytes else "merged" if row.name == "weave" else 0.5
    return {bool: True, int: 2, float: 7.5}[rule.kind]


VALUES = {row.name: another_value(row) for row in options_of("queue")}


def with_needed(name):
    """The option, and what it does not go without."""
    return {name: VALUES[name]} | ({"ranks": 2} if name in ("order", "peers", "sharded") else {})


def submitted(**options):
    return [one.spec for one in read_submissions({"tasks": TWO, **options}, Registry(), "me", str)]


class Recorded(weft.Client):
    """Keeps what it would send."""

    def _json(self, method, path, body=None):
        self.body = body
        return {"tasks": [{"id": "0", "state": "queued", "name": "one"} for _ in body["tasks"]]}


def test_every_option_of_a_run_can_be_submitted_or_is_refused_with_a_reason():
    assert set(QUEUED) | set(NOT_QUEUED) == {row.name for row in options_of("run")}


@pytest.mark.parametrize("name", QUEUED)
def test_an_option_arrives_at_the_server(name):
    expected = RunOptions.of(**with_needed(name))
    for spec in submitted(**with_needed(name)):
        budget = {} if spec.get("budget") is None else {"budget": spec["budget"]}
        assert RunOptions.of(**spec.get("options", {}), **budget) == expected


@pytest.mark.parametrize("name", QUEUED)
def test_a_client_sends_an_option(name):
    client, options = Recorded("http://127.0.0.1:9"), RunOptions.of(**with_needed(name))
    client.submit([weft.Task(**one) for one in TWO], options=options)
    assert submitted(**{key: value for key, value in client.body.items() if key in QUEUED}) == submitted(
        **with_needed(name)
    )
    json.dumps(client.body)


@pytest.mark.parametrize("name", QUEUED)
def test_the_shell_takes_an_option(name, tmp_path, monkeypatch):
    from weft.cli import remote
    from weft.cli.app import app

    client = Recorded("http://127.0.0.1:9")
    monkeypatch.setattr(remote, "_client", lambda *_: client)
    spec = tmp_path / "two.toml"
    spec.write_text('graph = "demo"\n[model]\nlayers = [2, 3]\n')
    words = []
    for key, value in with_needed(name).items():
        words += [f"--{key}"] if value is True else [f"--{key.replace('_', '-')}", str(value)]
    answer = CliRunner().invoke(app, ["submit", str(spec), *words], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    assert submitted(**{key: value for key, value in client.body.items() if key in QUEUED}) == submitted(
        **with_needed(name)
    )


def test_the_description_of_the_interface_has_every_option():
    pytest.importorskip("fastapi")
    from weft.serve.app import SUBMISSION

    assert set(QUEUED) <= set(SUBMISSION["properties"])


@pytest.mark.parametrize("name", ["device", "log", "batches"])
def test_what_does_not_go_with_a_queue_is_refused(name):
    with pytest.raises(InputError, match=f"{name}=.* cannot be submitted: a server chooses the device"):
        submitted(**{name: NOT_QUEUED[name]})
    client, options = Recorded("http://127.0.0.1:9"), RunOptions(**{name: NOT_QUEUED[name]})
    with pytest.raises(weft.SpecError, match=f"{name}=.* cannot be submitted"):
        client.submit(weft.Task(**TASK), options=options)


def test_objects_are_refused_in_favour_of_names():
    client = Recorded("http://127.0.0.1:9")
    with pytest.raises(weft.SpecError, match=r"prune=.* is an object, which cannot be sent; give a name"):
        client.submit([weft.Task(**one) for one in TWO], options=RunOptions(prune=weft.MedianPruner()))
    with pytest.raises(weft.SpecError, match=r"submit takes no compile=True by itself; give options=RunOptions"):
        client.submit(weft.Task(**TASK), compile=True)


@pytest.mark.parametrize(
    "options",
    [{"order": "bfs"}, {"prune": "median"}, {"ranks": 2, "weave": "merged"}, {"cache": "1MiB", "features": "host"},
     {"budget": "lots"}, {"weave": "maybe"}],
    ids=lambda options: "+".join(options),
)  # fmt: skip
def test_a_queue_refuses_with_the_sentence_of_a_run(options):
    task = {**TASK, "name": "one"}
    with pytest.raises(weft.SpecError) as of_run:
        weft.run(weft.Task(**task), options=RunOptions.of(**options))
    with pytest.raises(InputError) as of_queue:
        read_submissions({"task": task, **options}, Registry(), "me", str)
    assert str(of_queue.value) == str(of_run.value)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--budget", "lots"], "--budget lots is not an amount of memory"),
        (["--prune", "median"], "--prune would have no effect: 'one' has no other task"),
        (["--cache", "1MiB", "--features", "host"], "--cache needs --features cached, not --features host"),
        (["--sampler", "paper", "--division", "fixed"], "--sampler paper draws other neighbours than the host"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_a_shell_refuses_alike_and_in_its_own_words(words, sentence, tmp_path, monkeypatch, capsys):
    from weft.cli.main import main

    spec, answers = tmp_path / "one.toml", []
    spec.write_text('name = "one"\ngraph = "demo"\n')
    for command in (["run", str(spec), "--out", str(tmp_path / "out")], ["submit", str(spec)]):
        monkeypatch.setattr(sys, "argv", ["weft", *command, *words])
        with pytest.raises(SystemExit, match="2"):
            main()
        answers.append(capsys.readouterr().err)
    assert answers[0] == answers[1]
    assert answers[0].startswith(f"weft: error: {sentence}")


def test_options_are_for_trainings():
    with pytest.raises(InputError, match="compile=True is for trainings"):
        read_submissions({"task": TASK, "infer": {"weights": "w.safetensors"}, "compile": True}, AnyFile(), "me", str)


class AnyFile(Registry):
    def weights_path(self, weights):
        return weights


def requested(tmp_path, request):
    options = ServeOptions(tmp_path / "queue.db", devices=("cpu",))
    return read_request(json.dumps(request).encode(), "me", options, Registry(), str)[0]


@pytest.mark.parametrize(
    "options",
    [{"features": "gpu"}, {"topology": "cached"}, {"sampler": "paper"}, {"division": 0.5}, {"overlap": True},
     {"weave": "concurrent"}, {"ranks": 2, "peers": "ipc"}, {"ranks": 2, "sharded": "tiles"}],
    ids=lambda options: list(options)[-1],
)  # fmt: skip
def test_what_needs_a_gpu_is_refused_by_a_server_without_one_before_it_is_queued(tmp_path, options):
    tasks = TWO if "ranks" in options or "weave" in options else [{**SAMPLED, "lr": lr} for lr in (0.01, 0.02)]
    with pytest.raises(weft.SpecError) as of_run:
        weft.run([weft.Task(**task) for task in tasks], device="cpu", options=RunOptions.of(**options))
    with pytest.raises(InputError) as of_queue:
        requested(tmp_path, {"tasks": tasks, **options})
    assert str(of_queue.value) == str(of_run.value)
    assert requested(tmp_path, {"tasks": tasks})


@pytest.mark.parametrize(
    "settings",
    [{"heads": 4}, {"momentum": 0.9}, {"mode": "full", "batch": 64}, {"convert": True}, {"plateau": {"factor": 0.5}}],
    ids=lambda settings: list(settings)[-1],
)  # fmt: skip
def test_a_setting_without_effect_is_refused_before_it_is_queued(settings):
    task = {**TASK, "name": "one", **settings}
    with pytest.raises(weft.SpecError, match="would have no effect") as of_run:
        weft.run(weft.Task(**task), device="cpu")
    with pytest.raises(InputError) as of_queue:
        read_submissions({"task": task}, Registry(), "me", str)
    assert str(of_queue.value) == str(of_run.value)


# ---- in a server ----------------------------------------------------------------------------------------------

SAMPLED = {"graph": "demo", "model": "sage", "hidden": 8, "epochs": 3, "mode": "sampled", "batch": 64, "fanout": [4, 4]}


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    opened = Queue(tmp_path_factory.mktemp("options"))
    yield opened
    opened.close()
    assert opened.supervisor.error == ""


def train(queue, task, **options):
    (name,) = (one.id for one in queue.db.submit_many([Submission({"task": task, "options": options})]))
    queue.supervisor.wake()
    [done] = queue.wait([name])
    return done


def test_an_option_that_nothing_would_read_ends_a_task_with_the_sentence_of_a_run(queue):
    with pytest.raises(weft.SpecError) as of_run:
        weft.run(weft.Task(**TASK, name="one"), options=RunOptions.of(features="host"), device="cpu", progress=False)
    done = train(queue, TASK, features="host")
    assert (done.state, done.error.replace(repr(done.id), "'one'")) == ("failed", str(of_run.value))


def test_an_option_of_other_devices_ends_a_task_before_it_is_started(queue):
    with pytest.raises(weft.SpecError) as of_run:
        weft.run(weft.Task(**TASK), options=RunOptions(ranks=2, sharded="tiles"), device="cpu", progress=False)
    done = train(queue, TASK, ranks=2, sharded="tiles")
    assert (done.state, done.attempts, done.error) == ("failed", 0, str(of_run.value))


def test_a_placement_reaches_the_run_of_a_sampled_task(queue, tmp_path):
    weft.load("demo").save(tmp_path / "ours")
    task = {**SAMPLED, "graph": str(tmp_path / "ours")}
    done = train(queue, task, features="cached", cache="64KiB")
    assert done.state == "done", done.error
    result = json.loads((queue.options.runs / done.result["folder"] / "result.json").read_text())
    place = result["plan"]["placement"]
    assert (place["features"], place["cache_bytes"]) == ("cached", 64 << 10)
    assert "in mapped files, the most used in memory" in done.plan["why"]
    options = RunOptions.of(features="cached", cache="64KiB")
    plain = weft.run(weft.Task(**task), options=options, device="cpu", progress=False)
    assert same(queue.history(done.id), plain.history)


def test_tasks_with_other_options_are_another_group(queue):
    specs = [{"task": {**TASK, "seed": 70 + seed}} for seed in range(4)]
    specs[2]["options"] = specs[3]["options"] = {"compile": False}
    names = [one.id for one in queue.db.submit_many([Submission(spec) for spec in specs])]
    queue.supervisor.wake()
    assert [task.state for task in queue.wait(names)] == ["done"] * 4
    queue.until(lambda: not queue.db.groups("running"))
    groups = [set(group.members) for group in queue.db.groups("ended")]
    assert {*names[:2]} in groups
    assert {*names[2:]} in groups
