"""``weft``: answer at once what needs no parser, else call the command; errors become one line and an exit code.

Exit codes: 0 done, 1 a fault of Weft's own, 2 a mistake in the input, 3 training failed, 4 a plan does not fit,
130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from weft.cli.format import plain_text
from weft.core.errors import WeftError
from weft.core.version import __version__
from weft.core.wording import shell_words

# ---- Answer ``weft --version``, ``weft data ls`` and mistakes in a spec before the parser is loaded.
#
# The parser and the modules of all commands take longer to import than these answers take to give. Whatever is not
# recognised here with certainty is left to the parser, which gives the same answers.


def answer_at_once(words: Sequence[str]) -> bool:
    """Whether ``words`` are answered; a mistake in the spec that they name is raised."""
    if list(words) == ["--version"]:
        print(f"weft {__version__}")
        return True
    if list(words[:2]) == ["data", "ls"] and list(words[2:]) in ([], ["--json"]):
        from weft.cli.data_list import print_graphs

        print_graphs(json=len(words) > 2)
        return True
    left = any(word in ("-h", "--help") or word.startswith("--on") for word in words)  # a cluster has its own graphs
    if len(words) > 1 and words[0] in ("run", "plan", "tune") and not left:
        path = Path(words[1])
        piped = os.path.exists(path) and not os.path.isfile(path)  # it can be read once only: by the command
        if not words[1].startswith("-") and path.suffix != ".json" and not piped:
            from weft.cli.spec import spec_of

            changes = [value for name, value in pairwise(words) if name == "--set"]
            changes += [word.removeprefix("--set=") for word in words if word.startswith("--set=")]
            spec_of(path, changes, tuned=words[0] != "run")
    return False


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        with shell_words():
            if answer_at_once(sys.argv[1:]):
                sys.exit(0)
            from weft.cli.app import parser  # and all commands: 0.1 s

            parser()(prog_name="weft")  # by which a shell asks for completions, however Weft was started
    except WeftError as error:
        _fail(plain_text(f"weft: error: {error}"), error.exit_code)
    except KeyboardInterrupt:
        _fail("weft: interrupted", 130)
    except BrokenPipeError:
        # The reader (| head) has gone: nothing is left to say, not even at the last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        _fail(f"weft: internal error: {type(error).__name__}: {error}\n{_PLEASE_REPORT}", 1)


_PLEASE_REPORT = "This is a fault of Weft's own. Please report it with the output of: weft --debug ..."


def _fail(message: str, code: int) -> None:
    if "--debug" in sys.argv[1:]:
        import traceback

        traceback.print_exc()
    print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
