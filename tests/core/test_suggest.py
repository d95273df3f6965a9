"""What a misspelt name was meant to be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from weft.core.wording import closest, did_you_mean, edits, nearest_names, option, shell_words, switch

MODELS = ("gcn", "sage", "gin", "gat", "gatv2")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("gnc", "gcn"), ("gcnn", "gcn"), ("GTA", "gat"), ("gni", "gin"), ("saeg", "sage"), ("gatv3", "gatv2")],
)
def test_typing_errors_of_model_names(typed, meant):
    assert closest(typed, MODELS) == [meant]


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [("", "abc", 3), ("gnc", "gcn", 1), ("gnc", "gin", 2), ("hiden", "hidden", 1), ("abc", "abc", 0), ("ab", "ba", 1)],
)
def test_edits(a, b, count):
    assert edits(a, b) == edits(b, a) == count


def test_sentences():
    assert did_you_mean("gnc", MODELS) == "did you mean 'gcn'?"
    assert did_you_mean("corra", ["Cora", "cora-ml"], count=2) == "did you mean 'Cora' or 'cora-ml'?"
    assert did_you_mean("transformer", MODELS) == ""
    assert did_you_mean(3, [None, 4]) == ""
    assert nearest_names("redit", ["reddit"]) == " (did you mean 'reddit'?)"
    assert nearest_names("xyz", ["reddit"]) == ""


def test_a_server_that_a_shell_command_started_names_options_as_python_does():
    with shell_words(), ThreadPoolExecutor(1) as answers:
        assert (option("budget", 3), switch("resume")) == ("--budget 3", "--resume")
        assert answers.submit(option, "budget", 3).result() == "budget=3"
    assert switch("resume") == "resume=True"
