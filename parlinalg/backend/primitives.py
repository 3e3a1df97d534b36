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


class _Rows:
    """Rows of matrices as vectors of so many bytes, in the code of an intrinsic; see `compiled.few_rows_product`."""

    def __init__(self, context: Any, builder: Any, number: Any, nbytes: int) -> None:
        self.context, self.builder, self.itemsize = context, builder, 8 if number == ir.DoubleType() else 4
        self.vector = ir.VectorType(number, nbytes // self.itemsize)

    def number(self, value: int) -> Any:
        return ir.Constant(ir.IntType(64), value)

    def numbers(self, rows: int, count: Any) -> list[Any]:
        """Return the numbers of so many rows; those beyond the last one are the last one again."""
        last = self.builder.sub(count, self.number(1))
        return [
            self.builder.select(self.builder.icmp_signed("<", this, count), this, last)
            for this in map(self.number, range(rows))
        ]

    def place(self, array: Any, row: Any, column: Any) -> Any:
        """Return the address of an element; those of a row lie together."""
        line = cgutils.unpack_tuple(self.builder, array.strides, 2)[0]
        line = self.builder.sdiv(line, self.number(self.itemsize))
        return self.builder.gep(array.data, [self.builder.add(self.builder.mul(row, line), column)])

    def load(self, place: Any) -> Any:
        return self.builder.load(self.builder.bitcast(place, self.vector.as_pointer()), align=4)

    def store(self, value: Any, place: Any) -> None:
        self.builder.store(value, self.builder.bitcast(place, self.vector.as_pointer()), align=4)

    def times(self, factor: Any, row: Any) -> Any:
        return self.builder.fmul(_everywhere(self.builder, factor, self.vector), row, **CONTRACT)


def _product_of(rows: int, nbytes: int) -> Any:
    """Return the product of so many rows with columns of so many bytes, whose sums stay in registers."""

    @intrinsic
    def product(
        context: Any, y: Any, first: Any, column: Any, scale: Any, a: Any, top: Any, count: Any, left: Any,
        length: Any, x: Any,
    ) -> Any:  # fmt: skip
        return types.void(y, types.intp, types.intp, y.dtype, a, *[types.intp] * 4, x), code

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, matrix, columns = (make_array(signature.args[i])(context, builder, args[i]) for i in (0, 4, 9))
        _, first, column, scale, _, top, count, left, length, _ = args
        vectors = _Rows(context, builder, context.get_value_type(signature.args[0].dtype), nbytes)
        numbers = vectors.numbers(rows, count)
        lines = [vectors.place(matrix, builder.add(top, r), left) for r in numbers]
        sums = [cgutils.alloca_once_value(builder, ir.Constant(vectors.vector, None)) for _ in lines]
        with cgutils.for_range(builder, length) as each:
            piece = vectors.load(vectors.place(columns, builder.add(left, each.index), vectors.number(0)))
            for line, total in zip(lines, sums, strict=True):
                term = vectors.times(builder.load(builder.gep(line, [each.index])), piece)
                builder.store(builder.fadd(builder.load(total), term, **CONTRACT), total)
        places = [vectors.place(out, builder.add(first, r), column) for r in numbers]
        found = [
            builder.fadd(vectors.load(place), vectors.times(scale, builder.load(total)), **CONTRACT)
            for place, total in zip(places, sums, strict=True)
        ]
        for place, row in zip(places, found, strict=True):
            vectors.store(row, place)
        return context.get_dummy_value()

    return product


def _solution_of(rows: int, nbytes: int, lower: bool) -> Any:
    """Return the substitution by a triangle of so many rows in as many rows of so many bytes, in registers."""

    @intrinsic
    def solution(context: Any, x: Any, a: Any, first: Any, unit: Any) -> Any:
        return types.void(x, a, types.intp, types.boolean), code

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        columns, matrix = (make_array(signature.args[i])(context, builder, args[i]) for i in (0, 1))
        _, _, first, unit = args
        number = context.get_value_type(signature.args[0].dtype)
        vectors, one = _Rows(context, builder, number, nbytes), ir.Constant(number, 1)
        at = [builder.add(first, vectors.number(r)) for r in range(rows)]
        places = [vectors.place(columns, row, vectors.number(0)) for row in at]
        found = [vectors.load(place) for place in places]
        order = list(range(rows)) if lower else list(range(rows))[::-1]
        for step, k in enumerate(order):
            pivot = builder.select(unit, one, builder.load(vectors.place(matrix, at[k], at[k])))
            found[k] = builder.fdiv(found[k], _everywhere(builder, pivot, vectors.vector))
            for i in order[step + 1 :]:
                factor = builder.load(vectors.place(matrix, at[i], at[k]))
                found[i] = builder.fsub(found[i], vectors.times(factor, found[k]), **CONTRACT)
        for row, place in zip(found, places, strict=True):
            vectors.store(row, place)
        return context.get_dummy_value()

    return solution


def _quotients_of(rows: int, nbytes: int) -> Any:
    """Return the substitution from the right, by a triangle, in so many rows of so many bytes, in registers."""

    @intrinsic
    def quotients(context: Any, y: Any, first: Any, column: Any, count: Any, t: Any, top: Any, ones: Any) -> Any:
        return types.void(y, *[types.intp] * 3, t, types.intp, ones), code

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        out, matrix, ones = (make_array(signature.args[i])(context, builder, args[i]) for i in (0, 4, 6))
        _, first, column, count, _, top, _ = args
        vectors = _Rows(context, builder, context.get_value_type(signature.args[0].dtype), nbytes)
        places = [vectors.place(out, builder.add(first, r), column) for r in vectors.numbers(rows, count)]
        found, lanes = [vectors.load(place) for place in places], vectors.vector.count
        for k in range(lanes):
            row = vectors.load(vectors.place(matrix, builder.add(top, vectors.number(k)), vectors.number(0)))
            same = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [k] * lanes)
            for r in range(rows if k + 1 < lanes else 0):
                term = builder.fmul(builder.shuffle_vector(found[r], found[r], same), row, **CONTRACT)
                found[r] = builder.fsub(found[r], term, **CONTRACT)
        one = vectors.load(vectors.place(ones, vectors.number(0), top))
        for row, place in zip(found, places, strict=True):
            vectors.store(builder.fmul(row, one), place)
        return context.get_dummy_value()

    return quotients


_NARROW, _WIDE = (_product_of(rows, nbytes) for rows, nbytes in zip(compiled.FEW_ROWS, (32, 64), strict=True))
_NARROW_LOWER, _NARROW_UPPER, _WIDE_LOWER, _WIDE_UPPER = (
    _solution_of(rows, nbytes, lower)
    for rows, nbytes in zip(compiled.FEW_ROWS, (32, 64), strict=True)
    for lower in (True, False)
)


@overload(compiled.few_rows_product, jit_options=AS_WRITTEN)
def _few_rows_product(y, first, column, scale, a, top, rows, left, length, x):
    def call(y, first, column, scale, a, top, rows, left, length, x):
        if x.shape[1] * x.itemsize == 32:
            _NARROW(y, first, column, scale, a, top, rows, left, length, x)
        else:
            _WIDE(y, first, column, scale, a, top, rows, left, length, x)

    return call


@overload(compiled.few_rows_solution, jit_options=AS_WRITTEN)
def _few_rows_solution(x, a, first, lower, unit):
    def call(x, a, first, lower, unit):
        narrow = x.shape[1] * x.itemsize == 32
        if narrow and lower:
            _NARROW_LOWER(x, a, first, unit)
        elif narrow:
            _NARROW_UPPER(x, a, first, unit)
        elif lower:
            _WIDE_LOWER(x, a, first, unit)
        else:
            _WIDE_UPPER(x, a, first, unit)

    return call


_QUOTIENTS = _quotients_of(compiled.FEW_ROWS[0], 32)


@overload(compiled.few_rows_quotients, jit_options=AS_WRITTEN)
def _few_rows_quotients(y, first, column, rows, t, top, ones):
    def call(y, first, column, rows, t, top, ones):
        _QUOTIENTS(y, first, column, rows, t, top, ones)

    return call
