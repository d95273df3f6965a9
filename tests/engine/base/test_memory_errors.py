"""What says that memory ran out becomes one sentence that names the task."""

from __future__ import annotations

import pytest
import torch

from weft.core.errors import OutOfMemoryError
from weft.engine.base.memory_errors import clear_memory_errors

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_all_of_them_are_known(error):
    with (
        pytest.raises(OutOfMemoryError, match="task 'one': the device ran out of memory"),
        clear_memory_errors(["one"], CPU),
    ):
        raise error


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shapes"), clear_memory_errors(["one"], CPU):
        raise RuntimeError("shapes do not fit")
