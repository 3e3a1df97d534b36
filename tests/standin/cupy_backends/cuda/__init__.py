"""CUDA, for the stand-in."""
