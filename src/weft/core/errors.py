"""The tree of Weft's errors.

    WeftError
    ├── InputError            the user's own mistake; the shell exits with 2
    │   ├── GraphError        a graph, a file of one, or its arrays
    │   └── SpecError         a task, a spec file, an option
    └── TrainingError         the run itself failed; the shell exits with 3
        ├── DivergedError     the loss became NaN or infinite
        ├── ModelError        a model of the user's own raised while it trained
        └── OutOfMemoryError  the device or the budget was too small
            └── DoesNotFitError   and that was known before; the shell exits with 4

Every message names the value, what was expected and what to do.
"""

from __future__ import annotations

from typing import Any


class WeftError(Exception):
    """Base of every error that Weft raises on purpose."""

    exit_code = 1


class InputError(WeftError):
    """The user's own mistake: the message says which value, what was expected, and what to do."""

    exit_code = 2


class GraphError(InputError):
    """A graph, one of its arrays, or a file that should hold one is not usable."""


class SpecError(InputError):
    """A task, a spec file or an option is not usable."""


class TrainingError(WeftError):
    """A run that started could not finish.

    ``result``: what was trained, where all of it was and only writing it failed; else None.
    """

    exit_code = 3
    result: Any = None


class DivergedError(TrainingError):
    """The loss became NaN or infinite."""


class ModelError(TrainingError):
    """A model of the user's own raised while it trained: the message names its file and line."""


class OutOfMemoryError(TrainingError):
    """The device, or the budget the task was given, was too small for it."""


class DoesNotFitError(OutOfMemoryError):
    """A run that was refused before it began: its plan does not keep within the budget."""

    exit_code = 4
