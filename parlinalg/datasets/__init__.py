"""Data to train on: sets and texts that every rank reads alike, and loaders that give each rank its block."""

from parlinalg.datasets.loader import Batch, Loader
from parlinalg.datasets.sets import Dataset, digits, npz
from parlinalg.datasets.text import Text, text
from parlinalg.datasets.tokens import Tokenizer, tokenizer
from parlinalg.datasets.windows import Passages, Windows
from parlinalg.datasets.words import known_share

__all__ = [
    "Batch", "Dataset", "Loader", "Passages", "Text", "Tokenizer", "Windows", "digits", "known_share", "npz", "text",
    "tokenizer",
]  # fmt: skip
