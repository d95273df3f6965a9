"""The state of a group (weights, moments, best weights, history) in a device's pool, from its high end."""

from __future__ import annotations

from weft.core.units import show_bytes
from weft.engine.memory.device_pool import HIGH, DevicePool
from weft.runtime.group import GroupRun
from weft.runtime.step.stack import Stack

GROUP = "group"


def move_in(group: GroupRun, pool: DevicePool) -> str:
    """Move the state of every stack into ``pool``; what to tell if some of it did not fit, and stays where it is."""
    left = [stack for stack in group.stacks if not _move(stack, pool)]
    if not left:
        return ""
    size = sum(tensor.nbytes for stack in left for tensor in stack.state.tensors().values())
    return f"{show_bytes(size)} of weights and optimizer state do not fit into the worker's pool, and lie beside it"


def _move(stack: Stack, pool: DevicePool) -> bool:
    tensors = stack.state.tensors()
    before = pool.free
    if sum(tensor.nbytes for tensor in tensors.values()) > before:
        return False
    owner = f"{GROUP}/{id(stack)}"
    copied = pool.copy_in(owner, tensors, HIGH)
    if copied is None:
        return False
    stack.move_state(copied)
    return True


def move_out(pool: DevicePool) -> None:
    """Give back what the groups had: nothing of them is used any more."""
    for owner in pool.owners():
        if owner.startswith(f"{GROUP}/"):
            pool.clear(owner)
