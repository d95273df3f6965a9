"""The command as a function."""

from __future__ import annotations

import sys

import pytest

from weft.cli.main import main


@pytest.fixture
def weft(monkeypatch, capsys):
    """``weft("run", ...)``: exit code, stdout and stderr of the command, in this process."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            main()
        out, err = capsys.readouterr()
        return leaving.value.code or 0, out, err

    return call
