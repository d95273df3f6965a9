"""Context variables, ``os.environ`` and attributes of functions: calls before the first epoch leave them unchanged."""

from __future__ import annotations

import os
from contextvars import ContextVar, copy_context

import pytest

from tests.runtime.user_modules.odd_modules import Base
from tests.runtime.user_modules.test_exact import plain, run, tasks_of

COUNT: ContextVar[int] = ContextVar("count", default=0)
UNSET: ContextVar[int] = ContextVar("unset")
IN_DICT: ContextVar[dict[str, int]] = ContextVar("in_dict")
VARIABLE = "WEFT_TEST_CALLS"


class Counting(Base):
    """Its numbers depend on how many training calls there were."""

    def forward(self, x, adj):
        calls = self.counted() if self.training else self.calls()
        return super().forward(x, adj) * (1 + 0.1 * calls)


class InContext(Counting):
    def calls(self):
        return COUNT.get()

    def counted(self):
        COUNT.set(COUNT.get() + 1)
        return COUNT.get()


class InUnsetContext(Counting):
    def calls(self):
        return UNSET.get(0)

    def counted(self):
        try:
            UNSET.set(UNSET.get() + 1)
        except LookupError:
            UNSET.set(1)
        return UNSET.get()


class InDictOfContext(Counting):
    def calls(self):
        return IN_DICT.get()["calls"]

    def counted(self):
        IN_DICT.get()["calls"] += 1
        return self.calls()


class InEnvironment(Counting):
    def calls(self):
        return int(os.environ.get(VARIABLE, "0"))

    def counted(self):
        os.environ[VARIABLE] = str(self.calls() + 1)
        return self.calls()


def tally():
    return tally.calls


class InFunction(Counting):
    def calls(self):
        return tally()

    def counted(self):
        tally.calls += 1
        return self.calls()


class InMethod(Counting):
    def calls(self):
        return getattr(type(self).counted, "number", 0)

    def counted(self):
        type(self).counted.number = self.calls() + 1
        return self.calls()


ALL = [InContext, InUnsetContext, InDictOfContext, InEnvironment, InFunction, InMethod]


@pytest.fixture(autouse=True)
def before():
    def reset():
        os.environ.pop(VARIABLE, None)
        tally.calls = 0
        vars(InMethod.counted).clear()

    token = IN_DICT.set({"calls": 0})
    reset()
    yield reset
    reset()
    IN_DICT.reset(token)


def fresh(reset, function, *arguments):
    """``function(*arguments)`` with everything outside of the modules as at the start."""
    reset()

    def call():
        IN_DICT.set({"calls": 0})
        return function(*arguments)

    return copy_context().run(call)


@pytest.mark.parametrize("model", ALL)
def test_what_calls_keep_outside_is_as_in_a_plain_loop(model, before):
    tasks = tasks_of(model, range(2))
    expected = [fresh(before, plain, model, seed)[0] for seed in range(2)]
    alone = [fresh(before, run, task).history["loss"] for task in tasks]
    together = [result.history["loss"] for result in fresh(before, run, tasks)]
    for seed in range(2):
        assert alone[seed] == pytest.approx(expected[seed], abs=2e-6)
        assert together[seed] == pytest.approx(expected[seed], abs=2e-6)


@pytest.mark.parametrize("model", ALL)
def test_a_note_says_that_it_cannot_be_resumed(model):
    notes = []
    collect = lambda event: notes.append(event.data["message"]) if event.kind == "note" else None  # noqa: E731
    run(tasks_of(model, [0], epochs=2), on_event=collect)
    (note,) = [note for note in notes if "trains alone and eagerly, its training cannot be resumed" in note]
    assert "have advanced it" not in note
