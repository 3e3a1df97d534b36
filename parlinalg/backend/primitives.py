"""Building blocks of compiled loops: bits of floats, exponentials that vectorize, products of 128 bits and of few rows.

Only `parlinalg.backend.compiled` imports this module, where numba is installed, and attention's loops.  Exponentials
are those of Cephes (Moshier, 1989), which vectorize as the C library's do not: within 2 units in the last place, 0 in
place of numbers too small to be normal, inf a little early.

numba does not see a change of this file in the loops that it keeps on disk: delete the kernels' `__pycache__` then.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array

from parlinalg.backend import compiled
from parlinalg.backend.compiled import AS_WRITTEN


@intrinsic
def bits(context: Any, number: Any) -> Any:
    """Return the bits of a float as an integer."""
    width = number.bitwidth
    return types.Integer.from_bitwidth(width, True)(number), lambda c, b, s, a: b.bitcast(a[0], ir.IntType(width))


@intrinsic
def float32(context: Any, bits: Any) -> Any:
    """Return the float that has these bits."""
    return types.float32(types.int32), lambda c, b, s, a: b.bitcast(a[0], ir.FloatType())


@intrinsic
def float64(context: Any, bits: Any) -> Any:
    """Return the float that has these bits."""
    return types.float64(types.int64), lambda c, b, s, a: b.bitcast(a[0], ir.DoubleType())


# exp(x) = 2ⁿ exp(r), n the integer nearest x / log 2: adding 1.5 2²³ (1.5 2⁵²) rounds, and leaves n in the lowest bits
_LOG2E, _HIGH, _LOW = 1.4426950408889634, 0.693359375, -2.1219444005469057e-4
_HIGH_64, _LOW_64 = 6.93145751953125e-1, 1.42860682030941723212e-6
_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


@njit(**AS_WRITTEN)
def _exp_32(x):
    f = types.float32
    z = x * f(_LOG2E) + f(12582912.0)
    n = z - f(12582912.0)
    r = x - n * f(_HIGH)
    r = r - n * f(_LOW)
    p = f(_TERMS[0])
    p = p * r + f(_TERMS[1])
    p = p * r + f(_TERMS[2])
    p = p * r + f(_TERMS[3])
    p = p * r + f(_TERMS[4])
    p = p * r + f(_TERMS[5])
    p = p * (r * r) + r + f(1)
    y = p * float32((bits(z) + types.int32(127)) << types.int32(23))
    y = f(0) if x < f(-87.3) else y
    return f(math.inf) if x > f(88.37) else y


@njit(**AS_WRITTEN)
def _exp_64(x):
    z = x * _LOG2E + 6755399441055744.0
    n = z - 6755399441055744.0
    r = x - n * _HIGH_64
    r = r - n * _LOW_64
    p = 1.6059043836821613e-10  # Taylor's, 1/13! to 1/2!: the rest is below 5e-18
    p = p * r + 2.08767569878681e-09
    p = p * r + 2.505210838544172e-08
    p = p * r + 2.755731922398589e-07
    p = p * r + 2.7557319223985893e-06
    p = p * r + 2.48015873015873e-05
    p = p * r + 0.0001984126984126984
    p = p * r + 0.001388888888888889
    p = p * r + 0.008333333333333333
    p = p * r + 0.041666666666666664
    p = p * r + 0.16666666666666666
    p = p * r + 0.5
    p = p * (r * r) + r + 1.0
    y = p * float64((bits(z) + 1023) << 52)
    y = 0.0 if x < -708.0 else y
    return math.inf if x > 709.4 else y


@overload(compiled.exp, jit_options=AS_WRITTEN)
def _exp_of(x):
    exp = _exp_64 if x == types.float64 else _exp_32

    def call(x):
        return exp(x)

    return call


@intrinsic
def _high_product(context: Any, a: Any, b: Any) -> Any:
    wide = ir.IntType(128)

    def code(c: Any, builder: Any, signature: Any, args: Any) -> Any:
        product = builder.mul(*(builder.zext(value, wide) for value in args))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), code


@overload(compiled.high_product, jit_options=AS_WRITTEN)
def _high_product_of(a, b):
    def call(a, b):
        return _high_product(a, b)

    return call


CONTRACT = {"flags": ("contract",)}
"""Products may be multiplied and added at once."""


def _everywhere(builder: Any, value: Any, vector: Any) -> Any:
    """Return a vector that is one value everywhere."""
    alone = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(alone, alone, ir.Constant(ir.VectorType(ir.IntType(32), vector.count), None))


def _product_of(rows: int, nbytes: int) -> Any:
    """Return the product of so many rows with columns of so many bytes, whose sums stay in registers."""

    @intrinsic
    def product(context: Any, found: Any, a: Any, top: Any, count: Any, left: Any, length: Any, x: Any) -> Any:
        return types.void(found, a, *[types.intp] * 4, x), code

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, matrix, columns = (make_array(signature.args[i])(context, builder, args[i]) for i in (0, 1, 6))
        _, _, top, count, left, length, _ = args
        number, whole = context.get_value_type(signature.args[0].dtype), ir.IntType(64)
        itemsize = 8 if number == ir.DoubleType() else 4
        lanes = nbytes // itemsize
        vector, none = ir.VectorType(number, lanes), ir.Constant(whole, 0)

        def place(array: Any, row: Any, column: Any) -> Any:
            line = builder.sdiv(cgutils.unpack_tuple(builder, array.strides, 2)[0], ir.Constant(whole, itemsize))
            return builder.gep(array.data, [builder.add(builder.mul(row, line), column)])

        lines = []
        for r in range(rows):  # those beyond the last one are the last one again
            this = ir.Constant(whole, r)
            this = builder.select(
                builder.icmp_signed("<", this, count), this, builder.sub(count, ir.Constant(whole, 1))
            )
            lines.append(place(matrix, builder.add(top, this), left))
        sums = [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in lines]
        with cgutils.for_range(builder, length) as each:
            piece = place(columns, builder.add(left, each.index), none)
            piece = builder.load(builder.bitcast(piece, vector.as_pointer()), align=4)
            for line, total in zip(lines, sums, strict=True):
                factor = _everywhere(builder, builder.load(builder.gep(line, [each.index])), vector)
                term = builder.fmul(factor, piece, **CONTRACT)
                builder.store(builder.fadd(builder.load(total), term, **CONTRACT), total)
        for r, total in enumerate(sums):
            row = builder.bitcast(place(out, ir.Constant(whole, r), none), vector.as_pointer())
            builder.store(builder.load(total), row, align=4)
        return context.get_dummy_value()

    return product


_NARROW, _WIDE = (_product_of(rows, nbytes) for rows, nbytes in zip(compiled.FEW_ROWS, (32, 64), strict=True))


@overload(compiled.few_rows_product, jit_options=AS_WRITTEN)
def _few_rows_product(found, a, top, rows, left, length, x):
    def call(found, a, top, rows, left, length, x):
        if x.shape[1] * x.itemsize == 32:
            _NARROW(found, a, top, rows, left, length, x)
        else:
            _WIDE(found, a, top, rows, left, length, x)

    return call
