"""Preflight: call the members' models before training, alone and together, and decide how they may be trained.

Errors of a model show here, before the first epoch. A user's module is called on the user's own graph or batch, as
copies and with all generators restored afterwards. Calls at other weights and those of a module that is built anew show
whether a call depends on earlier ones: such a module trains alone and eagerly, as in a plain loop of torch. Several
train in one step only if each has the loss, gradients, buffers and logits that it has alone.

Shapes: P parameters, N nodes, C classes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf, pi
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.batches.source import Batch
from weft.core.errors import SpecError, WeftError
from weft.nn.epilogue import next_mask
from weft.nn.pyg.convert import swap
from weft.nn.pyg.edges import is_bypass
from weft.runtime.device.process import DTYPES, PYTHON, same_draws, step_seconds
from weft.runtime.modules.build import copy_module, functions_that_hold
from weft.runtime.modules.settings import call_style, in_words, model_errors
from weft.runtime.modules.state import (
    GlobalsSnapshot,
    ModuleState,
    StateReader,
    WeightMemory,
    followers,
    is_library,
    memory_of,
    opaque_marks,
    restore_state,
    same_numbers,
)
from weft.runtime.step.forward import Forward, LeafForward, Loss, backward
from weft.runtime.step.inputs import bind, takes_blocks, takes_edges
from weft.runtime.step.losses import REPEATED, as_one, logits_and_extra, of_member
from weft.runtime.step.members import CannotStack, Findings, Members, set_up
from weft.runtime.step.state import State

# ---- How far numbers are apart that should be equal, and how far they may be.

NEAR = {"fp32": 1e-3, "tf32": 2e-2, "bf16": 1e-1}  # of the largest: a stack adds up in another order
SPARSE = {"fp32": 1e-4, "tf32": 2e-2, "bf16": 1e-1}  # of the largest: the same layer on sparse features
LEAST, TINY = 1e-3, 1e-30


def apart(mine: Tensor, true: Tensor, whole: Tensor | None = None) -> float:
    """The largest difference relative to the largest of ``true``, or to a thousandth of the ``whole`` it is part of.

    It is infinite unless the same numbers are finite.
    """
    if not true.is_floating_point() and not true.is_complex():
        return 0.0 if same_numbers(mine, true) else inf
    finite = true.isfinite()
    if mine.shape != true.shape or not bool((mine.isfinite() == finite).all()):
        return inf
    largest = max(_largest(true), LEAST * _largest(true if whole is None else whole), TINY)
    return _largest((mine - true).where(finite, torch.zeros((), dtype=true.dtype, device=true.device))) / largest


def _largest(values: Tensor) -> float:
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0


# ---- Calls of one member by itself.

DATA = (Tensor.data.__get__, Tensor.data.__set__)
GRADIENT = Tensor.grad.__get__
TO_PYTHON = frozenset(("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"))


class CallRecorder(TorchFunctionMode):
    """Around calls and backward passes of ``model``: whether they write to its weights or to the ``inputs`` by name.

    Torch counts writes, but not those through ``.data`` or NumPy: what is reached that way is copied first, and
    compared. A constraint such as ``weight.data.clamp_(-5, 5)`` may change nothing at first, so reaching the ``.data``
    of a weight counts as a write. ``branches``: whether they read numbers into Python, and so may do something else in
    a later step; ``reads_gradient``: whether they read the ``.grad`` of a weight.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.writes = self.branches = self.reads_gradient = False
        self._tables = [module._parameters for module in model.modules()]
        self._weights: list[tuple[Tensor, int]] = []
        self._inputs = {name: (tensor, tensor._version) for name, tensor in inputs.items()}
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.changed_inputs: set[str] = set()

    def __enter__(self) -> Self:
        """Start with the weights that the model has now."""
        weights = [tensor for table in self._tables for tensor in table.values() if tensor is not None]
        self._weights = [(tensor, tensor._version) for tensor in weights]
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop, and compare: two calls may undo what one did."""
        super().__exit__(*error)
        for tensor, version in self._weights:
            self.writes = self.writes or self._is_changed(tensor, version)
        self.changed_inputs |= {name for name, recorded in self._inputs.items() if self._is_changed(*recorded)}

    def _is_changed(self, tensor: Tensor, version: int) -> bool:
        copied = self._copies.get(id(tensor))
        return tensor._version != version or (copied is not None and not same_numbers(tensor.detach(), copied[1]))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_bypass(func):
            for tensor, _ in (*self._weights, *self._inputs.values()):
                if memory_of(args[0]) == memory_of(tensor):
                    if id(tensor) not in self._copies:
                        self._copies[id(tensor)] = tensor, tensor.detach().clone()
                    self.writes = self.writes or (func in DATA and any(tensor is weight for weight, _ in self._weights))
        elif func == GRADIENT:
            self.reads_gradient = self.reads_gradient or any(args[0] is tensor for tensor, _ in self._weights)
        self.branches = self.branches or getattr(func, "__name__", "") in TO_PYTHON
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class StepNumbers:
    """Losses ``[1]`` and gradients ``[P]`` of one training call, and the buffers after it."""

    loss: Tensor
    grad: Tensor
    buffers: Mapping[str, Tensor]

    def is_same(self, other: StepNumbers, near: float) -> bool:
        """Whether all numbers agree with those of ``other``."""
        pairs = [(self.loss, other.loss), (self.grad, other.grad)]
        pairs += [(self.buffers[name], other.buffers[name]) for name in self.buffers]
        return all(apart(mine, true) <= near for mine, true in pairs)


class Calls:
    """Calls of one member by itself, each from the same ``state`` and with the same draws."""

    def __init__(self, forward: Forward, state: State, batch: Batch, loss: Loss) -> None:
        self.forward, self.state, self._batch, self.loss = forward, state, batch, loss
        self._before, self._slopes = state.snapshot(), torch.ones(1, device=state.flat.device)
        self.seconds = 0.0  # of all calls so far, without what is around them
        self.drawn: set[str] = set()  # generators that calls at these weights drew from

    def __call__(self) -> None:
        """One training call and one in evaluation mode, to be timed: the state changes."""
        self.forward.gradients(self.state.flat, self._batch, self.loss, self._slopes)
        with torch.no_grad():
            self.forward(self.state.flat, training=False, batch=self._batch)

    def train(self, elsewhere: bool = False) -> StepNumbers:
        """A training call; ``elsewhere``: with other weights and other draws."""
        with self._from_the_start(elsewhere):
            loss, grad = self.forward.gradients(self.state.flat, self._batch, self.loss, self._slopes)
        # Detached: a graph that is kept alive ties the parameters to this stream, and no other could capture a step.
        return StepNumbers(
            loss.detach(), grad[0], {name: buffer[0].clone() for name, buffer in self.state.buffers.items()}
        )

    def evaluate(self, batch: Batch | None = None) -> Tensor:
        """Logits ``[N, C]`` in evaluation mode; of another ``batch``, if one is given."""
        with torch.no_grad(), self._from_the_start(elsewhere=False):
            output = self.forward(self.state.flat, training=False, batch=batch or self._batch)
        return as_one(of_member(output, 0))

    def changed_buffers(self) -> set[str]:
        """Names of the buffers that the last call has changed."""
        saved = self._before
        return {n for n, now in self.state.buffers.items() if not same_numbers(now, saved[f"buffer.{n}"])}

    @contextmanager
    def _from_the_start(self, elsewhere: bool) -> Iterator[None]:
        self.state.restore(self._before)
        with same_draws(self.state.flat.device) as moved:
            if elsewhere:
                self.state.flat.mul_(1.5).add_(0.01)
                torch.manual_seed(torch.initial_seed() + 1)
                random.seed(random.random())
                np.random.seed(np.random.randint(1 << 31))
            begin = step_seconds()
            yield
            self.seconds += step_seconds() - begin
            self.drawn |= set() if elsewhere else moved()


class WithoutDropout(TorchFunctionMode):
    """Inside, dropout of torch's and of converted layers drops nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.dropout:
            return args[0] if args else (kwargs or {})["input"]
        return func(args[0], 0.0) if func is next_mask else func(*args, **(kwargs or {}))


OTHERS = "it gives other numbers when it is called again"
OUTSIDE = "something outside of its attributes, as a closure, a hook or a global variable has it"


class Preflight:
    """Tries ``members`` with the weights of ``state``, which stays as it is, and keeps the findings in ``members``."""

    def __init__(self, members: Members, state: State, loss_of: Callable[[Sequence[int]], Loss]) -> None:
        self._members, self._state, self._loss_of = members, state, loss_of  # by rows
        self._task, self._device = members.task, members.inputs.device
        self._models, members.to_try = members.to_try, []
        self._globals = GlobalsSnapshot(self._models[0] if self._models else members.model)
        is_object = bool(self._models) and isinstance(members.slots[0].task.model, nn.Module)
        self._untouched = members.copied(self._models[0]) if is_object else None
        self._examples: dict[int, tuple[Any, Batch]] = {}  # with their sources, whose ids they have

    def __call__(self) -> None:
        """Raises what a model raises, as one sentence, or :class:`CannotStack` with the reason."""
        members, runs = self._members, bool(self._models)
        try:
            with same_draws(self._device) if runs else nullcontext(), self._globals.fresh_caches():
                try:
                    self._check_output()
                except SpecError as error:
                    self._members.note_dense(error)
                    self._members.source = self._members.source_of(dense=True)
                    self._check_output()
                if runs:
                    self._globals.restore()
                    self._try_sparse()
                    self._check_ranks()
                    self._try_members()
                    self._try_copy()
                elif members.is_users and self._state.members > 1:
                    self._together()
        finally:
            self._globals.restore()

    # ---- one call ------------------------------------------------------------------------------------

    def _check_output(self) -> None:
        """Call the first member's model and check what it returns."""
        members, state, graph = self._members, self._state, self._members.graph
        task, batch = members.slots[0].task, self._example()
        with torch.no_grad(), model_errors(task, graph.name):
            if self._models:  # a user's is called as a copy of its own
                model = self._models[0]
                # Functions that a module keeps would go on with the parts of the original.
                calls = self._calls(self._built_again() if functions_that_hold(model) else members.copied(model), 0)
                try:
                    output = calls.forward.one(calls.state.flat[0], training=False, batch=batch)
                except (WeftError, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # perhaps for want of what cannot be copied
                    left_out = copy_module(model)[1]
                    if not left_out:
                        raise
                    raise members.cannot_copy(
                        f"it needs {left_out[0]!r}, of which Python makes no copy ({in_words(error, __file__)}); "
                        "let forward make it, or keep numbers and tensors instead"
                    ) from error
            else:
                members.forward.attach(state.select([0]), [rate[None] for rate in members.slots[0].rates])
                try:
                    output = members.forward.one(state.flat[0], training=False, batch=batch)
                finally:
                    members.attach(state)
        if task.has_own("objective"):
            members.plain_output = isinstance(output, Tensor)
            return
        has_extra = not isinstance(output, Tensor) and task.traits is None
        logits = logits_and_extra(output, task.label)[0] if has_extra else output
        nodes, classes, name = batch.y.shape[0], graph.num_classes, type(members.model).__name__
        if not isinstance(logits, Tensor):
            raise SpecError(
                f"task {task.label!r}: model {name} returned {type(logits).__name__}; "
                f"expected a tensor of logits [{nodes}, {classes}]"
            )
        if tuple(logits.shape) != (nodes, classes):
            per = "number to predict" if graph.regression else "class"
            raise SpecError(
                f"task {task.label!r}: model {name} returned shape {list(logits.shape)}; "
                f"expected logits [{nodes}, {classes}]: one row per node, one column per {per}"
            )

    def _built_again(self) -> nn.Module:
        """The first member's module as before any call: built anew, or a copy of the object that its task has."""
        members = self._members
        if self._untouched is not None:
            return members.copied(self._untouched)
        model = members.build_again(self._models[0], members.slots[0].task)
        if members.converted is not None and members.converted.layers:
            swap(model, members.converted.layers, builds=False)
        return model

    def _try_sparse(self) -> None:
        """Keep the graph's features sparse if converted layers take them and give the same logits."""
        members, converted = self._members, self._members.converted
        if converted is None or not converted.layers or not members.sparse or members.made_dense:
            return
        if members.source.reduce.ranks > 1:  # ranks might decide differently
            return
        if not members.source.constant or not takes_edges(members.model):
            return
        if members.inputs.converted is not None:  # as the run did that is resumed
            if converted.sparse:
                members.use_sparse()
            return
        try:
            both_calls = [
                self._calls(self._built_again(), 0, source) for source in (members.source, members.source_of(False))
            ]
            dense, sparse = (calls.evaluate() for calls in both_calls)
            both_calls[1].train()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # it computes with the features itself: they stay dense
            return
        if apart(sparse, dense) <= SPARSE[self._task.precision]:
            members.use_sparse()

    # ---- over ranks ----------------------------------------------------------------------------------

    def _check_ranks(self) -> None:
        """A :class:`SpecError` unless steps have the same numbers however rows are divided among the ranks.

        Only then they are those of one rank. Another division takes no more memory than the run's own; a module that
        takes a mean over its rank's rows, numbers them or draws a number for each has other numbers there.
        """
        members, graph = self._members, self._members.inputs.graph
        if members.source.reduce.ranks == 1:
            return
        inputs, dense = members.inputs.over(graph.divided_otherwise()), isinstance(self._example().x, Tensor)
        x = inputs.features(self._task.feature_norm, DTYPES[self._task.precision], dense)
        other = inputs.source(x, subgraph=not takes_blocks(members.model))
        trains = other if other.constant else members.source
        others = self._divided_numbers(other, trains.trials(otherwise=True), otherwise=True)
        pairs = zip(self._divided_numbers(members.source, members.source.trials()), others, strict=True)
        wrong = any(apart(mine, true, whole) > SPARSE[self._task.precision] for (mine, whole), (true, _) in pairs)
        if members.source.reduce.sum(torch.tensor(float(wrong), device=self._device)):  # all ranks decide alike
            raise SpecError(
                f"task {self._task.label!r}: the numbers of model {self._task.model_name} depend on which nodes are on "
                "which rank, as those of a mean, a softmax or a sum over all nodes, a position per node or a random "
                "number per node do; train it on one rank (over ranks, weft.nn layers and norms see all nodes)"
            )

    def _divided_numbers(
        self, source: Any, trials: Iterator[tuple[Batch, int]], otherwise: bool = False
    ) -> list[tuple[Tensor, Tensor]]:
        """What training calls, at other weights too, and an evaluation compute from the rows of all ranks.

        Each with the tensor that it is part of. The loss is over all rows of a batch, of which so many come before this
        rank's, and different for each of them. Divided ``otherwise``, buffers are those of rank 0: there is one of each
        on one rank. Sampled batches have other masks of dropout in another division, so there they have none.
        """
        layout, reduce, rates = self._members.layout, source.reduce, self._members.slots[0].rates
        numbers: list[tuple[Tensor, Tensor]] = []

        def squares(output: Any, batch: Batch, first: int, rows: Tensor | None = None) -> Tensor:
            if not isinstance(output, Tensor):
                return self._loss_of([0])(output, batch)  # which refuses it over ranks
            logits = output.float() if rows is None else output.float().index_select(-2, rows)
            nodes, columns = (torch.arange(size, device=logits.device) for size in logits.shape[-2:])
            return (logits - torch.cos((nodes + first)[:, None] + columns)).square().sum((-2, -1))

        for batch, first in trials:
            calls = self._untouched_calls(source, batch)
            calls.loss = partial(squares, first=first, rows=None if source.constant else batch.rows)
            if not source.constant:
                calls.forward.attach(calls.state, [torch.zeros_like(rate)[None] for rate in rates])
                calls.forward.around = WithoutDropout()
            for elsewhere in (False, True) if not numbers else (False,):
                step = calls.train(elsewhere)
                total = reduce.sum(torch.cat([step.loss, step.grad]))
                numbers += [(part, total[1:]) for part in layout.views(total[1:])] + [(total[:1], total[:1])]
                for buffer in step.buffers.values():
                    values = buffer if buffer.is_complex() else buffer.double()  # what ranks can send each other
                    numbers.append((reduce.gather(values[None], 0)[0] if otherwise else values, values))
        output, size = calls.evaluate(source.batch), self._members.inputs.graph.stats().num_nodes
        # A square hides what moves all nodes of a rank a little; slow waves over the nodes of all ranks show it.
        places = (torch.arange(len(output), device=output.device) + reduce.first_row + 0.5) * (pi / size)
        waves = torch.cos(torch.arange(1, 9, device=output.device)[:, None] * places).double()
        moved, whole = (reduce.sum(part) for part in (waves @ output.double(), output.double().abs().sum(0)))
        evaluated = (reduce.sum(squares(output, source.batch, reduce.first_row)), 1 + moved / whole)
        return [*numbers, *zip(evaluated, evaluated, strict=True)]

    # ---- alone and together --------------------------------------------------------------------------

    def _try_members(self) -> None:
        """Try every member alone, and all together if there are several, and compare the numbers.

        All together comes second: what it returns is kept while the members follow, which takes less memory than to
        keep what they return while all run at once.
        """
        numbers, logits = self._try_first()
        members, several = self._members, self._state.members > 1
        if not several:
            return
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what one member leaves lies where the blocks of all would
        outside = GlobalsSnapshot(self._models[0])
        with same_draws(self._device):
            together = self._together()
        outside.restore()  # tensors of all members at once are of no use later
        if members.inputs.agree:  # which noise might let a second comparison deny
            return
        same, seconds = self._is_same(0, numbers, logits, together), []
        del numbers, logits
        for row in range(1, self._state.members):
            calls = self._calls(self._models[row], row)
            same = self._is_same(row, calls.train(), calls.evaluate(), together) and same
            seconds.append(calls.seconds)
        if members.source.reduce.sum(together[0].loss.new_tensor(float(not same))):  # all ranks decide alike
            raise CannotStack(f"{self._task.model_name} gives other results for several at once than for one")
        members.alone = self._calls(self._models[1], 1)
        members.alone_seconds = min(seconds)  # not of the first, whose calls are recorded

    def _try_first(self) -> tuple[StepNumbers, Tensor]:
        """Training numbers and logits of the first member; its module's behaviour is kept in ``members``.

        It is called at its own weights, at others and at its own again; a module that is built anew is called at the
        others at once. If numbers or attributes then differ, calls depend on earlier ones.
        """
        model, members = self._models[0], self._members
        shared = list(WeightMemory(model, dict(model.named_buffers())).shared())
        calls = self._calls(model, 0)
        if not isinstance(calls.forward, LeafForward):
            self._check_used_through_modules(self._calls(model, 0))
        read, names = self._reader(model, calls), _names(model)
        first = read()
        marks = opaque_marks(model, first.opaque)
        calls.forward.reached = set()
        with self._recorded(calls) as recorder:
            numbers = calls.train()
            without, sparse = calls.forward.without_gradient, calls.forward.sparse
            changed = calls.changed_buffers()
            logits = self._evaluated(calls, recorder)
            evaluation_changes = calls.changed_buffers()
            later = calls.train(elsewhere=True)
            again = self._evaluated(calls, recorder)
        for name in sorted(recorder.changed_inputs):
            raise SpecError(
                f"model {self._task.model_name} changes {name} in place, which every call gets again; let it change a "
                f"copy: {name} = {name}.clone()"
            )
        for owner, name in shared:
            if {owner, name} & (changed | evaluation_changes):
                raise SpecError(
                    f"task {self._task.label!r}: buffer {name} of model {self._task.model_name} is in the memory of "
                    f"buffer {owner}, so that a change of one would change the other; let one be made of the other in "
                    "forward, or be a .clone() of it"
                )
        state, outside = read(), self._globals.changed()
        with self._globals.fresh_caches():
            other = self._untouched_calls()
            fresh, evaluated = other.train(elsewhere=True), other.evaluate()
        same = later.is_same(fresh, REPEATED)
        same = same and max(apart(again, logits), apart(evaluated, logits)) <= REPEATED
        differing = state.differences(self._reader(other.forward.model, other)(), REPEATED)
        made = [name for name in _names(model) if name not in names]
        views = [n for n, tree in state.trees.items() if tree != first.trees.get(n) and '"weight"' in json.dumps(tree)]
        findings = Findings(
            None, "", True, without, sparse, recorder.writes, recorder.branches, bool(evaluation_changes)
        )
        now = opaque_marks(model, state.opaque)
        changed_opaque = [name for name in state.opaque if name in now and now[name] != marks.get(name)]
        if made:
            findings.hidden_state = f"it makes {made[0]!r} when it is called, and not in its constructor"
        elif differing or views:
            name = [*differing, *views][0].rpartition(":")[2]
            findings.hidden_state = f"it keeps {name!r} from call to call, which is no buffer"
        elif PYTHON in calls.drawn:
            findings.hidden_state = "it draws from Python's or NumPy's generator"
        elif not same:
            where = changed_opaque[:1] or outside[:1] or state.differences(first)[:1]
            findings.hidden_state = f"it keeps {where[0]!r} from call to call, which is no buffer" if where else OTHERS
        if members.inputs.agree and self._state.members > 1 and findings.hidden_state == OTHERS:
            findings.hidden_state = None
        if findings.hidden_state is not None and members.source.reduce.ranks > 1:
            raise SpecError(
                f"task {self._task.label!r}: model {self._task.model_name}: {findings.hidden_state}, so its first "
                "steps, which ranks compare, say nothing about later ones: train it on one rank"
            )
        if findings.hidden_state is not None:
            self._check_resumes(findings, calls, state, [*made, *changed_opaque, *outside], bool(outside and not same))
            if findings.unsaved:
                now = opaque_marks(members.model, marks)  # which nothing has called, but shares functions with copies
                advanced = findings.unsaved == OUTSIDE or any(now.get(name) != marks[name] for name in marks)
                name = OUTSIDE if findings.unsaved == OUTSIDE else repr(findings.unsaved)
                members.note_once(
                    f"{self._task.model_name} keeps {name} between calls, which is not plain data: it trains alone and "
                    "eagerly, its training cannot be resumed, and a queue neither preempts it nor continues it after a "
                    "crash; return it from get_extra_state and take it back in set_extra_state"
                    + ("" if findings.evaluates else "; a result that is loaded does not predict")
                    + ("; Weft's calls before the first epoch have advanced it" if advanced else "")
                )
        findings.draws = frozenset(calls.drawn)
        if not findings.unsaved:
            findings.unread = frozenset(changed_opaque)
        writes = "it changes its own weights when called" if findings.writes else None
        for obstacle in (findings.hidden_state, writes, "it has sparse gradients" if sparse else None):
            if obstacle is not None and self._state.members > 1:
                raise CannotStack(f"{self._task.model_name} cannot be one of several: {obstacle}")
        members.learn(findings)
        return numbers, logits

    def _check_resumes(
        self, findings: Findings, calls: Calls, state: ModuleState, suspects: Sequence[str], outside: bool
    ) -> None:
        """Find out whether a module that is built anew continues as this one does, once it has its plain data."""
        self._globals.restore()
        if outside and self._members.inputs.group_size > 1:
            raise SpecError(
                f"task {self._task.label!r}: model {self._task.model_name} changes {suspects[-1]} when it is called, "
                "which all models of a run share, and its numbers depend on it: train it in a run of its own, or keep "
                "it in self"
            )
        other = self._untouched_calls()
        try:
            restore_state(other.forward.model, state)
            trains, evaluates = calls.train(elsewhere=True), calls.evaluate()
            self._globals.restore()
            with self._globals.fresh_caches():
                same = trains.is_same(other.train(elsewhere=True), REPEATED)
                findings.evaluates = apart(other.evaluate(), evaluates) <= REPEATED
        except SpecError:
            same = findings.evaluates = False
        if same and findings.evaluates and not outside:
            return
        owners = dict(calls.forward.model.named_modules())
        self._members.globals = self._globals if outside else None
        opaque = [name for name in state.opaque if not is_library(type(owners[name.rpartition(".")[0]]))]
        findings.unsaved = next(iter((*suspects, *opaque)), OUTSIDE)

    def _untouched_calls(self, source: Any = None, batch: Batch | None = None) -> Calls:
        """Calls of a module that nothing has called, with what is outside of it as before."""
        self._globals.restore()
        return self._calls(self._built_again(), 0, source, batch)

    def _reader(self, model: nn.Module, calls: Calls) -> StateReader:
        return StateReader(model, {*calls.forward.layout.names, *calls.state.buffers})

    @contextmanager
    def _recorded(self, calls: Calls) -> Iterator[CallRecorder]:
        model, batch = calls.forward.model, self._example()
        tensors: dict[str, Any] = {"x": batch.x}  # of those that a call gives to the model
        if call_style(model) in ("edges", "data"):
            tensors |= {name: getattr(batch, name) for name in ("edge_index", "edge_weight", "edge_attr")}
        given = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
        calls.forward.around = recorder = CallRecorder(model, given)
        try:
            yield recorder
        finally:
            calls.forward.around = nullcontext()

    def _evaluated(self, calls: Calls, recorder: CallRecorder) -> Tensor:
        recorder.reads_gradient = False  # a hook in the backward pass may
        logits = calls.evaluate()
        if recorder.reads_gradient:
            raise SpecError(
                f"model {self._task.model_name} reads the .grad of its weights in evaluation, where Weft has none: "
                "keep what it needs of them in a buffer, by a hook on the weight"
            )
        return logits

    def _calls(self, model: nn.Module, row: int, source: Any = None, batch: Batch | None = None) -> Calls:
        """Calls of a user's ``model`` alone, with a state of its own: that of member ``row``."""
        source = self._members.source if source is None else source
        set_up(model, source.reduce)
        forward, state = self._members.forward_of(model, True, source.reduce), self._state.select([row])
        forward.attach(state, [rate[None] for rate in self._members.slots[row].rates])
        return Calls(forward, state, batch or self._example(source), self._loss_of([row]))

    def _example(self, source: Any = None) -> Batch:
        """The batch that a source gives to try a model on: one object, so that a change of it shows."""
        source = self._members.source if source is None else source
        if id(source) not in self._examples:
            self._examples[id(source)] = source, source.example()
        return self._examples[id(source)][1]

    def _check_used_through_modules(self, calls: Calls) -> None:
        """A :class:`SpecError` if a module cannot train with weights that are not its own parameters.

        Where weights are cast (bf16) or gradients are sent to other ranks, it has other tensors than its parameters.
        """
        forward, model = calls.forward, calls.forward.model
        only = "only precision='fp32' and 'tf32' on one rank can train that"
        for follower in followers(model, dict(model.named_parameters())):
            raise SpecError(
                f"model {type(model).__name__} keeps {follower.name}, which is in the memory of {follower.owner}; "
                f"{only}"
            )
        leaves = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
        leaf = calls.state.flat.detach().requires_grad_()
        with self._recorded(calls) as recorder:
            try:
                batch = self._example()
                losses = self._loss_of([0])(forward(leaf, training=True, batch=batch), batch)
                with recorder:
                    backward(losses, torch.ones_like(losses), [leaf, *leaves])
            except RuntimeError:  # autograd may object first, in words about views
                if not recorder.writes:
                    raise
        if recorder.writes:
            raise SpecError(f"model {type(model).__name__} changes its own weights when it is called; {only}")
        reached = [parameter.grad is not None for parameter in leaves]
        for parameter in leaves:
            parameter.grad = None
        if any(reached):
            raise SpecError(
                f"model {type(model).__name__} reads a parameter other than as an attribute of its module (from a list "
                f"or a closure); {only}"
            )

    def _together(self) -> tuple[StepNumbers, Any]:
        """Numbers and outputs of all members; :class:`CannotStack` if a module fails for all at once."""
        state, batch, forward = self._state, self._example(), self._members.forward
        before, loss = state.snapshot(), self._loss_of(range(state.members))
        try:
            slopes = torch.ones(state.members, device=state.flat.device)
            losses, grad = forward.gradients(state.flat, batch, loss, slopes)
            buffers = {name: buffer.clone() for name, buffer in state.buffers.items()}
            state.restore(before)
            with torch.no_grad():
                return StepNumbers(losses.detach(), grad, buffers), forward(state.flat, training=False, batch=batch)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CannotStack(f"{self._task.model_name} does not run for several at once: {reason}") from error
        finally:
            state.restore(before)

    def _is_same(self, row: int, alone: StepNumbers, logits: Tensor, together: tuple[StepNumbers, Any]) -> bool:
        """Whether a member of a stack has the loss, gradients, buffers and logits that it has alone."""
        stack, outputs = together
        layout, its = self._members.layout, as_one(of_member(outputs, row))
        gradients = zip(layout.views(stack.grad[row]), layout.views(alone.grad), strict=True)
        worst = [apart(mine, true, alone.grad) for mine, true in gradients]
        worst += [apart(stack.loss[row : row + 1], alone.loss), apart(its.float(), logits.float())]
        worst += [apart(stack.buffers[name][row], buffer) for name, buffer in alone.buffers.items()]
        return max(worst) <= NEAR[self._task.precision]

    # ---- copies --------------------------------------------------------------------------------------

    def _try_copy(self) -> None:
        """Copy a user's module as at the end of training, so that a failing copy is known before training.

        The copy has other weights: one whose results do not follow them still holds the module's own somewhere.
        """
        members, state, task = self._members, self._state, self._task
        members.rebuilds = not isinstance(task.model, nn.Module) and bool(functions_that_hold(members.model))
        flat, buffers = state.flat[0] * 1.5 + 0.01, {name: buffer[0] for name, buffer in state.buffers.items()}
        try:
            model = members.model_of(members.slots[0], flat, buffers, as_written=False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise members.cannot_copy(f"{type(error).__name__}: {error}") from error
        plain = DTYPES[task.precision] == torch.float32 and state.members == 1
        if members.rebuilds or members.findings.hidden_state is not None or not plain:
            return
        batch, attributes, before = self._example(), members.module_state(), state.snapshot()
        with torch.no_grad(), same_draws(self._device):
            state.flat[0] = flat
            expected = members.forward.one(state.flat[0], training=False, batch=batch)
            state.restore(before)
            members.rebuilds = apart(as_one(bind(model)(batch)), as_one(expected)) > NEAR["tf32"]
        if attributes is not None:
            restore_state(members.model, attributes)
        if members.rebuilds and isinstance(task.model, nn.Module):
            raise members.cannot_copy("a function that it keeps holds its parameters")


def _names(model: nn.Module) -> list[str]:
    """Names of submodules and parameters."""
    return [*dict(model.named_modules()), *dict(model.named_parameters())]
