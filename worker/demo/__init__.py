"""The demo language model that ships with the project (no torch import here)."""

from pathlib import Path
from typing import Final

MODEL_DIR: Final[Path] = Path(__file__).resolve().parent / "model"
"""Folder with the weights, the tokenizer and the held-out text."""

TRAINING_REPORT: Final[Path] = MODEL_DIR.parent / "training.json"
"""Numbers of the training run that made the folder."""

__all__ = ["MODEL_DIR", "TRAINING_REPORT"]
