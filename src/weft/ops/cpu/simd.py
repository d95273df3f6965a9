"""Short vectors for numba kernels, so that a row being summed stays in registers.

Numba keeps such a row in memory, because it cannot prove that it does not overlap the input; every edge then
waits for the store before it (measured on one core, facebook's graph, F = 64: 45 ms as plain loops, 3.6 ms
with vectors, 5.6 ms in MKL).

A vector is an ordinary value inside a kernel: ``v = zeros(x, 16)``, ``v = madd(v, load(x, at, 16), fill(v, w))``.
``array`` arguments are pointers (``kernel.pointer``), positions count elements, ``lanes`` is a constant.
Products and sums may be contracted to a fused multiply-add; nothing else is relaxed, so NaN and infinity pass.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, overload, register_jitable, register_model

CONTRACT = ("contract",)


class Vector(types.Type):
    """Numba's type of a vector of ``lanes`` numbers."""

    def __init__(self, dtype: types.Float, lanes: int) -> None:
        self.dtype = dtype
        self.lanes = lanes
        super().__init__(name=f"Vector({dtype}, {lanes})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, vector) -> None:
        lane = ir.FloatType() if vector.dtype.bitwidth == 32 else ir.DoubleType()
        super().__init__(manager, vector, ir.VectorType(lane, vector.lanes))


def _splat(builder, value, vector_type):
    undefined = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    order = ir.VectorType(ir.IntType(32), vector_type.count)
    return builder.shuffle_vector(first, undefined, ir.Constant(order, [0] * vector_type.count))


@intrinsic(prefer_literal=True)
def zeros(typing, array, lanes):
    """A vector of zeros in the type of ``array``."""
    vector = Vector(array.dtype, lanes.literal_value)

    def generate(context, builder, signature, arguments):
        return ir.Constant(context.get_value_type(vector), [0.0] * vector.lanes)

    return vector(array, lanes), generate


@intrinsic
def zero(typing, array):
    """The number 0 in the type of ``array``."""

    def generate(context, builder, signature, arguments):
        return ir.Constant(context.get_value_type(array.dtype), 0.0)

    return array.dtype(array), generate


@intrinsic
def fill(typing, vector, value):
    """A vector like ``vector`` with ``value`` in every lane."""

    def generate(context, builder, signature, arguments):
        return _splat(builder, arguments[1], context.get_value_type(vector))

    return vector(vector, vector.dtype), generate


@intrinsic(prefer_literal=True)
def load(typing, array, position, lanes):
    """``lanes`` numbers from ``array[position:]``."""
    vector = Vector(array.dtype, lanes.literal_value)

    def generate(context, builder, signature, arguments):
        data = builder.gep(arguments[0], [arguments[1]])
        pointer = builder.bitcast(data, context.get_value_type(vector).as_pointer())
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return vector(array, types.int64, lanes), generate


@intrinsic
def store(typing, array, position, value):
    """All lanes to ``array[position:]``."""

    def generate(context, builder, signature, arguments):
        data = builder.gep(arguments[0], [arguments[1]])
        pointer = builder.bitcast(data, context.get_value_type(value).as_pointer())
        builder.store(arguments[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, value), generate


def _elementwise(instruction: str):
    """An intrinsic ``f(left, right)``: one instruction of LLVM on all lanes."""

    @intrinsic
    def apply(typing, left, right):
        def generate(context, builder, signature, arguments):
            return getattr(builder, instruction)(*arguments)

        return left(left, right), generate

    return apply


add, subtract, mul = map(_elementwise, ("fadd", "fsub", "fmul"))


@intrinsic
def larger(typing, left, right):
    """The larger of the two in every lane; ``left`` where ``right`` is NaN."""

    def generate(context, builder, signature, arguments):
        above = builder.fcmp_ordered(">", arguments[1], arguments[0])
        return builder.select(above, arguments[1], arguments[0])

    return left(left, right), generate


@intrinsic
def madd(typing, total, left, right):
    """``total + left * right``."""

    def generate(context, builder, signature, arguments):
        product = builder.fmul(arguments[1], arguments[2], flags=CONTRACT)
        return builder.fadd(product, arguments[0], flags=CONTRACT)

    return total(total, left, right), generate


@intrinsic
def where_positive(typing, sign, positive, other):
    """``positive`` in the lanes where ``sign`` is above zero, ``other`` elsewhere."""

    def generate(context, builder, signature, arguments):
        zero = ir.Constant(arguments[0].type, [0.0] * sign.lanes)
        above = builder.fcmp_ordered(">", arguments[0], zero)
        return builder.select(above, arguments[1], arguments[2])

    return sign(sign, positive, other), generate


def _add_pairs(builder, total, distance):
    """Add to every lane the one at ``distance``, then at half of it, and so on down to 1."""
    lanes = total.type.count
    while distance:
        swap = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [lane ^ distance for lane in range(lanes)])
        total = builder.fadd(total, builder.shuffle_vector(total, total, swap))
        distance //= 2
    return total


@intrinsic
def lane_sum(typing, value):
    """Sum of all lanes, always in the same pairs."""

    def generate(context, builder, signature, arguments):
        total = _add_pairs(builder, arguments[0], value.lanes // 2)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return value.dtype(value), generate


@intrinsic
def spread_pair(typing, array, position):
    """16 lanes: the number at ``position`` in the first eight, the next one in the others."""
    vector = Vector(array.dtype, 16)

    def generate(context, builder, signature, arguments):
        lane = context.get_value_type(vector).element
        data = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), ir.VectorType(lane, 2).as_pointer())
        pair = builder.load(data, align=array.dtype.bitwidth // 8)
        order = ir.Constant(ir.VectorType(ir.IntType(32), 16), [0] * 8 + [1] * 8)
        return builder.shuffle_vector(pair, pair, order)

    return vector(array, types.int64), generate


@intrinsic
def half_sums(typing, value):
    """The sums of the first and of the last half of the lanes, always in the same pairs."""
    pair = types.UniTuple(value.dtype, 2)

    def generate(context, builder, signature, arguments):
        total = _add_pairs(builder, arguments[0], value.lanes // 4)
        lanes = (ir.Constant(ir.IntType(32), lane) for lane in (0, value.lanes // 2))
        return cgutils.pack_array(builder, [builder.extract_element(total, lane) for lane in lanes])

    return pair(value), generate


@intrinsic
def prefetch(typing, array, position):
    """Request the cache line of ``array[position]``; a hint that never faults."""

    def generate(context, builder, signature, arguments):
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        pointer = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


# ---- exp and expm1 that the compiler can inline and vectorise; the C library's are calls, one element each
#
# float32 uses the classic reduction ``e^x = 2^n e^r`` with ``|r| <= ln(2) / 2`` and a polynomial (relative error
# below 2e-7); float64 calls the C library. Arguments above 88 are cut there: every caller passes a difference to a
# maximum or a negative number. NaN passes, minus infinity gives 0 (or -1).

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.0)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_C6, _C5, _C4 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C2, _C1 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@intrinsic
def _power_of_two(typing, rounded):
    """``2^n`` where ``rounded = n + _ROUND``: the low bits of ``rounded`` moved into the exponent."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(32)
        bits = builder.shl(builder.bitcast(arguments[0], word), ir.Constant(word, 23))
        return builder.bitcast(builder.add(bits, ir.Constant(word, 0x3F800000)), ir.FloatType())

    return types.float32(types.float32), generate


@register_jitable
def _reduce(x):
    """``(2^n, e^r - 1)`` of x, limited to where ``2^n`` is an ordinary number."""
    x = _LOWEST if x < _LOWEST else (_HIGHEST if x > _HIGHEST else x)
    rounded = x * _LOG2_E + _ROUND
    n = rounded - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    poly = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r + _C1
    return _power_of_two(rounded), poly * (r * r) + r


@register_jitable
def _exp32(x):
    power, rest = _reduce(x)
    return _ZERO if x < _LOWEST else power + power * rest


@register_jitable
def _expm1_32(x):
    power, rest = _reduce(x)
    return power * rest + (power - _ONE)


def exp(x):
    """``e^x`` inside a kernel."""
    return math.exp(x)


def expm1(x):
    """``e^x - 1`` inside a kernel, accurate near 0."""
    return math.expm1(x)


@overload(exp)
def _exp(x):
    return (lambda x: _exp32(x)) if x == types.float32 else (lambda x: math.exp(x))


@overload(expm1)
def _expm1(x):
    return (lambda x: _expm1_32(x)) if x == types.float32 else (lambda x: math.expm1(x))
