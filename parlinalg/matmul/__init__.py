"""Distributed products: the kernels, and the planner that picks a grid and a kernel."""
