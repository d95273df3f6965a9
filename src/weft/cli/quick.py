"""Answer ``weft --version``, ``weft data ls`` and mistakes in a spec before the parser is loaded.

The parser and the modules of all commands take longer to import than these answers take to give. Whatever is not
recognised here with certainty is left to the parser, which gives the same answers.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from weft.core.version import __version__


def answer_at_once(words: Sequence[str]) -> bool:
    """Whether ``words`` are answered; a mistake in the spec that they name is raised."""
    if list(words) == ["--version"]:
        print(f"weft {__version__}")
        return True
    if list(words[:2]) == ["data", "ls"] and list(words[2:]) in ([], ["--json"]):
        from weft.cli.data_list import print_graphs

        print_graphs(json=len(words) > 2)
        return True
    if len(words) > 1 and words[0] in ("run", "plan") and not any(map(_is_left, words)):
        _check_spec(words[1], _given("--set", words[2:]))
        _check_amounts(words[2:])
    return False


def _is_left(word: str) -> bool:
    """Help is the parser's; the graphs of a cluster (``--on``) are not here."""
    return word in ("-h", "--help") or word.startswith("--on")


def _check_spec(text: str, overrides: list[str]) -> None:
    """Read the spec that the command will read; a pipe can be read once only and is left to the command."""
    path = Path(text)
    if text.startswith("-") or path.suffix == ".json" or (os.path.exists(path) and not os.path.isfile(path)):
        return
    from weft.cli.spec import spec_of

    spec_of(path, overrides)


def _check_amounts(words: Sequence[str]) -> None:
    """Amounts of memory, and the device's name as far as the commands' first check of it goes."""
    from weft.core.machine.device_names import check_device_name
    from weft.core.units import parse_bytes

    for name in ("budget", "cache"):
        for value in _given(f"--{name}", words):
            parse_bytes(value, name)
    for value in _given("--device", words):
        check_device_name(value)


def _given(option: str, words: Sequence[str]) -> list[str]:
    """The values of an option, as two words or as one."""
    apart = [value for name, value in pairwise(words) if name == option]
    return apart + [word.removeprefix(f"{option}=") for word in words if word.startswith(f"{option}=")]
