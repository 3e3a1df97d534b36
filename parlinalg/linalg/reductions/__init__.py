"""Reductions to tridiagonal, bidiagonal and Hessenberg form by reflections, and the values of these forms."""
