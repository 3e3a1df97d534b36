"""Training: configurations, the mesh of ranks they ask for, and the job that trains a model on it."""

from parlinalg.train.config import Config
from parlinalg.train.launch import Mesh, launch

__all__ = ["Config", "Mesh", "launch"]
