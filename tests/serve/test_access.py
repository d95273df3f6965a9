"""Tokens, addresses, limits of JSON, the registry, splitting checkpoints, MPS where there is none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.serve.direct_queue import DirectQueue, problems
from weft.core import gpus
from weft.core.errors import GraphError, InputError, SpecError
from weft.core.settings import Callback
from weft.core.task import Task
from weft.runtime.checkpoint import FILE, read_checkpoint, write_checkpoint
from weft.serve.client import Client
from weft.serve.options import ServeOptions
from weft.serve.queue_db import Group, Submission
from weft.serve.server import find_tokens, parse_address, server_lock
from weft.serve.state import SupervisorState
from weft.serve.submissions import (
    BadRequestError,
    HiddenPaths,
    Registry,
    Tokens,
    given_settings,
    is_loopback,
    make_token_file,
    read_json,
    read_submissions,
    submitting_user,
)
from weft.serve.worker import drop_damaged, split_off
from weft.serve.worker_pool import MPS, WorkerPool


def test_a_token_file(tmp_path):
    path = tmp_path / "tokens"
    make_token_file(path)
    assert path.stat().st_mode & 0o777 == 0o600
    token = path.read_text().strip()
    make_token_file(path)
    assert path.read_text().strip() == token
    tokens = Tokens.read(path)
    assert tokens.user_of(token) == ""
    assert tokens.user_of(token + "x") is None


@pytest.mark.parametrize(("mode", "warned"), [(0o644, True), (0o620, True), (0o600, False), (0o400, False)])
def test_a_token_file_that_others_may_read_is_warned_about(tmp_path, capsys, mode, warned):
    (tmp_path / "tokens").write_text("t" * 24 + "\n")
    (tmp_path / "tokens").chmod(mode)
    find_tokens(tmp_path / "q", tmp_path / "tokens", False, "127.0.0.1")
    assert (f"(mode {mode:04o}); run: chmod 600 " in capsys.readouterr().err) == warned


@pytest.mark.parametrize("text", ["", "short\n", "a b c\n", "# only a comment\n"])
def test_bad_token_files(tmp_path, text):
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(SpecError, match="token"):
        Tokens.read(tmp_path / "tokens")


def test_no_auth_needs_loopback(tmp_path):
    assert find_tokens(tmp_path / "q", None, True, "127.0.0.1")[0].open
    with pytest.raises(SpecError, match="others could reach it"):
        find_tokens(tmp_path / "q", None, True, "0.0.0.0")
    tokens, path = find_tokens(tmp_path / "q", None, False, "0.0.0.0")
    assert not tokens.open
    assert path.exists()


def test_addresses():
    assert parse_address("[::1]:80") == ("::1", 80)
    assert [is_loopback(host) for host in ("::1", "127.0.0.9", "localhost", "10.0.0.1", "weft")] == [1, 1, 1, 0, 0]
    with pytest.raises(SpecError, match="HOST:PORT"):
        parse_address("8787")


def test_one_server_per_queue(tmp_path):
    with (
        server_lock(tmp_path / "q.db"),
        pytest.raises(SpecError, match="another server"),
        server_lock(tmp_path / "q.db"),
    ):
        pass


@pytest.mark.parametrize("body", [b"[" * 33, b'{"a": "\\ud800"}', b"NaN", b"1" * 5000, b'{"a": 1e999}', b"{", b"\x80"])
def test_json_that_is_refused(body):
    with pytest.raises(BadRequestError):
        read_json(body)


def test_brackets_in_text_do_not_nest():
    assert read_json(b'["' + b"[" * 100 + b'\\"{"]') == ["[" * 100 + '"{']


def test_the_registry():
    registry = Registry(("mine.models:Net", "other:*"))
    for name in ("gcn", "mine.models:Net", "other:Any"):
        registry.check_model(name)
    for name in ("mine.models:Other", "os:system", "mine.models", "", None, "other.sub:X"):
        with pytest.raises(BadRequestError, match="not in the registry"):
            registry.check_model(name)


def test_graphs_that_are_generated():
    for graph in ("demo", "shape:cora", "shape:cora?scale=0.5", "planted:relations", "planted:relations?nodes=500"):
        assert Registry().graph_path(graph) is None
    for graph, words in (("shape:core", "did you mean 'cora'"), ("planted:classes", "planted:relations is the only")):
        with pytest.raises(GraphError, match=words):
            Registry().graph_path(graph)


def test_graphs_that_would_be_downloaded(tmp_path):
    (tmp_path / "pubmed.npz").write_bytes(b"")
    off, on = Registry(graphs=tmp_path), Registry(graphs=tmp_path, downloads=True)
    for name in ("cora", "planetoid:cora"):
        for registry in (off, Registry()):
            with pytest.raises(BadRequestError, match=r"downloads are off on this server.*--allow-downloads"):
                registry.graph_path(name)
        assert on.graph_path(name) is None
    for registry in (off, on):
        assert registry.graph_path("pubmed") == str(tmp_path.resolve() / "pubmed.npz")
        with pytest.raises(BadRequestError, match=r"'mine' is not a file, or a folder of files, in the graphs folder$"):
            registry.graph_path("mine")


def test_who_a_submission_is_for():
    assert submitting_user({}, "ann") == submitting_user({"user": "ann"}, "ann") == "ann"
    assert submitting_user({"user": "ben"}, "") == "ben"
    assert submitting_user({"user": None}, "ann") == "ann"
    with pytest.raises(BadRequestError, match="only the operator may submit for others") as refused:
        submitting_user({"user": "ben"}, "ann")
    assert refused.value.status == 403
    with pytest.raises(BadRequestError, match="user must be a text"):
        submitting_user({"user": 5}, "")


@pytest.mark.parametrize("target", [1e300, 86_401, 0, -1, "soon", True])
def test_bad_latency_targets(target):
    body = {"task": {"graph": "demo"}, "infer": {"weights": "w.safetensors", "latency_target": target}}
    with pytest.raises(InputError, match="above 0 and at most 86,400"):
        read_submissions(body, Registry(), "me", lambda _: None)


def test_folders_of_the_server_are_not_shown(tmp_path):
    odd = tmp_path / 'a "b" \u00fc'
    hidden = HiddenPaths(odd, None, Path("/"))
    assert hidden.text(f"{odd}/bad.npz: no graph; see /etc") == "bad.npz: no graph; see /etc"
    assert hidden.data({f"{odd}/x": [f"{odd}/y", 1, None]}) == {"x": ["y", 1, None]}
    assert json.loads(hidden.text(json.dumps({"error": f"{odd}/y"}, ensure_ascii=False))) == {"error": "y"}


def test_functions_that_a_task_names_are_in_the_registry():
    registry = Registry(("mine.losses:focal", "torch.optim:*"))
    registry.check_functions(
        {"objective": "mine.losses:focal", "optimizer": "torch.optim:RMSprop", "schedule": "cosine"}
    )
    refused = [{name: "os:system"} for name in ("objective", "metric", "optimizer", "schedule")]
    refused += [{"callbacks": [{"call": "os:system", "every": 1}]}, {"callbacks": {"call": "x.py:f", "every": 1}}]
    for task in refused:
        with pytest.raises(BadRequestError, match="not in the registry"):
            registry.check_functions(task)
        with pytest.raises(BadRequestError, match="not in the registry"):
            read_submissions({"task": {"graph": "demo", **task}}, registry, "me", lambda _: None)


def test_functions_given_as_objects_are_not_sent():
    for settings in ({"objective": print}, {"callbacks": [Callback(print, every=1)]}):
        with pytest.raises(InputError, match="is a function, which cannot be sent"):
            given_settings(Task(graph="demo", **settings))
    sent = given_settings(Task(graph="demo", callbacks=[Callback("a:b", every=1)], class_weights=[1, 2]))
    assert sent["callbacks"] == [{"call": "a:b", "every": 1, "at": []}]
    assert Task.from_dict(sent).class_weights == (1.0, 2.0)


@pytest.mark.parametrize("options", [{"workers": 0}, {"policy": "none"}, {"devices": ("tpu",)}, {"quota": 0}])
def test_bad_options(tmp_path, options):
    with pytest.raises(InputError):
        ServeOptions(tmp_path / "q.db", **options)


def test_devices_of_two_kinds_are_refused(tmp_path):
    with pytest.raises(InputError, match="devices cuda:0 and cpu: bytes and seconds are predicted for devices of one"):
        ServeOptions(tmp_path / "q.db", devices=("cuda:0", "cpu"))
    assert ServeOptions(tmp_path / "q.db", devices=("cuda:0@a", "cuda:1@b", "cuda")).workers == 1


def test_a_member_is_taken_out_of_a_group(tmp_path):
    tensors = {"present": torch.tensor([True, True]), "epoch": torch.tensor(7), "step": torch.tensor(0)}
    tensors |= {"0.w": torch.zeros(2), "1.w": torch.ones(2)}
    members = [{"status": "running", "epoch": 7}, {"status": "running", "epoch": 7}]
    layers = {"layers": {"conv": "GCNConv"}, "sparse": False, "note": "converted"}
    about = {"tasks": [{"name": "a"}, {"name": "b"}], "members": members}
    about["stacks"] = [{"members": [0, 1], "converted": layers}]
    write_checkpoint(tmp_path / "g/groups/1", tensors, about)
    split_off(tmp_path / "g", "b", tmp_path / "b")
    found = read_checkpoint(tmp_path / "b")
    assert found.tensors["0.w"].tolist() == [1.0, 1.0]
    assert (found.tensors["present"].tolist(), int(found.tensors["epoch"])) == ([True], 7)
    assert found.about["tasks"] == [{"name": "b"}]
    assert found.about["stacks"] == [{"members": [0], "converted": layers, "unsaved": ""}]
    saved = (tmp_path / "b" / FILE).stat().st_ino
    split_off(tmp_path / "g", "b", tmp_path / "b")
    assert (tmp_path / "b" / FILE).stat().st_ino == saved  # a checkpoint of its own is left as it is
    split_off(tmp_path / "g", "nobody", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_damaged_checkpoints_are_dropped(tmp_path):
    path = write_checkpoint(tmp_path, {"a": torch.zeros(1)}, {})
    drop_damaged(tmp_path)
    assert path.exists()
    path.write_bytes(b"torn")
    drop_damaged(tmp_path)
    assert not path.exists()


def test_checkpoints_of_modules_whose_state_is_not_saved_are_dropped(tmp_path):
    """So that they begin anew after a crash."""
    stacks = [{"members": [0], "converted": None, "unsaved": "running"}]
    path = write_checkpoint(tmp_path, {"a": torch.zeros(1)}, {"stacks": stacks, "finished": True})
    drop_damaged(tmp_path)
    assert path.exists()
    write_checkpoint(tmp_path, {"a": torch.zeros(1)}, {"stacks": stacks, "finished": False})
    drop_damaged(tmp_path)
    assert not path.exists()


def test_mps_is_left_alone_without_gpus():
    service = MPS(["cpu"], 4)
    assert not service.start()
    assert service.environment == {}
    service.stop()


@pytest.fixture
def control(tmp_path, monkeypatch):
    """A program that stands in for NVIDIA's: it notes how it was called, and with which pipes."""
    told = tmp_path / "told"
    program = tmp_path / "nvidia-cuda-mps-control"
    noted = "$* $(test -t 0 || cat) $CUDA_MPS_PIPE_DIRECTORY$CUDA_VISIBLE_DEVICES"
    program.write_text(f'#!/bin/sh\necho "{noted}" >> {told}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name in ("CUDA_MPS_PIPE_DIRECTORY", gpus.VISIBLE, gpus.KNOWN):
        monkeypatch.delenv(name, raising=False)
    return told


def test_mps_is_started_and_stopped_with_the_workers(control):
    service = MPS(["cuda:0"], 2)
    assert service.start()
    folder = service.environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert Path(folder).is_dir()
    assert len(folder) < 90  # of the 107 characters that a socket's path may have
    service.stop()
    assert not service.running
    assert not Path(folder).exists()
    assert control.read_text().splitlines() == [f"-d  {folder}", f" quit {folder}"]


@pytest.mark.parametrize(("chosen", "of_workers"), [("2,1", "0,1"), ("GPU-c,GPU-b", None), (None, None)])
def test_workers_number_the_gpus_that_mps_was_shown(control, monkeypatch, chosen, of_workers):
    monkeypatch.setattr(gpus, "_in_files", lambda: [gpus.Gpu(name, f"GPU-{name}") for name in "abc"])
    if chosen:
        monkeypatch.setenv(gpus.VISIBLE, chosen)
    service = MPS(["cuda:0", "cuda:1"], 2)
    assert service.start()
    folder = service.environment["CUDA_MPS_PIPE_DIRECTORY"]
    assert service.environment.get(gpus.VISIBLE) == of_workers
    names, environment = gpus.gpu_names(), service.environment
    service.stop()
    assert control.read_text().splitlines() == [f"-d  {folder}{chosen or ''}", f" quit {folder}{chosen or ''}"]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert gpus.gpu_names() == names == (list("cb") if chosen else list("abc"))


@pytest.mark.parametrize(("workers", "wanted"), [(1, True), (2, False)])
def test_mps_is_not_started_where_it_is_of_no_use(control, workers, wanted):
    assert not MPS(["cuda:0"], workers, wanted).start()
    assert not control.exists()


def test_an_operators_own_mps_is_used_as_it_is(control, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/elsewhere")
    assert not MPS(["cuda:0"], 2).start()
    assert not control.exists()


def test_mps_that_cannot_start_is_done_without(control):
    program = control.parent / "nvidia-cuda-mps-control"
    program.write_text("#!/bin/sh\nexit 1\n")
    service = MPS(["cuda:0"], 2)
    assert not service.start()
    assert service.environment == {}


ENDED = SimpleNamespace(name="cuda:0/0", device="cuda:0", ready=False, lost=False, stop=lambda _: None)


def test_workers_that_do_not_start_under_mps_start_without_it(control, tmp_path, monkeypatch, capsys):
    pool = WorkerPool(SupervisorState(ServeOptions(tmp_path / "q.db", devices=("cuda:0",), workers=2)))
    started = []

    def start(name, *_, **__):
        started.append((name, bool(pool._mps.environment)))
        return True

    monkeypatch.setattr(pool, "_start", start)
    pool.start_all()
    assert started == [("planner", True), ("cuda:0/0", True), ("cuda:0/1", True)]
    pool.workers["cuda:0/0"] = ENDED
    pool.replace(ENDED)
    assert pool.start_missing(0.0) == ""
    assert started[3:] == [("cuda:0/0", False)]
    assert "going on without it" in capsys.readouterr().err
    assert control.read_text().splitlines()[-1].startswith(" quit ")


def test_mps_stays_if_a_worker_ends_that_others_outlive(control, tmp_path, monkeypatch):
    pool = WorkerPool(SupervisorState(ServeOptions(tmp_path / "q.db", devices=("cuda:0",), workers=2)))
    monkeypatch.setattr(pool, "_start", lambda *_, **__: True)
    pool.start_all()
    pool.room["cuda:0"] = 1  # a worker was ready
    pool.workers["cuda:0/0"] = ENDED
    pool.replace(ENDED)
    assert pool._mps.running
    pool._mps.stop()


def test_groups_in_the_queue(tmp_path):
    with DirectQueue(tmp_path / "q.db") as queue:
        for name in "ab":
            queue.submit(Submission({"task": {}}, id=name, max_attempts=1))
        queue.plan_many([(name, {"bytes": 1}) for name in "ab"])
        group = Group("g", "cpu", "w", ("a", "b"), "group-g", 2, 1.0, "why", 5.0)
        queue.claim_all(["a", "b"], "w", 10.0, group)
        assert queue.groups("running") == [group]
        assert queue.release("a", "restart").max_attempts == 2
        queue.replan("a", {"bytes": 3})
        assert queue.get("a").plan == {"bytes": 3}
        queue.record([("b", "progress", {"epoch": 1})])
        queue.end_group("g", "preempted", "restart")
        assert [one.note for one in queue.groups("preempted")] == ["restart"]
        text, names, following = queue.rows_as_json(1000, 0, user="")
        assert ([task["id"] for task in json.loads(f"[{text}]")], following) == (names, None) == (["a", "b"], None)
        assert problems(queue) == []


@pytest.mark.parametrize("server", ["ftp://x", "nonsense", "http://"])
def test_bad_addresses_of_a_server(server):
    with pytest.raises(InputError, match="expected an address"):
        Client(server)
