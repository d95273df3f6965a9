"""What says that memory ran out becomes one sentence that names the task."""

from __future__ import annotations

import pytest
import torch

from tests.flow.memory_errors import MEMORY_ERRORS
from weft.core.errors import OutOfMemoryError
from weft.core.task import Task
from weft.engine.errors import clear_errors

CPU, TASK = torch.device("cpu"), Task("demo", name="one")


@pytest.mark.parametrize("raised", [name for name in MEMORY_ERRORS if name != "weft"])  # that one says what it means
def test_all_of_them_are_known(raised):
    with (
        pytest.raises(OutOfMemoryError, match="task 'one': the device ran out of memory"),
        clear_errors([TASK], CPU),
    ):
        raise MEMORY_ERRORS[raised]()


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes"), clear_errors([TASK], CPU):
        raise RuntimeError("shapes do not fit")


def test_the_error_has_the_request_that_failed():
    with pytest.raises(OutOfMemoryError, match=r"\(CPU .*; \d+ bytes more were requested\)"), clear_errors([TASK], CPU):
        torch.empty(1 << 60, dtype=torch.uint8)
