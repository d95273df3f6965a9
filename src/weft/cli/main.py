"""``weft``: answer at once what needs no parser, else call the command; errors become one line and an exit code.

Exit codes: 0 done, 1 a fault of Weft's own, 2 a mistake in the input, 3 training failed, 4 a plan does not fit,
130 interrupted.
"""

from __future__ import annotations

import os
import sys

from weft.cli.quick import answer_at_once
from weft.cli.terminal_text import plain_text
from weft.core.errors import WeftError
from weft.core.wording import shell_words


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        with shell_words():
            if answer_at_once(sys.argv[1:]):
                sys.exit(0)
            _run_command()
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


def _run_command() -> None:
    from weft.cli.app import app  # the parser and all commands: 0.1 s

    app()


_PLEASE_REPORT = "This is a fault of Weft's own. Please report it with the output of: weft --debug ..."


def _fail(message: str, code: int) -> None:
    if "--debug" in sys.argv[1:]:
        import traceback

        traceback.print_exc()
    print(message, file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
