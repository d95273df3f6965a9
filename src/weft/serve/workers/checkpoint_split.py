"""Take one member's state out of a group's checkpoint, so that it goes on alone where the group was.

A member that had ended by itself while others of the group went on is taken out as it ended: a run that is resumed from
that trains nothing and writes its result.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from weft.core.errors import SpecError
from weft.runtime.built_stacks import stack_of_one
from weft.runtime.checkpoint import FILE, Checkpoint, read_checkpoint, write_checkpoint

OVER = ("finished", "stopped", "pruned", "diverged")  # ended by itself, not by a request


def split_off(group: Path, member: str, into: Path) -> bool:
    """Write the checkpoint of ``member`` in the group's folder as one of its own; False if there is nothing to take.

    A folder that has a checkpoint already is left as it is.
    """
    if (into / FILE).exists():
        return False
    for place in sorted(group.glob(f"groups/*/{FILE}")):
        try:
            found = read_checkpoint(place.parent)
        except SpecError:
            continue  # a damaged one: the member begins anew
        if found is not None and (alone := _member(found, member)) is not None:
            into.mkdir(parents=True, exist_ok=True)
            write_checkpoint(into, alone.tensors, alone.about)
            return True
    return False


def drop_damaged(folder: Path) -> list[Path]:
    """Remove the checkpoints in a run's folder that cannot be read, so that their groups begin anew; returns them."""
    dropped = []
    for place in (folder / FILE, *sorted(folder.glob(f"groups/*/{FILE}"))):
        try:
            read_checkpoint(place.parent)
        except SpecError as error:
            print(f"{error}; starting afresh", flush=True)
            place.unlink()
            dropped.append(place)
    return dropped


def _member(saved: Checkpoint, name: str) -> Checkpoint | None:
    names = [task.get("name") for task in saved.about.get("tasks", [])]
    if name not in names:
        return None
    index = names.index(name)
    status = saved.about["members"][index].get("status", "running")
    over = status in OVER
    if not over and (status != "running" or not bool(saved.tensors["present"][index])):
        return None  # it has left the group: what is saved of it is not at the group's epoch
    prefix = f"{index}."
    tensors = {f"0.{key.removeprefix(prefix)}": t for key, t in saved.tensors.items() if key.startswith(prefix)}
    tensors |= {key: t for key, t in saved.tensors.items() if not key.partition(".")[0].isdigit()}
    tensors["present"] = torch.ones(1, dtype=torch.bool)
    about = json.loads(json.dumps(saved.about))
    about["tasks"], about["members"] = [about["tasks"][index]], [about["members"][index]]
    if over:  # the group may be past all of its epochs
        about["epoch"] = about["members"][0]["epoch"]
        tensors |= {"epoch": torch.tensor(about["epoch"]), "step": torch.tensor(0)}
    return Checkpoint(tensors, {**about, **stack_of_one(about, index), "finished": False})
