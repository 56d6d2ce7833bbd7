"""hf-grow: pretrained Hugging Face models whose attention grows where the data asks for it."""

from importlib.metadata import version

from hf_grow.assets import SMALL_MODEL, small_model
from hf_grow.checkpoint import inspect_checkpoint, load_grown, push_grown, save_grown
from hf_grow.errors import HfGrowError
from hf_grow.patch import make_growable
from hf_grow.structure import add_heads, drop_query_key, widen_query_key, widen_value

__version__ = version("hf-grow")

__all__ = [
    "SMALL_MODEL",
    "HfGrowError",
    "add_heads",
    "drop_query_key",
    "inspect_checkpoint",
    "load_grown",
    "make_growable",
    "push_grown",
    "save_grown",
    "small_model",
    "widen_query_key",
    "widen_value",
]
