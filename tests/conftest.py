"""Test settings: one thread for small models, no network, transformers' deprecations as errors."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
