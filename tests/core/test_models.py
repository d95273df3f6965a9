"""Rows of models: one per class, with settings that are settings; a registered one is known inside its block only."""

from __future__ import annotations

import threading

import pytest

from weft.core.errors import SpecError
from weft.core.models import BUILT_IN, MODELS, ModelTraits, model_names, traits_of, with_traits
from weft.core.task import Task, model_settings
from weft.nn.models import CLASSES, options_of


def test_every_row_has_a_class_and_every_class_a_row():
    assert tuple(CLASSES) == MODELS


@pytest.mark.parametrize("name", MODELS)
def test_the_settings_of_a_row_are_settings_and_options_of_its_class(name):
    traits = BUILT_IN[name]
    assert set(traits.settings) <= set(model_settings())
    assert set(traits.settings) <= set(options_of(CLASSES[name]))
    assert set(traits.shaping) <= set(traits.settings)
    assert traits.has_heads == ("heads" in traits.settings)


def test_a_row_is_known_inside_its_block_in_every_thread():
    seen = []
    with with_traits(ModelTraits("own")):
        assert traits_of("own").name == "own"
        assert Task(graph="g", model="own").traits is not None
        assert model_names() == (*MODELS, "own")
        thread = threading.Thread(target=lambda: seen.append(traits_of("own")))
        thread.start()
        thread.join()
    assert seen == [ModelTraits("own")]
    assert model_names() == MODELS
    with pytest.raises(SpecError, match="must be one of gcn, sage, gin, gat, gatv2, rgcn, or"):
        Task(graph="g", model="own")


@pytest.mark.parametrize(("name", "words"), [("gcn", "'gcn' is taken"), ("a b", "must be a word"), ("", "a word")])
def test_names_that_cannot_be_given(name, words):
    with pytest.raises(SpecError, match=words), with_traits(ModelTraits(name)):
        pass
