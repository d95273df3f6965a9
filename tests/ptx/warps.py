"""PTX instructions that a warp, or four warps, run together: shuffles, matrices in shared memory, products.

Lane ``4 g + t`` of a warp holds, of a matrix of 8 rows of 16 bytes, the four bytes ``t`` of row ``g``. Which elements
of a product a lane holds is in the PTX ISA, "Matrix Fragments for mma.m16n8k8" and "... for wgmma.mma_async.m64nNk8".
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.ptx.block import TYPES, Block, instruction
from tests.ptx.memory import Fault
from tests.ptx.text import Instruction, listed

ROW_BYTES = {1: 128, 2: 64, 3: 32}  # of a swizzled tile, by the two upper bits of its descriptor


@instruction("shfl")
def shuffle(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """Whole warps: the clamp of all uses here is 31."""
    into, given, by, clamp = step.operands[:4]
    if int(clamp, 0) != 31 or step.name[2] not in ("bfly", "idx"):
        raise Fault("unknown instruction")
    steps = block.value(by).astype(int)
    source = block.lane ^ steps if step.name[2] == "bfly" else steps & 31
    block.set(into.split("|")[0], block.value(given)[32 * block.warp + source], mask)


@instruction("redux")
def reduce(block: Block, step: Instruction, mask: np.ndarray) -> None:
    values = block.value(step.operands[1], TYPES[step.name[-1]]).reshape(-1, 32)
    whole = getattr(values, {"add": "sum"}.get(step.name[2], step.name[2]))(1)
    block.set(step.operands[0], np.repeat(whole, 32).astype(values.dtype), mask)


@instruction("ldmatrix")
def load_matrices(block: Block, step: Instruction, mask: np.ndarray) -> None:
    for number, register in enumerate(listed(step.operands[0])):
        at = _in_matrix(block, step, step.operands[1], number)
        block.set(register, block.shared_get(at, np.uint32, mask), mask)


@instruction("stmatrix")
def store_matrices(block: Block, step: Instruction, mask: np.ndarray) -> None:
    for number, register in enumerate(listed(step.operands[1])):
        block.shared_put(_in_matrix(block, step, step.operands[0], number), block.value(register), mask)


def _in_matrix(block: Block, step: Instruction, place: str, number: int) -> np.ndarray:
    """Where each lane's four bytes of a matrix are; lanes ``8 number`` to ``8 number + 7`` say where its rows begin."""
    if "trans" in step.name:
        raise Fault("unknown instruction")
    rows = block.address(place, np.uint32).reshape(-1, 32)[:, 8 * number : 8 * number + 8]
    return rows[block.warp, block.lane // 4] + 4 * (block.lane % 4)


@instruction("mma")
def warp_product(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """``d [16, 8] = a [16, 8] b [8, 8] + c [16, 8]`` in every warp."""
    if "m16n8k8" not in step.name or "tf32" not in step.name:
        raise Fault("unknown instruction")
    into, a, b, c = map(listed, step.operands)
    g, t, warp = block.lane // 4, block.lane % 4, block.warp
    left, right, total = (np.zeros((block.threads // 32, rows, 8)) for rows in (16, 8, 16))
    for place, register in enumerate(a):
        left[warp, g + 8 * (place % 2), t + 4 * (place // 2)] = _tf32(block.value(register))
    for place, register in enumerate(b):
        right[warp, t + 4 * place, g] = _tf32(block.value(register))
    for place, register in enumerate(c):
        total[warp, g + 8 * (place // 2), 2 * t + place % 2] = block.value(register, np.float32)
    total += left @ right
    for place, register in enumerate(into):
        block.set(register, total[warp, g + 8 * (place // 2), 2 * t + place % 2].astype(np.float32), mask)


@instruction("wgmma")
def group_product(block: Block, step: Instruction, mask: np.ndarray) -> None:
    """``d [64, N] = a [64, 8] b [N, 8]^T + d`` in every four warps; ``b``, or both, lie in shared memory."""
    if step.name[1] != "mma_async":
        return
    found = re.match(r"m64n(\d+)k8$", step.name[4])
    if not found or step.name[-1] != "tf32":
        raise Fault("unknown instruction")
    into, a, b, adds = step.operands[:4]
    g, t, group, first = block.lane // 4, block.lane % 4, block.warp // 4, 16 * (block.warp % 4)
    if a.startswith("{"):
        left: Any = np.zeros((block.threads // 128, 64, 8))
        for place, register in enumerate(listed(a)):
            left[group, first + g + 8 * (place % 2), t + 4 * (place // 2)] = _tf32(block.value(register))
    else:
        left = _tile(block, a, 64)
    product = left @ _tile(block, b, int(found[1])).transpose(0, 2, 1)
    for place, register in enumerate(listed(into)):
        column = 8 * (place // 4) + 2 * t + place % 2
        own = product[group, first + g + 8 * (place // 2 % 2), column]
        if block.truth(adds).all():  # uniform
            own = own + block.value(register, np.float32)
        block.set(register, own.astype(np.float32), mask)


def _tile(block: Block, descriptor: str, rows: int) -> np.ndarray:
    """``[groups, rows, 8]``: what the descriptors of four warps each point to, rows of tf32, swizzled."""
    found = []
    for one in map(int, block.value(descriptor, np.uint64).reshape(-1, 128)[:, 0]):
        if one >> 62 not in ROW_BYTES:
            raise Fault("a tile that is not swizzled")
        width = ROW_BYTES[one >> 62]
        begin, stride = ((one >> shift & 0x3FFF) << 4 for shift in (0, 32))
        row = np.arange(rows)[:, None]
        at = begin + row // 8 * stride + row % 8 * width + 4 * np.arange(8)
        at ^= (at >> 7 & (width // 16 - 1)) << 4
        if at.max() + 4 > block.shared.size:
            raise Fault("a tile outside of shared memory")
        found.append(_tf32(block.shared[at[..., None] + np.arange(4)].view(np.uint32)[..., 0]))
    return np.stack(found)


def _tf32(bits: np.ndarray) -> np.ndarray:
    return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
