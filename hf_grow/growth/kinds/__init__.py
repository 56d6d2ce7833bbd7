"""The kinds of growth, one file each. What adds to a layer is entered here, in the order in which it is built."""

from collections.abc import Iterator

from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds.head import HEADS, NewHeads
from hf_grow.growth.kinds.kind import Amounts, Kind, Piece, StepSizes
from hf_grow.growth.kinds.query_key import QUERY_KEY_COLUMNS, NewColumns
from hf_grow.growth.kinds.replace import REPLACED_COLUMNS, RemadeColumns
from hf_grow.growth.kinds.value import VALUE_COLUMNS, NewValueColumns
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.kind import MEASURED_KINDS
from hf_grow.measuring.statistics import AttentionStatistics

KINDS: dict[str, Kind] = {kind.name: kind for kind in (QUERY_KEY_COLUMNS, VALUE_COLUMNS, HEADS)}
# Kinds of columns, which adapters are made of.
COLUMN_KINDS: dict[str, Kind] = {name: kind for name, kind in KINDS.items() if kind.widened}
PIECES: dict[str, type[Piece]] = {piece.form: piece for piece in (NewColumns, NewValueColumns, NewHeads, RemadeColumns)}
MEASURED_KINDS.update(KINDS)


def pieces_of(
    layer: AttentionStatistics, amounts: Amounts, config: GrowthConfig, collected: CollectConfig
) -> Iterator[Piece]:
    """What a layer gets for amounts of all kinds, in the order in which it is built."""
    kinds = KINDS.values() if config.strategy == "append" else (REPLACED_COLUMNS,)
    for kind in kinds:
        piece = kind.piece(layer, amounts, config, collected)
        if piece is not None:
            yield piece


__all__ = [
    "COLUMN_KINDS",
    "HEADS",
    "KINDS",
    "PIECES",
    "QUERY_KEY_COLUMNS",
    "REPLACED_COLUMNS",
    "VALUE_COLUMNS",
    "Amounts",
    "Kind",
    "Piece",
    "StepSizes",
    "pieces_of",
]
