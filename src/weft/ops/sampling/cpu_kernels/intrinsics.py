"""What numba has no function for: prefetch a cache line, copy bytes, read memory as another type."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


@intrinsic
def prefetch(typing, array, place):
    """Start to load the cache line of ``array[place]``."""

    def generate(context, builder, signature, arguments):
        address = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), ir.IntType(8).as_pointer())
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [address, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def float64s_of(typing, array):
    """The same memory as float64 numbers."""
    result = types.CPointer(types.float64)

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(result))

    return result(array), generate


@intrinsic
def copy_bytes(typing, target, source, count):
    """Copy ``count`` bytes between two addresses."""

    def generate(context, builder, signature, arguments):
        bytes_of = ir.IntType(8).as_pointer()
        to, origin = (builder.inttoptr(argument, bytes_of) for argument in arguments[:2])
        cgutils.raw_memcpy(builder, to, origin, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate
