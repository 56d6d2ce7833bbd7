"""hf-grow: pretrained Hugging Face models whose attention grows where the data asks for it."""

from importlib.metadata import version

from hf_grow.assets import SMALL_MODEL, small_model
from hf_grow.checkpoint import inspect_checkpoint, load_grown, push_grown, save_grown
from hf_grow.collect import collect_statistics
from hf_grow.config import CollectConfig, GrowthConfig
from hf_grow.errors import HfGrowError
from hf_grow.insert import grow, insert_growth
from hf_grow.patch import make_growable
from hf_grow.plan import GrowthPlan, plan_growth
from hf_grow.report import GrowthReport
from hf_grow.statistics import Statistics
from hf_grow.structure import add_heads, drop_query_key, widen_query_key, widen_value

__version__ = version("hf-grow")

__all__ = [
    "SMALL_MODEL",
    "CollectConfig",
    "GrowthConfig",
    "GrowthPlan",
    "GrowthReport",
    "HfGrowError",
    "Statistics",
    "add_heads",
    "collect_statistics",
    "drop_query_key",
    "grow",
    "insert_growth",
    "inspect_checkpoint",
    "load_grown",
    "make_growable",
    "plan_growth",
    "push_grown",
    "save_grown",
    "small_model",
    "widen_query_key",
    "widen_value",
]
