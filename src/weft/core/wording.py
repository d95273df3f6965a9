"""Name an option as the user gave it: ``out=`` in Python, ``--out`` in the shell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IN_SHELL: ContextVar[bool] = ContextVar("in_shell", default=False)


@contextmanager
def shell_words() -> Iterator[None]:
    """Messages made inside name options as the shell does."""
    token = _IN_SHELL.set(True)
    try:
        yield
    finally:
        _IN_SHELL.reset(token)


def option(name: str, value: object = None) -> str:
    """``out=`` or ``--out``; with a value ``out='runs/a'`` or ``--out runs/a``."""
    if _IN_SHELL.get():
        return f"--{name}" if value is None else f"--{name} {value}"
    return f"{name}=" if value is None else f"{name}={str(value)!r}"


def switch(name: str) -> str:
    """``resume=True`` or ``--resume``."""
    return f"--{name}" if _IN_SHELL.get() else f"{name}=True"
