"""A block of threads that runs a PTX kernel: all threads at once, those that branched elsewhere masked out.

Registers are arrays over the threads. Threads that diverge run at the smallest place first, so they meet again; a
barrier that only some of them reach is a Fault, and so is shared memory that was never allotted. Shared memory is full
of NaN at first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tests.ptx.memory import Fault, Memory
from tests.ptx.text import Instruction, Program

TYPES: dict[str, Any] = {
    "b16": np.uint16, "u16": np.uint16, "s16": np.int16, "b32": np.uint32, "u32": np.uint32, "s32": np.int32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f32": np.float32, "f64": np.float64,
}  # fmt: skip
Operation = Callable[["Block", Instruction, np.ndarray], None]
OPERATIONS: dict[str, Operation] = {}


def instruction(*names: str) -> Callable[[Operation], Operation]:
    """Register what the instructions that begin with one of ``names`` do."""

    def register(operation: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(names, operation))
        return operation

    return register


def unsigned(dtype: Any) -> np.dtype:
    """The unsigned type of the same size."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


class Block:
    """Block ``number`` of ``blocks``, with ``shared`` bytes of shared memory."""

    def __init__(
        self, program: Program, memory: Memory, given: dict[str, int], number: tuple[int, int, int],
        blocks: tuple[int, int, int], warps: int, shared: int,
    ) -> None:  # fmt: skip
        self.program, self.memory, self.given, self.threads = program, memory, given, 32 * warps
        self.thread = np.arange(self.threads, dtype=np.uint32)
        self.lane, self.warp = (self.thread % 32).astype(int), (self.thread // 32).astype(int)
        self.registers: dict[str, np.ndarray] = {}
        self._special = {"%tid.x": self.thread, "global_smem": np.zeros_like(self.thread)}
        for axis, one, many in zip("xyz", number, blocks, strict=True):
            self._special[f"%ctaid.{axis}"] = np.full_like(self.thread, one)
            self._special[f"%nctaid.{axis}"] = np.full_like(self.thread, many)
        self.shared = np.full(shared, 0xFF, np.uint8)
        self._place = np.zeros(self.threads, np.int64)  # of every thread in the code

    # ---- operands ------------------------------------------------------------------------------------

    def value(self, text: str, dtype: Any = np.uint32) -> np.ndarray:
        """A register or a constant, as numbers of one type."""
        if text in self.registers:
            found = self.registers[text]
        elif text in self._special:
            found = self._special[text]
        elif text.startswith(("0f", "0d")):
            found = np.full(self.threads, int(text[2:], 16), np.uint32 if text.startswith("0f") else np.uint64)
        elif re.match(r"-?(0x[0-9a-fA-F]+|\d+)U?$", text):
            size = 8 * np.dtype(dtype).itemsize
            found = np.full(self.threads, int(text.rstrip("U"), 0) & ((1 << size) - 1), unsigned(dtype))
        else:
            raise Fault(f"{text} has no value")
        return found.astype(unsigned(dtype), copy=False).view(dtype)

    def truth(self, text: str) -> np.ndarray:
        """A predicate."""
        if text.startswith("!"):
            return ~self.registers[text[1:]]
        return self.registers[text] if text in self.registers else np.full(self.threads, text != "0")

    def set(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        """Give a register a value in the threads of ``mask``."""
        value = value if value.dtype == bool else np.ascontiguousarray(value).view(unsigned(value.dtype))
        old = self.registers.get(name)
        if old is not None and not mask.all():
            value = np.where(mask, value, old.astype(value.dtype))
        self.registers[name] = value

    def address(self, text: str, dtype: Any) -> np.ndarray:
        """``[register + constant]``, int64."""
        base, _, offset = text.strip("[] ").partition("+")
        return self.value(base.strip(), dtype).astype(np.int64) + int(offset.strip() or "0", 0)

    # ---- shared memory -------------------------------------------------------------------------------

    def shared_get(self, address: np.ndarray, dtype: Any, mask: np.ndarray) -> np.ndarray:
        """Values in shared memory, at an address per thread."""
        out = np.zeros(self.threads, dtype)
        out[mask] = self.shared[self._shared_at(address, out.itemsize, mask)].copy().view(dtype)[:, 0]
        return out

    def shared_put(self, address: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        """Write to shared memory, at an address per thread."""
        chosen = np.ascontiguousarray(value[mask])
        at = self._shared_at(address, chosen.itemsize, mask)
        self.shared[at] = chosen.view(np.uint8).reshape(-1, chosen.itemsize)

    def _shared_at(self, address: np.ndarray, size: int, mask: np.ndarray) -> np.ndarray:
        chosen = address[mask]
        if chosen.size and (chosen.min() < 0 or chosen.max() + size > self.shared.size or (chosen % size).any()):
            raise Fault(f"shared memory at {chosen.min()} to {chosen.max()} of {self.shared.size}")
        return chosen[:, None] + np.arange(size)

    # ---- running -------------------------------------------------------------------------------------

    def run(self) -> Iterator[None]:
        """Run to the end; yields after every read of memory that other blocks change."""
        code = self.program.code
        while (place := int(self._place.min())) < len(code):
            active, step = self._place == place, code[place]
            mask = active if step.guard is None else active & self.truth(step.guard)
            self._place[active] = place + 1
            if step.name[0] == "bra":
                self._place[mask] = self.program.labels[step.operands[0]]
            elif step.name[0] == "ret":
                self._place[mask] = len(code)
            else:
                self._do(step, mask)
            if "acquire" in step.name:
                yield

    def _do(self, step: Instruction, mask: np.ndarray) -> None:
        try:
            if step.name[0] not in OPERATIONS:
                raise Fault("unknown instruction")
            OPERATIONS[step.name[0]](self, step, mask)
        except Fault as fault:
            raise Fault(f"{fault}\n  {step.text}\n  {step.source}") from None
