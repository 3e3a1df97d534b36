"""Data to train on: sets that every rank reads alike, and loaders that give each rank its block of a batch."""

from parlinalg.datasets.loader import Batch, Loader
from parlinalg.datasets.sets import Dataset, digits, npz

__all__ = ["Batch", "Dataset", "Loader", "digits", "npz"]
