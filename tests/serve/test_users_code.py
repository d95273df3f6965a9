"""What a user's code does to its process is over with its group: tasks of others have the right numbers."""

from __future__ import annotations

import resource

import pytest

import weft
from tests.serve.serving import FAULTY, TASK, history_of, opened
from tests.serve.test_supervisor import own, same, submit_own

PLAIN = {"model": f"{FAULTY}:UsesRelu", "graph": "demo", "epochs": 20}


@pytest.fixture(scope="module")
def expected():
    """The numbers of what the second user trains, each by itself: models of Weft's and one of the user's own."""
    work = [{**TASK, "seed": 1}, {**TASK, "seed": 2, "model": "sage", "layers": 3}, PLAIN]
    return [next(iter(history_of(weft.Task(**settings)).values())) for settings in work]


@pytest.mark.parametrize("model", ["ChangesDefaultDtype", "ReplacesRelu", "TurnsGradientsOff", "LowersLimits"])
def test_a_model_that_changes_its_process_changes_nothing_for_others(tmp_path, expected, model):
    with opened(tmp_path) as queue:
        queue.wait(submit_own(queue, own(model), user="anna"))
        names = queue.submit({"seed": 1}, user="ben") + queue.submit(
            {"seed": 2, "model": "sage", "layers": 3}, user="ben"
        )
        names += submit_own(queue, PLAIN, user="ben")
        done = queue.wait(names)
        assert [(task.state, task.attempts) for task in done] == [("done", 1)] * 3, [task.error for task in done]
        assert all(same(queue.history(name), numbers) for name, numbers in zip(names, expected, strict=True))


def test_a_users_code_is_not_fused_with_tasks_of_another_user(tmp_path):
    with opened(tmp_path) as queue:
        [first] = queue.submit({"epochs": 100_000, "seed": 9}, user="cid")  # meanwhile the others are planned
        queue.until(lambda: queue.db.get(first).state == "running")
        own_code = {"callbacks": [{"call": f"{FAULTY}:nothing", "every": 1}]}
        names = queue.submit(*({**own_code, "seed": seed} for seed in (1, 2)), user="anna")
        names += queue.submit({**own_code, "seed": 3}, {"seed": 4}, user="ben") + queue.submit({"seed": 5}, user="cid")
        queue.until(lambda: all(queue.db.get(name).state == "planned" for name in names))
        queue.db.cancel(first)
        assert {task.state for task in queue.wait(names)} == {"done"}
        groups = {frozenset(group.members) for group in queue.db.groups() if first not in group.members}
    assert groups == {frozenset(names[:2]), frozenset(names[2:3]), frozenset(names[3:])}, "built-in tasks still share"


def test_an_estimate_of_a_users_model_changes_nothing_for_the_estimates_of_others(tmp_path):
    with opened(tmp_path) as queue:
        model = {"model": f"{FAULTY}:Plain", "graph": "demo", "epochs": 5}
        [before] = queue.wait(submit_own(queue, model, user="ben"))
        queue.wait(submit_own(queue, own("ChangesDefaultDtypeWhenBuilt"), user="anna"))
        [after] = queue.wait(submit_own(queue, {**model, "epochs": 6}, user="ben"))
    assert (before.state, after.state) == ("done", "done")
    assert after.plan["bytes"] == pytest.approx(before.plan["bytes"], rel=1e-3)
    assert not after.plan.get("guess")


@pytest.mark.parametrize("setting", ["optimizer", "schedule", "objective", "metric", "callbacks", "model"])
def test_every_setting_that_names_a_function_ends_its_process(tmp_path, setting):
    value = [{"call": f"{FAULTY}:nothing", "every": 1}] if setting == "callbacks" else f"{FAULTY}:nothing"
    with opened(tmp_path) as queue:
        queue.until(lambda: queue.supervisor.pool.any_idle())
        queue.wait(queue.submit({"seed": 1}))
        kept = queue.worker_pid()
        queue.wait(queue.submit({"seed": 2}))
        assert queue.worker_pid() == kept
        queue.wait(queue.submit({"seed": 3, setting: value}))
        queue.wait(queue.submit({"seed": 4}))
        assert queue.worker_pid() != kept
        assert queue.supervisor.state.counters["workers_lost"] == 0


def test_a_worker_in_which_nothing_works_is_replaced_and_the_task_tried_again(tmp_path, expected):
    with opened(tmp_path) as queue:
        queue.wait(queue.submit({"seed": 9}))
        broken = queue.worker_pid()
        resource.prlimit(broken, resource.RLIMIT_NOFILE, (8, 8))
        [name] = queue.submit({"seed": 1})
        [task] = queue.wait([name])
        assert (task.state, task.attempts) == ("done", 2), task.error
        assert queue.worker_pid() != broken
        assert same(queue.history(name), expected[0])
