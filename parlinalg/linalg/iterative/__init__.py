"""Iterative methods for systems, least squares, eigenvalues and singular values.

They use a matrix by its products alone: it is a DistArray or a function of vectors.  All decisions are made on sums
over the ranks, alike everywhere, and scalars that one step needs are summed by one all-reduce.  Vectors lie like the
right-hand side.

Many systems, stacks of matrices or several right-hand sides, take their steps together: each has scalars of its own,
and those of all systems are summed by the same all-reduce.  A system that has ended keeps its solution.  The randomized
methods take stacks at once too; `eigsh`, `svds` and `lobpcg` take one matrix after the other.

Where squares would leave the range of the dtype, right-hand sides and matrices are multiplied by powers of two, and
solutions by others at the end, so that results are those of numbers near 1.
"""
