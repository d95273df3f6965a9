"""Turn an Observer's record into a Program: one Value per storage (kind, lifetime), one Operator per call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.capture.costs import ATEN, WEFT, Work, bytes_in, bytes_out
from weft.capture.observer import ObservedCall, Observer, is_library, is_lt
from weft.core.program import MARKER_KEPT, Operator, Program, Value

KERNELS = "triton."  # launched outside of any operator


def program_of(
    observer: Observer,
    resident: Sequence[int],
    kinds: Mapping[int, str],
    *,
    first: int = 0,
    last: int | None = None,
    tasks: int = 1,
    note: str = "",
    setup: int | None = None,
    carried: Sequence[int] = (),
    left: Sequence[int] = (),
    recordable: bool = True,
) -> Program:
    """The Program of the calls from number ``first`` on, up to ``last``.

    ``resident`` are the storages that were alive before; ``kinds`` gives the kind of kept storages (default
    ``"constant"``). Writes to storages of kind ``"weight"`` separate the update from the evaluation. ``setup``: the
    calls run once, those before that number to set up and the others in a first step; storages of a known kind stay.
    ``carried`` are storages that a step takes over from the previous one, ``left`` those it leaves for the next.
    ``recordable``: whether the step can be captured as a CUDA graph.
    """
    calls = observer.calls[first:last]
    if setup is None:
        phases = phases_of(calls, {number for number, kind in kinds.items() if kind == "weight"})
        born = [number for call in calls for number in call.made]
        # A module that keeps an activation keeps its autograd graph, numbers from the host included.
        born += [number for number in left if number not in set(resident)]
    else:
        phases = ["preparation" if number < setup else "warm-up" for number in range(first, first + len(calls))]
        # Also storages made without a call: numbers copied from the host.
        born = [storage.number for storage in observer.storages if storage.born < first + len(calls)]
    ids = {number: position for position, number in enumerate(dict.fromkeys([*resident, *carried, *born]))}
    step = dict.fromkeys([*carried, *born], "temporary") | born_kinds(calls, phases)
    step |= {number: kinds.get(number, "constant") for number in resident}
    step |= {number: kinds[number] for number in born if number in kinds}
    storages = [observer.storages[number] for number in ids]
    values = tuple(Value(s.bytes, step[s.number], s.shape, s.dtype) for s in storages)
    operators = tuple(_operator(call, phase, ids) for call, phase in zip(calls, phases, strict=True))
    if setup is not None:
        stays = tuple(ids[number] for number in born if number in kinds)
        operators += (Operator(MARKER_KEPT, "warm-up", stays, ()),)
    unknown = {call.name for call in calls if not has_cost(call.name) or not call.inside.seen}
    return Program(
        values=values,
        operators=operators,
        resident=tuple(ids[number] for number in resident),
        unknown=tuple(sorted(unknown)),
        tasks=tasks,
        note=note,
        carried=tuple(ids[number] for number in carried),
        left=tuple(ids[number] for number in left),
        recordable=recordable,
    )


def has_cost(name: str) -> bool:
    """Whether the operator has a cost rule."""
    return name in ATEN or name in WEFT or name.startswith(KERNELS)


def work_of(call: ObservedCall) -> Work:
    """The cost of a call; without a rule, that of reading and writing its tensors once."""
    rule = ATEN.get(call.name) or WEFT.get(call.name)
    if rule is not None:
        return rule(call)
    return Work(stream=bytes_in(call) + bytes_out(call))


def phases_of(calls: Sequence[ObservedCall], weights: set[int]) -> list[str]:
    """The phase of every call: backward while autograd runs, then update until the weights are written.

    Evaluation runs without gradients: a later call that reads weights with gradients enabled begins the next stack's
    forward pass, and so does the first call on another stream, if stacks have separate streams.
    Calls of a merged step carry their phase, except that writing weights is always an update.
    """
    phases, phase, stream = [], "forward", None
    for call in calls:
        elsewhere, stream = call.stream != stream, call.stream
        if call.phase is not None:
            phase = "update" if call.phase != "evaluation" and weights & set(call.writes) else call.phase
            phases.append(phase)
            continue
        if call.in_backward:
            phase = "backward"
        elif phase == "backward":
            phase = "update"
        elif phase == "evaluation" and (elsewhere or (call.grad_enabled and weights & set(call.reads))):
            phase = "forward"
        phases.append(phase)
        if phase == "update" and weights & set(call.writes):
            phase = "evaluation"
    return phases


def born_kinds(calls: Sequence[ObservedCall], phases: Sequence[str]) -> dict[int, str]:
    """The kind of every storage that the step makes: those alive when the backward pass starts are activations."""
    kinds: dict[int, str] = {}
    for call, phase in zip(calls, phases, strict=True):
        for number in call.made:
            kinds[number] = "gradient" if phase == "backward" else "temporary"
        if phase == "backward":
            for number in call.reads:
                if kinds.get(number) == "temporary":
                    kinds[number] = "activation"
    return kinds


def _operator(call: ObservedCall, phase: str, ids: Mapping[int, int]) -> Operator:
    work, inside = work_of(call), call.inside
    return Operator(
        name=call.name,
        phase=phase,
        reads=tuple(ids[n] for n in call.reads if n in ids),
        writes=tuple(ids[n] for n in call.writes if n in ids),
        flops=float(work.flops),
        stream_bytes=float(work.stream),
        gather_bytes=float(work.gather),
        launches=work.launches if inside.launches is None else inside.launches,
        workspace=sum(inside.pieces) or work.workspace,
        frees=tuple(ids[n] for n in call.frees if n in ids),
        library=inside.library or is_library(call.name),
        pieces=inside.pieces or work.pieces,
        stream=call.stream,
        engine=call.in_backward,
        lt=inside.lt or is_lt(call),
    )
