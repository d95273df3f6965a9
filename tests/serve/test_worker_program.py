"""The worker as a program of its own, as it runs on GPUs and on the nodes of a cluster."""

from __future__ import annotations

import json
import subprocess
import sys

TASK = {"graph": "demo", "model": "gcn", "hidden": 4, "epochs": 2}


def test_the_program_trains_what_it_is_sent_and_reports_what_fails(tmp_path):
    command = [sys.executable, "-m", "weft.serve.worker", "--device", "cpu"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
        for name, settings in (("good", TASK), ("bad", {**TASK, "model": "no_such_module:Net"})):
            message = {"do": "run", "group": name, "tasks": [{**settings, "name": name}], "out": str(tmp_path / name)}
            worker.stdin.write(json.dumps({**message, "names": {name: "mine"}}) + "\n")
        worker.stdin.flush()
        messages = (json.loads(line) for line in worker.stdout)
        good, bad = [next(message for message in messages if message["say"] == "done") for _ in range(2)]
        worker.stdin.write(json.dumps({"do": "stop"}) + "\n")
        worker.stdin.flush()
        assert worker.wait(60) == 0
    assert good["members"]["good"]["status"] == "finished"
    assert json.loads((tmp_path / "good" / "result.json").read_text())["task"]["name"] == "mine"
    assert "no_such_module" in bad["error"]
    assert "no_such_module" in (tmp_path / "bad" / "log.txt").read_text()
