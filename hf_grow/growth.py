"""What one attention module is to get: at any step, as weights to try beside the model's own or to build into it.

Steps are how far to go along the wanted change: one for query/key columns, value columns, heads, and the query/key side
of new heads ("head_scores"). At step 0 growth takes the form that changes no output.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.blocks import Blocks
from hf_grow.linalg import Directions
from hf_grow.observe import Extra
from hf_grow.statistics import Candidates, Place

Steps = Mapping[str, float]


@dataclass(frozen=True)
class HeadGrowth:
    """One new head: value (1, inputs, columns) and output (heads of a group, columns, outputs) for a step of one.

    copy       the key head whose pattern it takes over, or None for the uniform pattern
    query, key for the uniform pattern: where its scores should go, for a step of one; None where nothing was found
    """

    copy: int | None
    value: Tensor
    output: Tensor
    query: Tensor | None = None
    key: Tensor | None = None


@dataclass(frozen=True)
class LayerGrowth:
    """The growth of one attention module.

    strategy      "append" adds what follows; "refactor" and "step" replace the query/key columns
    query, key    new columns for a step of one: scores change by −step · query keyᵀ
    value, output new value columns for a step of one: outputs change by −step · value output
    heads         new heads
    change        the whole wanted change as query (heads, inputs, m), key (key heads, inputs, m): for "refactor", and
                  for a line search of full rank
    query_key_dim the width after growth
    …_gram        what "refactor" and "step" measure score changes with; gradient: T, which "step" follows
    """

    place: Place
    strategy: str = "append"
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    heads: tuple[HeadGrowth, ...] = ()
    change_query: Tensor | None = None
    change_key: Tensor | None = None
    query_key_dim: int = 0
    query_gram: Tensor | None = None
    key_gram: Tensor | None = None
    gradient: Tensor | None = None

    def count(self, kind: str) -> int:
        """How many columns, value columns or heads are added."""
        if kind == "heads":
            return len(self.heads)
        if kind == "columns":
            return self.query_key_dim - self.place.query_key_dim
        return 0 if self.value is None else self.value.shape[-1]

    @property
    def value_dim(self) -> int:
        """The value width after growth."""
        return self.place.value_dim + self.count("value_columns")

    @property
    def parameters(self) -> int:
        """How many parameters are added."""
        columns, values = (self.count(kind) for kind in ("columns", "value_columns"))
        widths = self.query_key_dim, self.value_dim
        cost = self.place.cost
        head = len(self.heads) * cost("heads", *widths)
        return columns * cost("columns", *widths) + values * cost("value_columns", *widths) + head

    def column_size(self, step: float) -> float | None:
        """How large the new query columns are at a step, as a multiple of the usual size of the present ones."""
        if self.query is None or self.key is None or not self.place.norms["query"]:
            return None
        query, _ = linalg.new_columns(Directions(self.query, self.key), step, self.place.scaling)
        return float(query.norm(dim=1).square().mean().sqrt()) / self.place.norms["query"]

    def extra(self, steps: Steps, blocks: Blocks, full_rank: bool = False) -> Extra:
        """The weights to try beside the model's own `blocks`, for these steps."""
        parts: dict = self._score_columns(steps.get("columns", 0.0), blocks, full_rank)
        if self.value is not None and self.output is not None and steps.get("value_columns"):
            size = steps["value_columns"] ** 0.5
            parts |= {"value": -size * self.value, "output": size * self.output}
        # Copies come first, as `Extra` wants them.
        heads = sorted(self.heads, key=lambda head: head.copy is None) if steps.get("heads") else []
        if heads:
            parts |= self._heads(heads, steps)
        return Extra(**parts)

    def _score_columns(self, step: float, blocks: Blocks, full_rank: bool) -> dict:
        if step == 0 and not self.shrinks:
            return {}
        scaling = self.place.scaling
        if full_rank and self.change_query is not None and self.change_key is not None:
            change = Directions(self.change_query, self.change_key)
            query, key = linalg.new_columns(change, step, scaling)
        elif self.strategy != "append":
            # The difference of two products is one product: new columns beside the old ones turned around.
            new_query, new_key = self.replaced(step, blocks)
            query = torch.cat((new_query, -blocks["query"].to(new_query)), dim=-1)
            key = torch.cat((new_key, blocks["key"].to(new_key)), dim=-1)
        elif self.query is not None and self.key is not None:
            query, key = linalg.new_columns(Directions(self.query, self.key), step, scaling)
        else:
            return {}
        return {"query": query, "key": key}

    def _heads(self, heads: list[HeadGrowth], steps: Steps) -> dict:
        size, scores = steps["heads"] ** 0.5, steps.get("head_scores", 0.0)
        width = max(head.value.shape[2] for head in heads)
        parts: dict = {
            "copies": tuple(head.copy for head in heads if head.copy is not None),
            "head_value": torch.cat([_fitted(-size * head.value, width, 2) for head in heads]),
            "head_output": torch.cat([_fitted(size * head.output, width, 1) for head in heads]),
        }
        uniform = [head for head in heads if head.copy is None]
        if uniform:
            pairs = [self._uniform_scores(head, scores) for head in uniform]
            parts |= {"head_query": torch.cat([pair[0] for pair in pairs])}
            parts |= {"head_key": torch.cat([pair[1] for pair in pairs])}
        return parts

    def _uniform_scores(self, head: HeadGrowth, step: float) -> tuple[Tensor, Tensor]:
        if head.query is None or head.key is None:
            group, inputs = self.place.n_heads // self.place.n_kv_heads, self.place.inputs
            return head.value.new_zeros(group, inputs["query"], 1), head.value.new_zeros(1, inputs["key"], 1)
        return linalg.new_columns(Directions(head.query, head.key), step, self.place.scaling)

    @property
    def shrinks(self) -> bool:
        """Fewer query/key columns than before: then the function changes even without a step."""
        return self.query_key_dim < self.place.query_key_dim

    def replaced(self, step: float, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """All query and key columns anew, in the working dtype; without a step the old ones, and zeros for new ones."""
        assert self.query_gram is not None and self.key_gram is not None and self.gradient is not None
        assert self.change_query is not None and self.change_key is not None
        # Tiny inputs count here: where the device knows double precision, it is used.
        dtype = torch.float64 if self.query_gram.device.type in ("cpu", "cuda") else torch.float32
        grams = (self.query_gram.to(dtype), self.key_gram.to(dtype))
        query, key = (blocks[role].to(grams[0]) for role in ("query", "key"))
        if step == 0 and not self.shrinks:
            return _fitted(query, self.query_key_dim, 2), _fitted(key, self.query_key_dim, 2)
        scaling = self.place.scaling
        if self.strategy == "refactor":
            change = Directions(self.change_query.to(dtype), self.change_key.to(dtype))
            return linalg.refactor(query, key, change, *grams, self.query_key_dim, step=step, scaling=scaling)
        moves = linalg.plain_step(query, key, self.gradient.to(dtype), *grams, scaling=scaling)
        return query + step * moves[0], key + step * moves[1]

    def built(self, steps: Steps, blocks: Blocks, generator: torch.Generator) -> Blocks:
        """The module's weights after growth; where a pair of factors would be zero, one gets a usual size instead."""
        new = dict(blocks)
        if self.strategy != "append":
            pair = self.replaced(steps["columns"], blocks)
            columns = self._alive(("query", "key"), pair, torch.zeros_like(pair[0]), generator)
            return new | {role: weight.to(blocks[role]) for role, weight in columns.items()}
        if self.query is not None and self.key is not None:
            pair = linalg.new_columns(Directions(self.query, self.key), steps["columns"], self.place.scaling)
            columns = self._alive(("query", "key"), pair, self.query, generator)
            new |= {role: torch.cat((new[role], part.to(new[role])), dim=2) for role, part in columns.items()}
        if self.value is not None and self.output is not None:
            size = steps["value_columns"] ** 0.5
            pair = (-size * self.value, size * self.output)
            columns = self._alive(("value", "output"), pair, self.value, generator)
            new["value"] = torch.cat((new["value"], columns["value"].to(new["value"])), dim=2)
            new["output"] = torch.cat((new["output"], columns["output"].to(new["output"])), dim=1)
        if self.heads:
            heads = [self._built_head(head, steps, new, generator) for head in self.heads]
            new = {role: torch.cat((new[role], *(head[role].to(new[role]) for head in heads))) for role in new}
        return new

    def _built_head(self, head: HeadGrowth, steps: Steps, blocks: Blocks, generator: torch.Generator) -> Blocks:
        group = self.place.n_heads // self.place.n_kv_heads
        width = blocks["value"].shape[2]
        size = steps["heads"] ** 0.5
        value = _fitted(-size * head.value, width, 2)
        output = _fitted(size * head.output, width, 1)
        built = self._alive(("value", "output"), (value, output), _fitted(head.value, width, 2), generator)
        if head.copy is not None:
            built["query"] = blocks["query"][head.copy * group : (head.copy + 1) * group]
            built["key"] = blocks["key"][head.copy : head.copy + 1]
            return built
        query, key = self._uniform_scores(head, steps["head_scores"])
        # What was found are columns without positions: they stand behind the rotated ones.
        columns, rotary = blocks["query"].shape[2], self.place.rotary_dim
        query, key = (_fitted(_shifted(part, rotary), columns, 2) for part in (query, key))
        return built | self._alive(("query", "key"), (query, key), torch.zeros_like(query), generator)

    def _alive(
        self, roles: tuple[str, str], pair: tuple[Tensor, Tensor], direction: Tensor, generator: torch.Generator
    ) -> Blocks:
        """The pair of factors; columns that are zero on both sides get the direction, or else chance, on the first.

        The second side stays zero there, so that nothing changes, but it will learn.
        """
        first, second = pair
        sums = second.abs().sum(2 if roles[1] == "output" else 1)  # (heads or key heads, columns)
        heads = max(first.shape[0], second.shape[0])
        dead = (linalg.repeat_groups(first.abs().sum(1), heads) == 0) & (linalg.repeat_groups(sums, heads) == 0)
        dead = dead.reshape(first.shape[0], -1, dead.shape[-1]).all(1)[:, None]
        chance = torch.randn(first.shape, generator=generator, dtype=torch.float32).to(first)
        lengths = direction.norm(dim=1, keepdim=True)
        chosen = torch.where(lengths > 0, direction / lengths.clamp(min=torch.finfo(first.dtype).tiny), 0 * direction)
        chance = chance / chance.norm(dim=1, keepdim=True)
        usual = self.place.norms[roles[0]] or 0.02 * first.shape[1] ** 0.5
        alive = torch.where(dead, usual * torch.where(lengths > 0, chosen, chance), first)
        return {roles[0]: alive, roles[1]: second}


def uniform_circuit(uniform: Candidates, place: Place) -> tuple[Tensor, Tensor]:
    """The value and output side of a uniform head, its output rows dealt out among the query heads of one group.

    Query heads with the same output would get the same gradient for ever.
    """
    group, width = place.n_heads // place.n_kv_heads, min(place.value_dim, uniform.rank)
    owner = torch.arange(width, device=uniform.second.device) % group
    heads = torch.arange(group, device=owner.device)
    return uniform.first[..., :width], uniform.second[:, :width] * (owner == heads[:, None])[..., None]


def _fitted(weight: Tensor, size: int, dim: int) -> Tensor:
    """Cut or filled with zeros along a dimension."""
    weight = weight.narrow(dim, 0, min(size, weight.shape[dim]))
    shape = list(weight.shape)
    shape[dim] = size - weight.shape[dim]
    return torch.cat((weight, weight.new_zeros(shape)), dim=dim)


def _shifted(weight: Tensor, columns: int) -> Tensor:
    """With zero columns in front."""
    return torch.cat((weight.new_zeros(*weight.shape[:2], columns), weight), dim=2)
