"""PTX instructions that read and write memory, move and convert."""

from __future__ import annotations

import numpy as np

from tests.ptx.block import TYPES, Block, instruction
from tests.ptx.memory import Fault
from tests.ptx.text import Instruction, listed

HALVES = {"b64": (32, np.uint64, np.uint32), "b32": (16, np.uint32, np.uint16)}
ROUNDED = {"rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil, "rni": np.rint}


@instruction("ld")
def load(block: Block, step: Instruction, mask: np.ndarray) -> None:
    dtype, (into, place) = TYPES[step.name[-1]], step.operands
    if step.name[1] == "param":
        block.set(into, block.value(str(block.given[place.strip("[]")]), dtype), mask)
        return
    registers, size = listed(into), np.dtype(dtype).itemsize
    if _is_shared(step):
        at = block.address(place, np.uint32)
        found = [block.shared_get(at + size * part, dtype, mask) for part in range(len(registers))]
    else:
        at = block.address(place, np.uint64)
        block.memory.check(at, size * len(registers), mask)
        found = [block.memory.get(at + size * part, dtype, mask) for part in range(len(registers))]
    for register, value in zip(registers, found, strict=True):
        block.set(register, value, mask)


@instruction("st")
def store(block: Block, step: Instruction, mask: np.ndarray) -> None:
    dtype, (place, given) = TYPES[step.name[-1]], step.operands
    registers, size, shared = listed(given), np.dtype(dtype).itemsize, _is_shared(step)
    at = block.address(place, np.uint32 if shared else np.uint64)
    if not shared:
        block.memory.check(at, size * len(registers), mask)
    for part, register in enumerate(registers):
        write = block.shared_put if shared else block.memory.put
        write(at + size * part, block.value(register, dtype), mask)


def _is_shared(step: Instruction) -> bool:
    return any(part.startswith("shared") for part in step.name)


@instruction("atom")
def atomic_add(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """One thread after another."""
    if "add" not in step.name:
        raise Fault("unknown instruction")
    dtype, (into, place, given) = TYPES[step.name[-1]], step.operands
    at, added, before = block.address(place, np.uint64), block.value(given, dtype), np.zeros(block.threads, dtype)
    block.memory.check(at, before.itemsize, mask)
    for thread in np.flatnonzero(mask):
        only = block.thread == thread
        before[thread] = block.memory.get(at, dtype, only)[thread]
        block.memory.put(at, before + added, only)
    block.set(into, before, mask)


@instruction("cp")
def copy_to_shared(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """``cp.async``, which is complete at once here; the last operand is how many bytes are read, the rest are zeros."""
    if "global" not in step.name:
        return
    into, place, size = (step.operands[0], step.operands[1], int(step.operands[2], 0))
    read = block.value(step.operands[3]) if len(step.operands) > 3 else np.full_like(block.thread, size)
    whole, at = mask & (read == size), block.address(place, np.uint64)
    if (mask & (read != 0) & (read != size)).any():
        raise Fault("a copy of a part")
    block.memory.check(at, size, whole)
    for part in range(0, size, 4):
        value = block.memory.get(at + part, np.uint32, whole)
        block.shared_put(block.address(into, np.uint32) + part, value, mask)


@instruction("bar")
def barrier(block: Block, step: Instruction, mask: np.ndarray) -> None:
    if not mask.all():
        raise Fault("a barrier that some threads do not reach")


@instruction("fence")
def nothing(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """Blocks and threads take turns here: their writes are seen at once."""


@instruction("mov", "cvta")
def move(block: Block, step: Instruction, mask: np.ndarray) -> None:
    into, given = step.operands
    if step.name[-1] == "pred":
        block.set(into, block.truth(given), mask)
    elif into.startswith("{") or given.startswith("{"):
        _halves(block, step, mask)
    else:
        block.set(into, block.value(given, TYPES[step.name[-1]]), mask)


def _halves(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """Take a number apart, or put it together."""
    into, given = step.operands
    bits, whole, half = HALVES[step.name[-1]]
    shifts = [whole(bits * part) for part in range(2)]
    if into.startswith("{"):
        for register, shift in zip(listed(into), shifts, strict=True):
            block.set(register, (block.value(given, whole) >> shift).astype(half), mask)
    else:
        low, high = (block.value(one, half).astype(whole) for one in listed(given))
        block.set(into, low | (high << shifts[1]), mask)


@instruction("cvt")
def convert(block: Block, step: Instruction, mask: np.ndarray) -> None:
    into, given = step.operands
    target, source = step.name[-2:]
    if target == "tf32":
        bits = block.value(given)
        rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
        block.set(into, np.where(np.isfinite(bits.view(np.float32)), rounded, bits), mask)
        return
    value = block.value(given, TYPES[source])
    rounding = [ROUNDED[one] for one in step.name if one in ROUNDED]
    block.set(into, (rounding[0](value) if rounding else value).astype(TYPES[target]), mask)
