"""Names of tasks in their results: inside a server a task goes by its id, its result by the name that its user gave."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from weft.core.files import write_json
from weft.engine.results.result import RESULT


def give_own_name(folder: Path, task: str, names: Mapping[str, str | None]) -> None:
    """Write the name of ``task`` into the result in ``folder``, and its id beside it; nothing where there is no result.

    ``names``: of tasks by id, None for one without a name. The plan in the result has ids, of all members of the group.
    """
    file = folder / RESULT
    if task not in names or not file.is_file():
        return
    result = json.loads(file.read_text(encoding="utf-8"))
    result["task"]["name"] = names[task]
    write_json(file, {"id": task, **result})
