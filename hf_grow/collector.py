"""What both forms of collection share: places, present weights, and the sides of the scores in every layer."""

from dataclasses import replace

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.blocks import read_blocks
from hf_grow.config import CollectConfig
from hf_grow.linalg import Side
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.observe import input_sizes
from hf_grow.passes import Batch, Passes
from hf_grow.statistics import Place


class Collector:
    """A collection under way: the model's layers, the data and what is wanted."""

    def __init__(
        self,
        passes: Passes,
        sites: list[AttentionSite],
        choosing: list[Batch],
        judging: list[Batch],
        config: CollectConfig,
    ) -> None:
        self.passes, self.sites, self.choosing, self.judging, self.config = passes, sites, choosing, judging, config
        self.places = [place_of(site) for site in sites]
        self.present = [self._working(read_blocks(site)) for site in sites]
        self.kinds = config.measured_kinds
        # Whether any process has sequences that judge: all take part in their passes then.
        self.judged = passes.count(judging) > 0
        self.generator = torch.Generator().manual_seed(config.seed)

    @staticmethod
    def _working(blocks: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        dtype = linalg.working_dtype(blocks["query"].device)
        return blocks["query"].to(dtype), blocks["key"].to(dtype)

    @property
    def wants_circuits(self) -> bool:
        return bool({"value_columns", "heads"} & set(self.kinds))

    def circuit_rank(self) -> int:
        """How many value columns to look for: a new head takes as many as its layer is wide, behind those of others."""
        wanted = self.config.value_columns if "value_columns" in self.kinds else 0
        widest = max(place.value_dim for place in self.places) if "heads" in self.kinds else 0
        return wanted + widest

    def sides(self, query_gram: Tensor, key_gram: Tensor, index: int) -> tuple[Side, Side]:
        """The query and the key side of a layer, with the span of the present columns."""
        query, key = self.present[index]
        same = query_gram.shape == key_gram.shape and torch.equal(query_gram, key_gram)
        factor = self.whitening(query_gram)
        groups = key.shape[0]
        first = linalg.side(linalg.ridged(query_gram, self.config.ridge), factor, query, groups)
        factor = factor if same else self.whitening(key_gram)
        return first, linalg.side(linalg.ridged(key_gram, self.config.ridge), factor, key)

    def whitening(self, gram: Tensor) -> Tensor:
        """What whitens a gram, by the numerics of the config."""
        return linalg.whitening(gram, self.config.inverse, self.config.cutoff, self.config.ridge)

    def pattern_whitening(self, gram: Tensor, key_gram: Tensor, span: Tensor | None = None) -> Tensor:
        """What whitens the gram of what heads read, or its part in a span of inputs (…, inputs, k).

        Its ridge is relative to the gram of the inputs, so that it means the same for every pattern and every span.
        """
        size = self.config.ridge * key_gram.diagonal().mean()
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        ridge = size * (identity if span is None else span.mT @ span)
        return linalg.whitening(gram + ridge, self.config.inverse, self.config.cutoff)

    def searched(self, sides: tuple[Side, Side], index: int) -> tuple[Side, Side]:
        """The sides as the target wants them: outside the present columns, or anywhere."""
        target = self.config.target or ("gradient" if self.places[index].rotary_dim else "bottleneck")
        return sides if target == "bottleneck" else free(sides)

    def rank(self, index: int) -> int:
        """How many query/key columns to look for in a layer."""
        inputs = self.places[index].inputs
        return min(self.config.columns + self.config.oversampling, inputs["query"], inputs["key"])


def free(sides: tuple[Side, Side]) -> tuple[Side, Side]:
    """Sides that leave nothing out."""
    return replace(sides[0], basis=None), replace(sides[1], basis=None)


def place_of(site: AttentionSite) -> Place:
    """An attention module as it is now."""
    attention, blocks = site.attention, read_blocks(site)
    norms = {
        role: block.norm(dim=2 if role == "output" else 1).square().mean().sqrt() for role, block in blocks.items()
    }
    return Place(
        name=site.name,
        layer=site.layer,
        kind=site.kind,
        n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads,
        query_key_dim=attention.query_key_dim,
        value_dim=attention.value_dim,
        scaling=attention.scaling,
        rotary_dim=attention.rotary_dim,
        inputs=input_sizes(site),
        norms={role: float(norm) for role, norm in norms.items()},
    )
