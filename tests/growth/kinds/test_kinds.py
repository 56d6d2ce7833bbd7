"""Each kind of growth knows what it costs, how much room there is, and what it makes of a layer."""

import pytest
import torch
from batches import labelled, sequences_of
from models import KINDS as NAMES
from models import causal_model, growable

import hf_grow
from hf_grow import CollectConfig, GrowthConfig, HfGrowError, collect_statistics
from hf_grow.growth.amounts import check_amounts, grown_dims, parameters_added
from hf_grow.growth.kinds import COLUMN_KINDS, HEADS, KINDS, PIECES, QUERY_KEY_COLUMNS, VALUE_COLUMNS, pieces_of
from hf_grow.growth.layer_growth import STEP_NAMES, LayerGrowth
from hf_grow.measuring.kind import MEASURED_KINDS
from hf_grow.surgery.blocks import read_blocks
from hf_grow.surgery.patch import growable_sites
from hf_grow.surgery.place import place_of

NONE = dict.fromkeys(NAMES, 0)


def places_of(model_type):
    return [place_of(site) for site in growable_sites(hf_grow.make_growable(causal_model(model_type)))]


def test_what_measuring_knows_are_the_kinds_there_are():
    assert dict(MEASURED_KINDS) == KINDS == {kind.name: kind for kind in (QUERY_KEY_COLUMNS, VALUE_COLUMNS, HEADS)}
    assert [*COLUMN_KINDS] == ["columns", "value_columns"] and (*NAMES, "head_scores") == STEP_NAMES
    assert {piece.kind.name for piece in PIECES.values()} == set(NAMES) and len(PIECES) == 4


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "qwen2"])
@pytest.mark.parametrize("amounts", [{"columns": 3}, {"value_columns": 2}, {"heads": 1}, {"columns": 1, "heads": 2}])
def test_costs_are_the_parameters_that_a_model_gets(model_type, amounts):
    model = hf_grow.make_growable(causal_model(model_type))
    before = model.num_parameters()
    places = [place_of(site) for site in growable_sites(model)]
    for layer in range(len(places)):
        if columns := amounts.get("columns"):
            hf_grow.widen_query_key(model, layer, columns)
        if columns := amounts.get("value_columns"):
            hf_grow.widen_value(model, layer, columns)
        if heads := amounts.get("heads"):
            hf_grow.add_heads(model, layer, heads)
    assert sum(parameters_added(place, NONE | amounts) for place in places) == model.num_parameters() - before
    assert [grown_dims(place, NONE | amounts) for place in places] == [
        site.attention.dims for site in growable_sites(model)
    ]


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", [QUERY_KEY_COLUMNS, HEADS], ids=lambda kind: kind.name)
def test_room_is_as_much_as_is_not_refused(model_type, kind):
    for place in places_of(model_type):
        kind.check_room(place, kind.room(place))
        with pytest.raises(HfGrowError, match=place.label):
            kind.check_room(place, kind.room(place) + 1)
        assert VALUE_COLUMNS.room(place) is None


def test_amounts_are_rounded_up_to_aligned_widths():
    places = places_of("gpt2")
    (amounts, _) = check_amounts(places, GrowthConfig(columns=1, value_columns=9, heads=1, align=8))
    assert places[0].query_key_dim == places[0].value_dim == 8
    assert amounts == {"columns": 8, "value_columns": 16, "heads": 1}


@pytest.mark.parametrize(("name", "strategy"), [*((name, "append") for name in NAMES), ("columns", "refactor")])
def test_without_a_step_a_piece_changes_no_product_of_its_weights(name, strategy):
    model = growable("gpt2", None, {})
    config = CollectConfig(collection="exact", kinds=NAMES, columns=2, value_columns=2, held_out=0.0)
    (layer, *_) = collect_statistics(model, sequences_of(labelled(model)), config).layers
    growth_config = GrowthConfig(columns=1, strategy=strategy)
    (piece,) = pieces_of(layer, NONE | {name: 1}, growth_config, config)
    growth = LayerGrowth(layer.place, (piece,))
    old = read_blocks(growable_sites(model)[0])
    new = growth.built(dict.fromkeys(STEP_NAMES, 0.0), old, torch.Generator().manual_seed(0))
    heads = len(old["query"])
    for first, second in (("query", "key"), ("value", "output")):
        products = [blocks[first] @ (blocks[second].mT if second == "key" else blocks[second]) for blocks in (old, new)]
        assert torch.allclose(products[0], products[1][:heads], rtol=1e-9, atol=1e-12)
    assert growth.amounts == NONE | {name: 1} and growth.dims == grown_dims(layer.place, growth.amounts)
    assert not any(vars(growth.extra(dict.fromkeys(STEP_NAMES, 0.0), old)).values())
