"""What a budget of parameters that learn buys: new columns, a rank of LoRA, or both."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

from peft import PeftModel
from transformers import PreTrainedModel

from hf_grow.adapting.config import AdaptConfig
from hf_grow.adapting.targets import lora_targets, named_module, whole_modules
from hf_grow.errors import HfGrowError
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds import COLUMN_KINDS, Kind
from hf_grow.growth.pipeline import check_growth
from hf_grow.modeling.growable_attention import projection_size
from hf_grow.surgery.base import growth_parameters, has_adapters
from hf_grow.surgery.patch import growable_sites
from hf_grow.surgery.place import Place, place_of


def choose_amounts(model: PreTrainedModel, config: AdaptConfig) -> tuple[dict[str, int], int]:
    """The new columns per head, by kind, and LoRA's rank for a growable model; refused where the budget allows none."""
    amounts, rank = config.growth, config.rank if config.has_lora else 0
    if amounts is None or rank is None:
        budget = GrowthConfig(budget=config.budget).budget_for(model.num_parameters())
        amounts, rank = Costs.of(model, config).spend(budget, config, amounts, rank)
    if config.grows:
        check_growth(model, GrowthConfig(**amounts, align=1))  # type: ignore[arg-type]
    return amounts, rank


def check_start(model: PreTrainedModel, config: AdaptConfig) -> None:
    """Refuse LoRA on a model that has adapters already."""
    if config.has_lora and (isinstance(model, PeftModel) or has_adapters(model)):
        raise HfGrowError("The model has adapters already: merge them first with model.merge_and_unload().")


@dataclass(frozen=True)
class Costs:
    """Parameters of what learns, over all layers.

    column           of a new column in every head, by kind
    rank             of a rank of LoRA
    whole_modules    of the modules that learn whole, such as a task head, and of growth that is there and will learn on
    room             for how many columns there is room in every layer, by kind
    """

    column: dict[str, int]
    rank: int
    whole_modules: int
    room: dict[str, float]

    @classmethod
    def of(cls, model: PreTrainedModel, config: AdaptConfig) -> "Costs":
        """Those of a growable model."""
        sites = growable_sites(model)
        places = [place_of(site) for site in sites]
        targets = [target for site in sites for target in lora_targets(site, config.lora_on)]
        modules = [named_module(model, name) for name in whole_modules(model, config)]
        return cls(
            column={name: sum(kind.cost(place, place.dims) for place in places) for name, kind in COLUMN_KINDS.items()},
            rank=sum(sum(projection_size(target.projection)) for target in targets),
            whole_modules=sum(parameter.numel() for module in modules for parameter in module.parameters())
            + (sum(parameter.numel() for parameter in growth_parameters(model)) if config.grows else 0),
            room={name: _least_room(kind, places) for name, kind in COLUMN_KINDS.items()},
        )

    def total(self, amounts: Mapping[str, int], rank: int) -> int:
        """What learns with these amounts."""
        return self.whole_modules + sum(new * self.column[kind] for kind, new in amounts.items()) + rank * self.rank

    def spend(
        self, budget: int, config: AdaptConfig, amounts: dict[str, int] | None, rank: int | None
    ) -> tuple[dict[str, int], int]:
        """The amounts that are not given, so that all of what learns comes as near to the budget as can be."""
        least = {config.kinds[-1]: 1} if amounts is None else amounts, int(config.has_lora) if rank is None else rank
        if self.total(*least) > budget:
            raise HfGrowError(
                f"A budget of {budget:,} parameters is too small for {config.method}: the least that can learn is "
                f"{self.total(*least):,} of them."
            )
        if amounts is not None:
            return amounts, self._rank_within(budget, amounts)
        fitting = list(self._fitting(budget, config.kinds, least[1])) or [least[0]]
        if rank is not None:
            return fitting[-1], rank
        # As many columns as their share pays for, or one more, and LoRA for the rest.
        paid = config.share * (budget - self.whole_modules)
        share = sum(self.total(amounts, 0) - self.whole_modules <= paid for amounts in fitting)
        tried = [(amounts, self._rank_within(budget, amounts)) for amounts in fitting[max(share - 1, 0) : share + 1]]
        return max(tried, key=lambda choice: self.total(*choice))

    def _fitting(self, budget: int, kinds: tuple[str, ...], rank: int) -> Iterator[dict[str, int]]:
        """One column, two and so on, of the kinds in turn, as long as there is room and budget beside a rank."""
        for number in count(1):
            # The last kind first: of both, values.
            shares = {kind: (number + place) // len(kinds) for place, kind in enumerate(kinds)}
            if self.total(shares, rank) > budget or any(share > self.room[kind] for kind, share in shares.items()):
                return
            yield {kind: share for kind, share in shares.items() if share}

    def _rank_within(self, budget: int, amounts: Mapping[str, int]) -> int:
        return (budget - self.total(amounts, 0)) // (self.total(amounts, 1) - self.total(amounts, 0))


def _least_room(kind: Kind, places: Sequence[Place]) -> float:
    """How many columns all layers have room for."""
    rooms = (kind.room(place) for place in places)
    return min((room for room in rooms if room is not None), default=inf)
