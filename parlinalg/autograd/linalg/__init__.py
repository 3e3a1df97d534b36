"""The derivatives of linear algebra: products, and triangular solves with factors that the forward pass made.

By a complex matrix Z = U + iV the gradient of a real number L is ∂L/∂U + i ∂L/∂V, as PyTorch's: G for which
dL = Re tr(Gᴴ dZ).  A function of several results has a rule for each of them, and their gradients add up.  By Hermitian
matrices, of which functions read one triangle, it is Hermitian: all of it counts.

Eigenvectors and singular vectors of equal values are one basis of many of the space that belongs to these values, and a
single vector is unique up to its phase.  Where no derivative exists, 1 / (wⱼ - wᵢ) counts as 0 (`inverses`): values are
equal if they differ by at most 10 n ε of the largest, which rounding makes of equal ones.  Of vectors that complete
others to a basis the space counts.
"""

from parlinalg.autograd.linalg import factorizations, factors, least_squares, matrix_functions, spectra, systems

__all__ = ["factorizations", "factors", "least_squares", "matrix_functions", "spectra", "systems"]
