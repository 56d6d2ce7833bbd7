"""What comes with the package: a small GPT-2 trained by scripts/train_small_model.py."""

from pathlib import Path

SMALL_MODEL = Path(__file__).parent / "small_gpt2"
