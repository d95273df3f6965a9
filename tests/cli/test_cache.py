"""``weft cache``: what plans left for later ones, as a line or as JSON, and removed."""

from __future__ import annotations

import json

from typer.testing import CliRunner

import weft
from weft.cli.app import app


def cache(*options: str) -> str:
    return CliRunner().invoke(app, ["cache", *options], catch_exceptions=False).stdout


def test_the_command_counts_and_clears(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    assert "0 captured steps, 0 B" in cache()
    weft.plan(weft.Task(graph="demo", model="gcn", hidden=8, epochs=3), machine="h200")
    found = json.loads(cache("--json"))
    assert found["steps"] > 0
    assert found["bytes"] > 0
    assert f"{found['steps']} captured steps" in cache()
    assert "removed " in cache("--clear")
    assert json.loads(cache("--json"))["steps"] == 0
