"""ModelBuilder: members' models on the device of their group, and the batches that a model takes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError, WeftError
from weft.core.settings.value_names import identity
from weft.core.task import Task
from weft.graph.data.sparse_features import SparseFeatures
from weft.nn.norm import BatchNorm
from weft.runtime.batches.source import Features, Source
from weft.runtime.device.precision import DTYPES
from weft.runtime.device.torch_rng import same_draws
from weft.runtime.step.inputs import Inputs, bind, takes_blocks, takes_edges
from weft.runtime.step.members.checks import check_relations
from weft.runtime.user_modules.build import build_model
from weft.runtime.user_modules.compiled import as_written, was_compiled
from weft.runtime.user_modules.copying import copy_module, functions_that_hold
from weft.runtime.user_modules.edge_use import given_of_edges
from weft.runtime.user_modules.error_place import model_errors
from weft.runtime.user_modules.importing import in_words


class ModelBuilder:
    """Builds the models of tasks that are one stack, of which ``task`` is the widest.

    ``notes`` collects remarks for the user; ``made_dense``: sparse features are, since the model does not take them.
    """

    def __init__(self, task: Task, inputs: Inputs) -> None:
        self.task, self.inputs, self.graph = task, inputs, inputs.graph
        self.notes: list[str] = []
        self.made_dense = False

    @property
    def sparse(self) -> bool:
        """Whether the graph's features are."""
        return isinstance(self.graph.x, SparseFeatures)

    def note_once(self, note: str) -> None:
        """Add a remark for the user, unless it is there."""
        self.notes += [note] if note not in self.notes else []

    # ---- models --------------------------------------------------------------------------------------

    def build(self, task: Task) -> nn.Module:
        """The model of ``task`` from its own seed, at its own width."""
        device, graph = self.inputs.device, self.graph
        # A dry run needs no values, and drawing those of many members takes longer than the rest.
        with device if device.type == "meta" and task.traits is not None else nullcontext():
            check_relations(task, graph)
            model = build_model(task, graph.num_features, graph.num_classes, graph.num_relations)
            if was_compiled(task, model):
                model = as_written(model)
                self.note_once(f"{task.model_name} trains as written, without torch.compile; compile= compiles steps")
            return model.to(device)

    def build_whole(self, task: Task) -> nn.Module:
        """The same, its lazy layers initialised if it has any."""
        model = self.build(task)
        if any(nn.parameter.is_lazy(p) for p in model.parameters()):
            try:
                self._call_lazy(model, task, dense=self.made_dense or (self.sparse and takes_edges(model)))
            except SpecError as error:
                self.note_dense(error)
                self._call_lazy(model, task, dense=True)
        return model

    def _call_lazy(self, model: nn.Module, task: Task, dense: bool) -> None:
        with torch.no_grad(), model_errors(task, self.graph.name):
            bind(model.eval())(self._source_for(model, self._features(dense)).example())

    def build_again(self, model: nn.Module) -> nn.Module:
        """The module of the widest task again: built anew, or a copy of the object that the task was given."""
        if isinstance(self.task.model, nn.Module):
            return self.copied(model)
        with same_draws(self.inputs.device):
            return self.build_whole(self.task)

    def copied(self, model: nn.Module) -> nn.Module:
        """A copy of a user's module; a :class:`SpecError` if it cannot be copied."""
        try:
            return copy_module(model)[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self.cannot_copy(f"{type(error).__name__}: {error}") from error

    def to_call(self, model: nn.Module) -> nn.Module:
        """A module like ``model`` to call: a copy, unless functions that it keeps would go on with the original."""
        return self.build_again(model) if functions_that_hold(model) else self.copied(model)

    @contextmanager
    def naming_left_out(self, model: nn.Module) -> Iterator[None]:
        """Inside, a copy of ``model`` is called: if it fails for want of what cannot be copied, the error says so."""
        try:
            yield
        except (WeftError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            left_out = copy_module(model)[1]
            if not left_out:
                raise
            raise self.cannot_copy(
                f"it needs {left_out[0]!r}, of which Python makes no copy ({in_words(error, __file__)}); let forward "
                "make it, or keep numbers and tensors instead"
            ) from error

    def cannot_copy(self, why: str) -> SpecError:
        """The error for a module that cannot be copied."""
        task = self.task
        return SpecError(
            f"task {task.label!r}: model {task.model_name} cannot be copied, so its best weights could not be "
            f"given back: {why}"
        )

    # ---- batches -------------------------------------------------------------------------------------

    def _features(self, dense: bool) -> Features:
        return self.inputs.features(self.task.feature_norm, DTYPES[self.task.precision], dense)

    def note_dense(self, error: SpecError) -> None:
        """Add a note that features are made dense, if that may help a user's model that failed with ``error``."""
        if not self.sparse or self.task.traits is not None or error.__cause__ is None or self.made_dense:
            raise error
        self.made_dense = True
        self.notes.append(f"features made dense: the model does not take sparse ones ({error.__cause__})")

    def source(self, model: nn.Module, dense: bool, first_once: bool) -> Source:
        """The source of batches of the shared ``model``; with its first aggregation if that is computed once."""
        task, x, first = self.task, self._features(dense), None
        if first_once:
            first = self.inputs.first(model, x, aggregation_key(task))
        over_rows = any(isinstance(module, BatchNorm) for module in model.modules())
        padding = task.traits is not None and not over_rows
        return self._source_for(model, x, first, padding)

    def _source_for(self, model: nn.Module, x: Features, first: Tensor | None = None, padding: bool = False) -> Source:
        of_edges = given_of_edges(self.task, model, self.graph.adj)
        return self.inputs.source(x, first, not takes_blocks(model), padding, of_edges)


def aggregation_key(task: Task) -> Hashable:
    """Equal for tasks that share the first aggregation of the same features; None: not shared."""
    if task.traits is None:
        return None
    shaping = (getattr(task, name) for name in task.traits.shaping)
    return (task.model, *shaping, identity(tuple(task.model_args.items())))
