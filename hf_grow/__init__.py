"""hf-grow: pretrained Hugging Face models whose attention grows where the data asks for it."""

from importlib.metadata import version

from hf_grow.adapting.adapt import adapt, trainable_parameters
from hf_grow.adapting.config import AdaptConfig
from hf_grow.adapting.saved import adapt_or_resume, load_adapted, save_adapted
from hf_grow.assets import SMALL_MODEL, small_model
from hf_grow.data import DataConfig
from hf_grow.errors import HfGrowError
from hf_grow.finetuning import Evaluation, FinetuneResult, finetune
from hf_grow.growth.collect import collect_statistics
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.head_scores import collect_head_scores
from hf_grow.growth.insert import insert_growth
from hf_grow.growth.pipeline import grow
from hf_grow.growth.plan import GrowthPlan, plan_growth
from hf_grow.growth.report import GrowthReport
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.statistics import Statistics
from hf_grow.saving.checkpoint import inspect_checkpoint, load_grown, push_grown, save_grown
from hf_grow.saving.growth_on_base import load_growth, remove_growth, save_growth
from hf_grow.surgery.base import growth_parameters
from hf_grow.surgery.forms import attach_growth, merge_growth
from hf_grow.surgery.patch import make_growable
from hf_grow.surgery.structure import add_heads, drop_query_key, widen_query_key, widen_value
from hf_grow.training.callback import GrowthCallback
from hf_grow.training.config import TrainConfig
from hf_grow.training.learning import freeze_base
from hf_grow.training.schedule import GrowthSchedule
from hf_grow.training.trainer import GrowthTrainer, TrainResult

__version__ = version("hf-grow")


def __getattr__(name: str) -> None:
    if name == "NewWeights":
        raise AttributeError(
            "hf_grow.NewWeights is gone: growth has parameters of its own now. hf_grow.freeze_base(model) lets them "
            "alone learn, growth_parameters(model) lists them, and any optimizer and trainer will do."
        )
    raise AttributeError(f"module 'hf_grow' has no attribute {name!r}")


__all__ = [
    "SMALL_MODEL",
    "AdaptConfig",
    "CollectConfig",
    "DataConfig",
    "Evaluation",
    "FinetuneResult",
    "GrowthCallback",
    "GrowthConfig",
    "GrowthPlan",
    "GrowthReport",
    "GrowthSchedule",
    "GrowthTrainer",
    "HfGrowError",
    "Statistics",
    "TrainConfig",
    "TrainResult",
    "adapt",
    "adapt_or_resume",
    "add_heads",
    "attach_growth",
    "collect_head_scores",
    "collect_statistics",
    "drop_query_key",
    "finetune",
    "freeze_base",
    "grow",
    "growth_parameters",
    "insert_growth",
    "inspect_checkpoint",
    "load_adapted",
    "load_grown",
    "load_growth",
    "make_growable",
    "merge_growth",
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
