"""Collection by probing: a few passes over the data in which all kinds and both sides are asked about at once."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from hf_grow.measuring.circuit_search import CircuitSearch
from hf_grow.measuring.collector import Collector
from hf_grow.measuring.probes import Answers, Grams, NewHead, Question, ask
from hf_grow.measuring.score_search import Present, ScoreSearch
from hf_grow.measuring.statistics import AttentionStatistics, Candidates
from hf_grow.running.batches import Batch


class SketchCollector(Collector):
    """Solves from the answers to probes, pass by pass."""

    def layers(self) -> list[AttentionStatistics]:
        searches = [_LayerSearch(self, index) for index in range(len(self.sites))]
        for number in range(self.config.passes):
            last = number == self.config.passes - 1
            questions = [search.question(number, last) for search in searches]
            what = f"pass {number + 1} of {self.config.passes}"
            answers = self._ask(self.choosing, questions, what)
            # What one layer answered is let go before the next is looked at.
            for search in searches:
                search.take(number, answers.pop(0))
        layers = []
        while searches:
            layers.append(searches.pop(0).solve())
        if not self.judged:
            return layers
        answers = self._ask(self.judging, [_judging(layer) for layer in layers], "judging")
        return [_judged(layer, answer) for layer, answer in zip(layers, answers, strict=True)]

    def head_scores(self, layers: Sequence[AttentionStatistics], heads: Sequence[NewHead]) -> list[Candidates]:
        """The query/key side of new heads that attend uniformly so far, one for each of the collector's layers."""
        searches = []
        for place, present in zip(self.places, self.present, strict=True):
            width = place.query_key_dim + self.config.oversampling
            searches.append(ScoreSearch(place.group, 1, place.inputs, width, present.key))
        for number in range(self.config.passes):
            probes = [
                search.next(self.generator, False) if number else search.start(self.generator) for search in searches
            ]
            questions = [
                Question(key=part.key, query=part.query, head=head) for part, head in zip(probes, heads, strict=True)
            ]
            what = f"scores of new heads, pass {number + 1} of {self.config.passes}"
            answers = self._ask(self.choosing, questions, what)
            for index, (search, answer, layer) in enumerate(zip(searches, answers, layers, strict=True)):
                if number:
                    search.take(answer)
                else:
                    free = self.sides(Grams(layer.query_gram, layer.key_gram), index).free().to(search.like)
                    search.take_start(answer, free, free, None)
        found = [search.solve(place.query_key_dim) for search, place in zip(searches, self.places, strict=True)]
        if not self.judged:
            return found
        questions = [Question(key=part.second, head=head) for part, head in zip(found, heads, strict=True)]
        answers = self._ask(self.judging, questions, "judging the scores of new heads")
        return [_judged_scores(part, answer) for part, answer in zip(found, answers, strict=True)]

    def _ask(self, batches: Sequence[Batch], questions: Sequence[Question], what: str) -> list[Answers]:
        return ask(self.passes, self.sites, batches, questions, what)


class _LayerSearch:
    """What is searched for in one layer."""

    def __init__(self, collector: Collector, index: int) -> None:
        self.collector, self.index = collector, index
        place, like = collector.places[index], collector.present[index].key
        self.scores: ScoreSearch | None = None
        if collector.wants_score_columns:
            self.scores = ScoreSearch(place.n_heads, place.n_kv_heads, place.inputs, collector.rank(index), like)
        # For the patterns of the present heads, and for the uniform one.
        self.circuits: list[CircuitSearch] = []
        if collector.wants_circuits:
            sizes = place.inputs["value"], place.inputs["output"], collector.circuit_width()
            self.circuits = [
                CircuitSearch(place.n_heads, place.n_kv_heads, *sizes, like),
                CircuitSearch(1, 1, *sizes, like),
            ]
        self.bottleneck = collector.target(index) == "bottleneck"

    def question(self, number: int, last: bool) -> Question:
        """What to ask in a pass."""
        generator = self.collector.generator
        question = Question(grams=number == 0, present=number == 0 and self.bottleneck and self.scores is not None)
        if self.scores is not None:
            # Random whitened probes need the grams.
            probes = self.scores.next(generator, number == 1) if number else self.scores.start(generator)
            question = replace(question, key=probes.key, query=probes.query)
        if self.circuits:
            parts = [part.next(last) if number else part.start(generator) for part in self.circuits]
            values = torch.cat([value for value, _ in parts])
            rows = [output for _, output in parts if output is not None]
            output = torch.cat(rows) if rows else None
            question = replace(question, value=values, metric=not last, output=output)
        return question

    def take(self, number: int, answers: Answers) -> None:
        """What was answered."""
        if number == 0:
            assert answers.grams is not None
            self.grams = answers.grams
            present = self.collector.present[self.index].key
            self.sides = self.collector.sides(answers.grams, self.index).to(present)
            for circuit in self.circuits:
                circuit.ridge = self.collector.pattern_ridge(answers.grams.key)
        if self.scores is not None and number == 0:
            self._start(answers)
        elif self.scores is not None:
            self.scores.take(answers)
        for circuit, patterns in zip(self.circuits, (slice(None, -1), slice(-1, None)), strict=False):
            circuit.take(answers, patterns)

    def _start(self, answers: Answers) -> None:
        assert self.scores is not None
        present, known = self.collector.present[self.index], None
        if self.bottleneck:
            known = Present(self.sides, present.query, present.key, answers)
        searched = self.sides if self.bottleneck else self.sides.free()
        self.scores.take_start(answers, self.sides, searched, known)

    def solve(self) -> AttentionStatistics:
        """What was found."""
        collector, index = self.collector, self.index
        present, nothing = collector.present[index], torch.zeros(0)
        layer = AttentionStatistics(
            collector.places[index],
            self.grams.query,
            self.grams.key,
            present.query,
            present.key,
            nothing,
            nothing,
        )
        if self.scores is not None:
            energies = self.scores.energies
            assert energies is not None
            layer = replace(
                layer,
                wanted=energies.wanted,
                bottleneck=energies.bottleneck,
                columns=self.scores.solve(collector.rank(index)),
            )
        if self.circuits:
            values, uniform = (self._circuit(circuit) for circuit in self.circuits)
            layer = replace(layer, values=values, uniform=uniform)
        return layer

    def _circuit(self, circuit: CircuitSearch) -> Candidates:
        gram = circuit.fine_gram()
        factor = self.collector.pattern_whitening(gram, self.grams.key, circuit.spanned.to(gram))
        return circuit.solve(factor, self.collector.circuit_rank() + self.collector.config.oversampling)


def _judging(layer: AttentionStatistics) -> Question:
    """Asks what was found of other data."""
    found = [part.first for part in (layer.values, layer.uniform) if part is not None]
    return Question(
        key=None if layer.columns is None else layer.columns.second, value=torch.cat(found) if found else None
    )


def _judged(layer: AttentionStatistics, answers: Answers) -> AttentionStatistics:
    """A layer with the gains on other data of all that was found."""
    if layer.columns is not None:
        layer = replace(layer, columns=_judged_scores(layer.columns, answers))
    if layer.values is not None and layer.uniform is not None:
        assert answers.value is not None
        values = replace(layer.values, held_out=(answers.value[:-1] * layer.values.second).sum(-1))
        uniform = replace(layer.uniform, held_out=(answers.value[-1:] * layer.uniform.second).sum(-1))
        layer = replace(layer, values=values, uniform=uniform)
    return layer


def _judged_scores(found: Candidates, answers: Answers) -> Candidates:
    assert answers.key is not None
    return replace(found, held_out=(found.first * answers.key).sum(1))
