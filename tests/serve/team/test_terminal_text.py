"""Names, notes and printed lines of others: nothing of them is carried out by a terminal."""

from __future__ import annotations

from importlib import resources

import pytest
from typer.testing import CliRunner

from weft.cli import remote
from weft.cli.app import app as cli
from weft.cli.format import plain_line, plain_text

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31mred\u202etxt\x7f\n\rnext"


def controls(text: str) -> set[str]:
    return {one for one in text if one not in "\n\t" and not one.isprintable()}


def test_what_a_terminal_would_carry_out_is_spelled():
    assert plain_line("gcn-3, größer, 模型, 👩‍💻") == "gcn-3, größer, 模型, 👩‍💻"
    line = plain_line(EVIL)
    assert controls(line) == set()
    assert "\n" not in line
    assert line.startswith(r"\x1b]0;title\x07\x1b[2J\x9b31mred\u202etxt\x7f\x0a\x0dnext")
    assert plain_text("a\tb\r\nc\rd\x1b[1m") == "a\tb\nc\nd\\x1b[1m"


class Server:
    """Answers as a server would whose tasks have such names."""

    def __init__(self, *_):
        self.task = {
            "id": "t1", "state": "failed", "name": EVIL, "user": EVIL, "bytes": 1, "seconds": 1.0, "score": None,
            "why": "", "error": EVIL, "task": {"graph": EVIL, "model": EVIL},
        }  # fmt: skip

    def tasks(self, *_):
        return [self.task]

    def show(self, *_):
        return self.task | {"state": "running"} if not self.shown else self.task

    shown = False

    def events(self, **_):
        self.shown = True
        yield {"task": "t1", "kind": "note", "data": {"message": EVIL, "error": EVIL, "worker": EVIL}}
        yield {"task": "t1", "kind": "failed", "data": {"error": EVIL}}

    def logs(self, *_):
        return f"epoch 1\n{EVIL}\n"

    def submit(self, *_, **__):
        return [self.task]


@pytest.mark.parametrize(
    "command",
    [["queue", "list"], ["watch", "t1"], ["logs", "t1"], ["submit", "SPEC"], ["submit", "SPEC", "--json"],
     ["queue", "show", "t1"]],
)  # fmt: skip
def test_no_command_prints_control_characters(command, monkeypatch, tmp_path):
    spec = tmp_path / "one.toml"
    spec.write_text('graph = "demo"\nmodel = "gcn"\n')
    monkeypatch.setattr(remote, "_client", Server)
    command = [str(spec) if word == "SPEC" else word for word in command]
    found = CliRunner().invoke(cli, command)
    assert found.output
    assert controls(found.output) == set(), found.output


def test_the_dashboard_makes_text_of_what_others_wrote():
    page = (resources.files("weft.serve") / "static" / "dashboard.html").read_text(encoding="utf-8")
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert way not in page, f"{way} would carry out a task's name"
