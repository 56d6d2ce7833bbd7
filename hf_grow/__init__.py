"""hf-grow: pretrained Hugging Face models whose attention grows where the data asks for it."""

from importlib.metadata import version

from hf_grow.adapt_config import AdaptConfig
from hf_grow.assets import SMALL_MODEL, small_model
from hf_grow.callback import GrowthCallback
from hf_grow.checkpoint import inspect_checkpoint, load_grown, push_grown, save_grown
from hf_grow.collect import collect_statistics
from hf_grow.config import CollectConfig, GrowthConfig
from hf_grow.errors import HfGrowError
from hf_grow.finetuning import Evaluation, FinetuneResult, finetune
from hf_grow.growth_file import load_growth, remove_growth, save_growth
from hf_grow.insert import grow, insert_growth
from hf_grow.new_weights import NewWeights
from hf_grow.patch import make_growable
from hf_grow.plan import GrowthPlan, plan_growth
from hf_grow.recipe import adapt, adapt_or_resume, load_adapted, save_adapted, trainable_parameters
from hf_grow.report import GrowthReport
from hf_grow.schedule import GrowthSchedule
from hf_grow.statistics import Statistics
from hf_grow.structure import add_heads, drop_query_key, widen_query_key, widen_value
from hf_grow.train_config import TrainConfig
from hf_grow.trainer import GrowthTrainer, TrainResult

__version__ = version("hf-grow")

__all__ = [
    "SMALL_MODEL",
    "AdaptConfig",
    "CollectConfig",
    "Evaluation",
    "FinetuneResult",
    "GrowthCallback",
    "GrowthConfig",
    "GrowthPlan",
    "GrowthReport",
    "GrowthSchedule",
    "GrowthTrainer",
    "HfGrowError",
    "NewWeights",
    "Statistics",
    "TrainConfig",
    "TrainResult",
    "adapt",
    "adapt_or_resume",
    "add_heads",
    "collect_statistics",
    "drop_query_key",
    "finetune",
    "grow",
    "insert_growth",
    "inspect_checkpoint",
    "load_adapted",
    "load_grown",
    "load_growth",
    "make_growable",
    "plan_growth",
    "push_grown",
    "remove_growth",
    "save_adapted",
    "save_grown",
    "save_growth",
    "small_model",
    "trainable_parameters",
    "widen_query_key",
    "widen_value",
]
