"""What comes with the package: a small GPT-2 trained by scripts/train_small_model.py."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

SMALL_MODEL = Path(__file__).parent / "small_gpt2"


def small_model() -> Any:
    """The small GPT-2 that comes with the package, as a stock transformers model ready for evaluation."""
    return AutoModelForCausalLM.from_pretrained(SMALL_MODEL).eval()
