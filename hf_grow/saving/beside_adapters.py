"""Growth that learns beside PEFT's adapters goes where they go: with what PEFT saves, and with what it reads back.

PEFT writes its own weights alone, also when transformers' Trainer saves a checkpoint; so growth that learnt with them
would be lost. A model that PEFT has wrapped gets a class which writes growth into a folder beside them.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from hf_grow.errors import HfGrowError
from hf_grow.files import replacing
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.saving.growth_file import GROWTH_FOLDER, GrowthFile, is_growth_folder, read_growth, write_growth

logger = logging.getLogger("hf_grow")


class KeepsGrowth:
    """Mixin over a class of PEFT's models, whose base has attached growth."""

    peft_config: dict[str, Any]
    get_base_model: Callable[[], Any]

    def save_pretrained(
        self,
        save_directory: str,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: str | bool = "auto",
        is_main_process: bool = True,
        **kwargs: Any,
    ) -> None:
        """As in PEFT, with the growth that is active in a folder beside the adapters."""
        _check_names(self.peft_config)
        options = (safe_serialization, selected_adapters, save_embedding_layers, is_main_process)
        grown, folder = self.get_base_model(), Path(save_directory).resolve() / GROWTH_FOLDER
        with ExitStack() as stack:
            if is_main_process and grown.active_growth is not None:
                aside = stack.enter_context(replacing(folder))
                with torch.no_grad():
                    write_growth(grown, aside)
            elif is_main_process and is_growth_folder(folder):
                # Of an earlier save, when there was growth.
                shutil.rmtree(folder)
            super().save_pretrained(save_directory, *options, **kwargs)  # type: ignore[misc]

    def load_adapter(self, model_id: str | os.PathLike, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        """As in PEFT; with the weights of a present adapter come those of the growth beside it."""
        folder = _growth_beside(Path(model_id), adapter_name)
        saved: list[tuple[Tensor, Tensor]] = []
        if folder is not None and adapter_name in self.peft_config:
            saved = _saved_weights(self.get_base_model(), read_growth(folder))
        elif folder is not None:
            logger.warning("The growth in %s was not loaded with the adapter: use hf_grow.load_growth.", folder)
        loaded = super().load_adapter(model_id, adapter_name, *args, **kwargs)  # type: ignore[misc]
        with torch.no_grad():
            for parameter, values in saved:
                parameter.copy_(values)
        return loaded

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by the class of PEFT, as this one has no name of its own to be found by."""
        return _unpickled, (type(self).__bases__[1],), self.__dict__


def keep_growth(model: Any) -> None:
    """Have growth beside the adapters of a model saved and loaded with them; without adapters do nothing."""
    if isinstance(model, PeftModel) and not isinstance(model, KeepsGrowth):
        _check_names(model.peft_config)
        model.__class__ = _keeping(type(model))  # type: ignore[arg-type]


@cache
def _keeping(cls: type) -> Any:
    return type(cls.__name__, (KeepsGrowth, cls), {"__module__": cls.__module__})


def _unpickled(cls: type) -> Any:
    keeping = _keeping(cls)
    return keeping.__new__(keeping)


def _check_names(adapters: Iterable[str]) -> None:
    """PEFT saves an adapter of another name than "default" in a folder of that name."""
    if GROWTH_FOLDER in adapters:
        raise HfGrowError(f"An adapter of the name {GROWTH_FOLDER!r} would be saved where growth is: rename it.")


def _growth_beside(adapter: Path, name: str) -> Path | None:
    """The folder of growth beside saved weights of an adapter, which may be in a folder of its own."""
    places = [adapter, adapter.parent] if adapter.name == name else [adapter]
    return next((place / GROWTH_FOLDER for place in places if is_growth_folder(place / GROWTH_FOLDER)), None)


def _saved_weights(model: Any, growth: GrowthFile) -> list[tuple[Tensor, Tensor]]:
    """The parameters of attached growth, which an optimizer may hold, and what was saved of each."""
    weights: list[tuple[Tensor, Tensor]] = []
    for site in attention_sites(model):
        new, present = (
            {} if module is None else dict(module.named_parameters()) for module in (growth.module(site), site.growth)
        )
        shapes = [{name: weight.shape for name, weight in named.items()} for named in (new, present)]
        if shapes[0] != shapes[1] or not growth.fits_projections(model):
            raise HfGrowError(f"{growth.name} holds growth of other sizes than this model has: use load_adapted.")
        weights += [(present[name], new[name]) for name in new]
    return weights
