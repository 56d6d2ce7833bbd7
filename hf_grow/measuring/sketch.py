"""Collection by probing: grams first, then the strongest directions from products with the gradients."""

import torch

from hf_grow.measuring.collector import Collector
from hf_grow.measuring.probes import collect_grams
from hf_grow.measuring.sketch_circuits import CircuitSketch
from hf_grow.measuring.sketch_scores import ScoreSketch
from hf_grow.measuring.statistics import AttentionStatistics


class SketchCollector(Collector):
    """Solves from products with probes, phase by phase."""

    def layers(self) -> list[AttentionStatistics]:
        grams = collect_grams(self.passes, self.sites, self.choosing)
        sides = [self.sides(pair, index) for index, pair in enumerate(grams)]
        scores, circuits = ScoreSketch(self, sides), CircuitSketch(self, grams, sides)
        nothing = torch.zeros(0)
        layers = [
            AttentionStatistics(place, pair.query, pair.key, present.query, present.key, nothing, nothing)
            for place, pair, present in zip(self.places, grams, self.present, strict=True)
        ]
        if self.wants_score_columns:
            layers = scores.with_columns(layers)
        if self.wants_circuits:
            layers = circuits.with_circuits(layers)
        return scores.with_head_scores(layers) if self.wants_head_scores else layers
