"""Distributed products: the kernels, and the planner that picks a grid and a kernel."""

from parlinalg.matmul.api import matmul
from parlinalg.matmul.planner import MatmulPlan, plan_matmul

__all__ = ["MatmulPlan", "matmul", "plan_matmul"]
