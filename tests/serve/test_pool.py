"""A worker with a pool: the same numbers, group after group, and inference beside training."""

from __future__ import annotations

import weft
from tests.serve.serving import TASK, Queue, history_of
from tests.serve.test_inference import infer
from tests.serve.test_supervisor import own, same, submit_own


def test_tasks_of_a_worker_with_a_pool_have_the_numbers_of_a_run(tmp_path):
    queue = Queue(tmp_path, pool=True, keep_graphs=64 << 20)
    try:
        names = queue.submit({"seed": 1}, {"seed": 2, "model": "sage"}, {"seed": 3, "hidden": 9, "norm": "batch"})
        asked = infer(queue, names[0])
        done = queue.wait([*names, asked])
        assert [task.state for task in done] == ["done"] * 4, [task.error for task in done]
        for task in done[:3]:
            expected = history_of(weft.Task(**{**TASK, **task.spec["task"], "name": task.id}))
            assert same(queue.history(task.id), expected[task.id])
        score = done[0].result["metrics"]["test_accuracy"]
        assert abs(done[3].result["metrics"]["accuracy"] - score) < 1e-9
        logs = [path.read_text() for path in queue.options.runs.glob("*/log.txt")]
        assert not any("beside it" in text for text in logs), logs
        bad, good = submit_own(queue, own("LeaksSmall", epochs=1000)), queue.submit({"seed": 4, "hidden": 4})
        [failed], [after] = queue.wait(bad), queue.wait(good)
        assert (failed.state, after.state) == ("failed", "done")
        assert "ran out of memory" in failed.error  # what is not in the pool is under the group's limit
    finally:
        queue.close()
