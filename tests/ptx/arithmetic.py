"""PTX instructions that compute: integers wrap, products and quotients of floats are rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.block import TYPES, Block, instruction
from tests.ptx.memory import Fault
from tests.ptx.text import Instruction

WIDE = {np.uint16: np.uint32, np.int16: np.int32, np.uint32: np.uint64, np.int32: np.int64}
PAIRS: dict[str, Any] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b, "min": np.fmin, "max": np.fmax,
}  # fmt: skip
SINGLE: dict[str, Any] = {
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a), "rcp": lambda a: 1 / a,
    "tanh": np.tanh,
}  # fmt: skip
COMPARED: dict[str, Any] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


@instruction(*PAIRS)
def pair(block: Block, step: Instruction, mask: np.ndarray) -> None:
    into, *given = step.operands
    if step.name[1] == "pred":
        block.set(into, PAIRS[step.name[0]](*map(block.truth, given)), mask)
        return
    dtype = TYPES[step.name[-1]]
    block.set(into, PAIRS[step.name[0]](*(block.value(one, dtype) for one in given)), mask)


@instruction("mul", "mad")
def multiply(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """Low half or all of a product; with a third operand their sum."""
    into, *given = step.operands
    dtype = TYPES[step.name[-1]]
    if step.name[1] == "hi":
        one, other = (block.value(part, dtype).astype(WIDE[dtype]) for part in given[:2])
        product = ((one * other) >> WIDE[dtype](8 * np.dtype(dtype).itemsize)).astype(dtype)
    else:
        result = WIDE[dtype] if step.name[1] == "wide" else dtype
        one, other = (block.value(part, dtype).astype(result) for part in given[:2])
        product = one * other
    block.set(into, product + block.value(given[2], product.dtype) if len(given) > 2 else product, mask)


@instruction("fma")
def multiply_add(block: Block, step: Instruction, mask: np.ndarray) -> None:
    into, *given = step.operands
    one, other, added = (block.value(part, np.float32).astype(np.float64) for part in given)
    block.set(into, (one * other + added).astype(np.float32), mask)


@instruction("div", "rem")
def divide(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """Integers towards zero."""
    into, *given = step.operands
    dtype = TYPES[step.name[-1]]
    one, other = (block.value(part, dtype) for part in given)
    if np.issubdtype(dtype, np.floating):
        block.set(into, (one.astype(np.float64) / other).astype(dtype), mask)
        return
    if not other[mask].all():
        raise Fault("a division by zero")
    other = np.where(other == 0, 1, other).astype(dtype)
    rest = np.fmod(one, other)
    block.set(into, rest if step.name[0] == "rem" else (one - rest) // other, mask)


@instruction(*SINGLE)
def single(block: Block, step: Instruction, mask: np.ndarray) -> None:
    value = block.value(step.operands[1], np.float32).astype(np.float64)
    block.set(step.operands[0], SINGLE[step.name[0]](value).astype(np.float32), mask)


@instruction("neg", "abs")
def signs(block: Block, step: Instruction, mask: np.ndarray) -> None:
    value = block.value(step.operands[1], TYPES[step.name[-1]])
    block.set(step.operands[0], -value if step.name[0] == "neg" else np.abs(value), mask)


@instruction("not")
def invert(block: Block, step: Instruction, mask: np.ndarray) -> None:
    into, given = step.operands
    block.set(into, ~(block.truth(given) if step.name[-1] == "pred" else block.value(given)), mask)


@instruction("shl", "shr")
def shift(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """By more than all bits: zero, or the sign."""
    into, given, by = step.operands
    dtype = TYPES[step.name[-1]]
    value, steps, bits = block.value(given, dtype), block.value(by), 8 * np.dtype(dtype).itemsize
    within = np.minimum(steps, bits - 1).astype(dtype)
    moved = value << within if step.name[0] == "shl" else value >> within
    signed = step.name[0] == "shr" and np.issubdtype(dtype, np.signedinteger)
    block.set(into, moved if signed else np.where(steps >= bits, 0, moved).astype(dtype), mask)


@instruction("shf")
def funnel(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """Shift two numbers as one."""
    into, low, high, by = step.operands
    both = block.value(low).astype(np.uint64) | (block.value(high).astype(np.uint64) << np.uint64(32))
    steps = (block.value(by) & np.uint32(31)).astype(np.uint64)
    moved = (both << steps) >> np.uint64(32) if step.name[1] == "l" else both >> steps
    block.set(into, moved.astype(np.uint32), mask)


@instruction("bfe")
def bit_field(block: Block, step: Instruction, mask: np.ndarray) -> None:
    into, given, first, count = step.operands
    bits = (block.value(given).astype(np.int64) >> int(first)) & ((1 << int(count)) - 1)
    if step.name[1] == "s32":
        bits -= (bits >> (int(count) - 1)) << int(count)
    block.set(into, bits.astype(np.int32), mask)


@instruction("prmt")
def permute(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """Four bytes out of eight; each is named by four bits, of which the upper one repeats its sign."""
    into, *given = step.operands
    low, high, which = (block.value(part).astype(np.int64) for part in given)
    both, found = low | (high << 32), np.zeros(block.threads, np.int64)
    for place in range(4):
        name = which >> (4 * place) & 15
        byte = both >> (8 * (name & 7)) & 255
        found |= np.where(name & 8, np.where(byte & 128, 255, 0), byte) << (8 * place)
    block.set(into, found.astype(np.uint32), mask)


@instruction("setp")
def compare(block: Block, step: Instruction, mask: np.ndarray) -> None:
    into, *given = step.operands
    dtype, how = TYPES[step.name[-1]], step.name[1]
    one, other = (block.value(part, dtype) for part in given[:2])
    unordered = np.isnan(one) | np.isnan(other) if np.issubdtype(dtype, np.floating) else np.zeros(block.threads, bool)
    if how in ("num", "nan"):
        found = ~unordered if how == "num" else unordered
    else:
        found = COMPARED[how[:2]](one, other)
        found = found | unordered if how.endswith("u") else found & ~unordered
    if len(given) > 2:
        found = PAIRS[step.name[2]](found, block.truth(given[2]))
    block.set(into, found, mask)


@instruction("selp")
def select(block: Block, step: Instruction, mask: np.ndarray) -> None:
    into, one, other, which = step.operands
    dtype = TYPES[step.name[-1]]
    block.set(into, np.where(block.truth(which), block.value(one, dtype), block.value(other, dtype)), mask)
