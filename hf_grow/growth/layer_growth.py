"""What one attention module is to get: pieces of some kinds, at any step, to try beside its weights or to build in."""

from dataclasses import dataclass
from typing import Any

import torch

from hf_grow.growth.amounts import grown_dims, parameters_added
from hf_grow.growth.kinds import KINDS, PIECES, Amounts, Piece, StepSizes
from hf_grow.growth.kinds.head import NewHeads
from hf_grow.growth.kinds.query_key import NewColumns
from hf_grow.growth.kinds.replace import RemadeColumns
from hf_grow.growth.kinds.value import NewValueColumns
from hf_grow.modeling.growable_attention import AttentionDims
from hf_grow.running.observe import Extra
from hf_grow.surgery.blocks import Blocks
from hf_grow.surgery.place import Place, read_place

STEP_NAMES = tuple(name for kind in KINDS.values() for name in kind.step_names)


@dataclass(frozen=True)
class LayerGrowth:
    """The growth of one attention module: what it gets of each kind, in the order in which it is built."""

    place: Place
    pieces: tuple[Piece, ...]

    @property
    def amounts(self) -> Amounts:
        """How much is added, by kind."""
        return dict.fromkeys(KINDS, 0) | {piece.kind.name: piece.count for piece in self.pieces}

    @property
    def dims(self) -> AttentionDims:
        """The sizes after growth."""
        return grown_dims(self.place, self.amounts)

    @property
    def parameters(self) -> int:
        """How many parameters are added."""
        return parameters_added(self.place, self.amounts)

    @property
    def shrinks(self) -> bool:
        """Whether the function changes even without a step."""
        return any(piece.shrinks for piece in self.pieces)

    @property
    def remade(self) -> tuple[str, ...]:
        """The roles in which every weight becomes another."""
        return tuple(role for piece in self.pieces for role in piece.remade)

    @property
    def head_patterns(self) -> list[str]:
        """What new heads attend to."""
        return [pattern for piece in self.pieces for pattern in piece.patterns]

    def steps_along(self, name: str) -> bool:
        """Whether some of it steps along this."""
        return any(name in piece.step_names for piece in self.pieces)

    def column_size(self, step_sizes: StepSizes) -> float | None:
        """How large new query columns are, as a multiple of the usual size of the present ones."""
        sizes = (piece.column_size(self.place, step_sizes) for piece in self.pieces)
        return next((size for size in sizes if size is not None), None)

    def usual_step(self, name: str) -> float:
        """The step along something that makes new columns as large as the present ones; 0 where there is none."""
        return max(
            (piece.usual_step(self.place, name) for piece in self.pieces if name in piece.step_names), default=0.0
        )

    def extra(self, step_sizes: StepSizes, blocks: Blocks, full_rank: bool = False) -> Extra:
        """The weights to try beside the model's own `blocks`, for these steps."""
        tried: dict[str, Any] = {}
        for piece in self.pieces:
            tried |= piece.tried(self.place, step_sizes, blocks, full_rank)
        return Extra(**tried)

    def built(self, step_sizes: StepSizes, blocks: Blocks, generator: torch.Generator) -> Blocks:
        """The module's weights after growth; where a pair of factors would be zero, one gets a usual size instead."""
        for piece in self.pieces:
            blocks = piece.built(self.place, step_sizes, blocks, generator)
        return blocks


def read_layer_growth(content: dict[str, Any]) -> LayerGrowth:
    """The growth of a layer as files of plans have it."""
    place = read_place(content["place"])
    if "pieces" not in content:
        return LayerGrowth(place, _former_pieces(content, place))
    return LayerGrowth(place, tuple(_read_piece(**piece) for piece in content["pieces"]))


def _read_piece(form: str, **content: Any) -> Piece:
    return PIECES[form].read(content)


def _former_pieces(content: dict[str, Any], place: Place) -> tuple[Piece, ...]:
    """What plans of 0.1 held: the fields of all kinds in one."""
    change = {name: content[name] for name in ("change_query", "change_key")}
    if content["strategy"] != "append":
        measured = {name: content[name] for name in ("strategy", "query_gram", "key_gram", "gradient")}
        return (RemadeColumns(columns=content["query_key_dim"] - place.query_key_dim, **change, **measured),)
    pieces: list[Piece] = []
    if content["query"] is not None:
        pieces.append(NewColumns(content["query"], content["key"], **change))
    if content["value"] is not None:
        pieces.append(NewValueColumns(content["value"], content["output"]))
    if content["heads"]:
        skipped = sum(piece.count for piece in pieces if isinstance(piece, NewValueColumns))
        pieces.append(NewHeads.read({"heads": content["heads"], "skipped": skipped}))
    return tuple(pieces)
