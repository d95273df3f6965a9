"""A short version of ``make soak``: kills, failing calls and misbehaving models against a real server."""

from __future__ import annotations

import pytest

from tests.serve import soak

SOME_CASES = [("write", error) for error in ("ENOSPC", "EIO", "EMFILE", "EINTR")]
SOME_CASES += [("pwrite", "ENOSPC"), ("fdatasync", "EIO"), ("accept", "EMFILE"), ("recv", "EIO")]
SOME_MODELS = ("Exits", "ChangesEnvironment", "ChangesFolder", "ReplacesRelu", "ClosesFiles", "DeletesItsFolder")


@pytest.mark.long
def test_killed_processes_lose_nothing_and_change_no_number(tmp_path):
    assert soak.kills(tmp_path, len(soak.TARGETS))["kills"].keys() == set(soak.TARGETS)


@pytest.mark.long
def test_calls_of_the_server_that_fail_once_lose_nothing(tmp_path):
    library = soak.shim(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler")
    outcome = soak.faults(tmp_path, library, SOME_CASES)
    assert (outcome["not called"], outcome["attempts lost"]) == ([], 0)


@pytest.mark.long
def test_misbehaving_models_change_nothing_of_other_tasks(tmp_path):
    outcome = soak.models(tmp_path, SOME_MODELS)
    assert sum(outcome["compared"].values()) == outcome["innocent"] > len(SOME_MODELS)
