"""Data to train on: sets and texts, and loaders that give each rank its block, or have it read its own rows alone."""

from typing import TYPE_CHECKING

from parlinalg import hints
from parlinalg.datasets.collate import collate
from parlinalg.datasets.dataloader import DataLoader, Dataset, Sharded
from parlinalg.datasets.loader import Batch, Loader, Sampler
from parlinalg.datasets.sets import Samples, digits, npz
from parlinalg.datasets.text import Text, known_share, text
from parlinalg.datasets.tokens import Tokenizer, tokenizer
from parlinalg.datasets.windows import Passages, Windows

__all__ = [
    "Batch", "DataLoader", "Dataset", "Loader", "Passages", "Sampler", "Samples", "Sharded", "Text", "Tokenizer",
    "Windows", "collate", "digits", "known_share", "npz", "text", "tokenizer",
]  # fmt: skip

if not TYPE_CHECKING:  # names of other libraries
    __getattr__ = hints.missing(__name__)
