"""The state of a group: what a checkpoint holds, members that stop or are dropped, and their best weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.errors import SpecError
from weft.core.task import Task
from weft.graph.data.sparse_features import SparseFeatures
from weft.runtime.device.torch_rng import OwnGenerator, generator_states, restore_generators
from weft.runtime.group_members import Member, MemberUpdate, poll_members
from weft.runtime.step.members.copies import model_of
from weft.runtime.step.stack import Stack
from weft.runtime.user_modules.python_state import as_kept, as_tensors, from_tensors

BEST = "best."  # before names in a checkpoint: of what a module kept with its best weights


class GroupState:
    """Members in stacks after ``epoch`` epochs and ``step_in_epoch`` steps of the next one."""

    def __init__(
        self,
        tasks: Sequence[Task],
        device: torch.device,
        stacks: list[Stack],
        members: list[Member],
        own_random: Mapping[int, OwnGenerator],
    ) -> None:
        self.tasks, self.device, self.stacks, self.members = tuple(tasks), device, stacks, members
        self._own_random = own_random
        self.epoch = 0
        self.step_in_epoch = 0  # steps done of the current epoch

    @property
    def present(self) -> list[Member]:
        """The members that have not been dropped."""
        return [member for member in self.members if member.row is not None]

    def poll(self, first: int = 0) -> list[MemberUpdate]:
        """What the device has recorded of every member from epoch ``first`` (counted from 0) on."""
        return poll_members(self.members, self.stacks, first, self.epoch)

    # ---- dropping ------------------------------------------------------------------------------------

    def stop(self, members: Iterable[int]) -> None:
        """End the training of members (places among the tasks): later epochs do not count for them."""
        for index in members:
            member = self.members[index]
            if member.row is not None:
                member.stack.state.end[member.row].clamp_(max=self.epoch)

    def scale_rates(self, factors: Mapping[int, float]) -> None:
        """Multiply the rates of members (places among the tasks) in all later steps."""
        for index, factor in factors.items():
            member = self.members[index]
            if member.row is not None:
                member.stack.scale_rate(member.row, factor)

    def drop(self, members: Iterable[int]) -> list[Stack]:
        """Remove members (places among the tasks) from training: their state moves to the host, the others close up.

        Returns the stacks that changed.
        """
        leaving = {index for index in members if self.members[index].row is not None}
        changed = []
        for stack in list(self.stacks):
            here = [member for member in self.present if member.stack is stack]
            staying = sorted((m for m in here if m.index not in leaving), key=lambda m: m.row)
            if len(staying) == len(here):
                continue
            for member in here:
                if member.index in leaving:
                    member.left, member.row = stack.state.row(member.row), None
            self._repack(stack, staying)
            changed.append(stack)
        return changed

    def _repack(self, stack: Stack, staying: list[Member]) -> None:
        if not staying:
            self.stacks.remove(stack)
            return
        stack.select([member.row for member in staying])
        for row, member in enumerate(staying):
            member.row = row

    # ---- saving --------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """The contents of a checkpoint: every member's state, which were dropped, and the states of generators."""
        saved: dict[str, Tensor] = {
            "present": torch.tensor([member.row is not None for member in self.members]),
            "epoch": torch.tensor(self.epoch),
            "step": torch.tensor(self.step_in_epoch),
        }
        for member in self.members:
            saved |= {f"{member.index}.{name}": member.saved(name) for name in member.stack.state.tensors()}
            own = self._own_random.get(id(member.stack))
            with nullcontext() if own is None else own:
                kept = member.stack.members.python_state() | member.stack.loop_state()
            saved |= {} if own is None else {f"{member.index}.random": own.state}
            kept |= {BEST + name: value for name, value in as_tensors(member.stack.best_kept).items()}
            saved |= {f"{member.index}.{name}": value for name, value in kept.items()}
        return saved | generator_states(self.device)

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Continue from the ``tensors()`` of a group of equal tasks, dropped members included."""
        saved = _with_epochs(saved)
        present = saved.get("present", torch.zeros(0))
        if present.numel() != len(self.members):
            raise SpecError(
                f"the checkpoint holds {present.numel()} tasks, but this group has {len(self.members)}; "
                "it was written for other tasks"
            )
        for member in self.members:
            _check_shapes(member, saved)
        self.drop(index for index, there in enumerate(present.tolist()) if not there)
        for member in self.members:
            self._restore_member(member, saved)
        restore_generators(saved, self.device)
        self.epoch = int(saved["epoch"])
        self.step_in_epoch = int(saved.get("step", torch.zeros(())))

    def _restore_member(self, member: Member, saved: Mapping[str, Tensor]) -> None:
        names = member.stack.state.tensors()
        own = {name: member.from_saved(name, saved[f"{member.index}.{name}"]) for name in names}
        if member.row is None:
            member.left = {name: tensor.clone() for name, tensor in own.items()}
            return
        for name, tensor in member.stack.state.tensors().items():
            tensor[member.row].copy_(own[name])
        kept, random = _of_member(saved, member.index), self._own_random.get(id(member.stack))
        with nullcontext() if random is None else random:
            member.stack.members.restore_python_state(kept)
        member.stack.restore_loop_state(kept)
        member.stack.best_kept = from_tensors({n.removeprefix(BEST): kept[n] for n in kept if n.startswith(BEST)})
        if random is not None and f"{member.index}.random" in saved:
            random.state = saved[f"{member.index}.random"].clone()

    def best_model(self, index: int) -> nn.Module:
        """The model of a member with its best weights, at its true size, in evaluation mode."""
        member = self.members[index]
        flat, buffers = member.best()
        model = model_of(member.stack.members, member.slot, flat, buffers, member.stack.state)
        member.stack.members.put_kept(model, member.stack.best_kept)
        return model

    def best_kept(self, index: int) -> dict[str, Tensor]:
        """What a member's module kept when its best weights were evaluated, and its ``state_dict`` does not have."""
        member = self.members[index]
        names = member.stack.members.left_out_buffers()
        best = {name: as_kept(value) for name, value in member.best()[1].items() if name in names}
        return as_tensors(member.stack.best_kept | best)

    def made_dense(self, index: int) -> bool:
        """Whether the graph's sparse features are dense in what a member's model is given."""
        stack = self.members[index].stack
        if not isinstance(stack.graph.x, SparseFeatures) or self.tasks[index].traits is not None:
            return False
        return not isinstance(stack.source.example().x, SparseFeatures)

    def best_tensors(self, index: int) -> dict[str, Tensor]:
        """The best weights and buffers of a member by the names that its model's ``state_dict`` uses."""
        member = self.members[index]
        return member.stack.members.named(member.slot, *member.best())

    # ---- describing ----------------------------------------------------------------------------------

    def num_parameters(self, index: int) -> int:
        """Parameters of a member's model at its true size."""
        member = self.members[index]
        return member.stack.members.layout.total if member.slot.padding is None else member.slot.padding.parameters

    def describe(self, index: int) -> dict[str, Any]:
        """What a member trains, for the journal."""
        stack = self.members[index].stack
        return {
            "parameters": self.num_parameters(index),
            "metric": stack.metric,
            "objective": stack.objective.name,
            "precision": self.tasks[index].precision,
        }


def _of_member(saved: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """The part of a checkpoint that is one member's, by names without its place."""
    start = f"{index}."
    return {name.removeprefix(start): tensor for name, tensor in saved.items() if name.startswith(start)}


def _with_epochs(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint from before steps and epochs were two numbers: there every step was an epoch."""
    clocks = {name.removesuffix(".clock"): clock for name, clock in saved.items() if name.endswith(".clock")}
    found = {f"{member}.epoch": clock[1].clone() for member, clock in clocks.items()}
    found |= {f"{member}.epoch_loss": torch.zeros(()) for member in clocks}
    return found | dict(saved)


def _check_shapes(member: Member, saved: Mapping[str, Tensor]) -> None:
    for name, tensor in member.stack.state.tensors().items():
        key, shape = f"{member.index}.{name}", tensor.shape[1:]
        if key not in saved or saved[key].shape not in member.saved_shapes(name):
            found = list(saved[key].shape) if key in saved else "nothing"
            raise SpecError(
                f"task {member.task.label!r}: the checkpoint holds {found} for {name!r}, but this model "
                f"needs {list(shape)}; it was written for another model or graph"
            )
