"""Collection by probing: a few passes over the data in which all kinds and both sides are asked about at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hf_grow.measuring.circuit_search import CircuitProbes, CircuitSearch
from hf_grow.measuring.collector import Collector
from hf_grow.measuring.probes import Answers, Grams, NewHead, Question, ask
from hf_grow.measuring.score_search import RandomProbes, Reached, ScoreProbes, ScoreSearch
from hf_grow.measuring.statistics import AttentionStatistics, Candidates
from hf_grow.running.batches import Batch

# After so many passes something is known of everything.
LEAST_PASSES = 2
# The heads and key heads of the uniform pattern.
UNIFORM_SIZES = (1, 1)
# Of what is asked for all patterns of a layer: that of the present heads, and of the uniform one.
PATTERNS = (slice(None, -1), slice(-1, None))


class SketchCollector(Collector):
    """Solves from the answers to probes, pass by pass."""

    def layers(self) -> list[AttentionStatistics]:
        searches = self._first_pass()
        known = 1
        try:
            for known in range(1, self.config.passes):
                self._pass(searches, known)
        except KeyboardInterrupt:
            if known < LEAST_PASSES:
                raise
            self.interrupted = True
        layers: list[AttentionStatistics] = []
        while searches:
            self.passes.progress.say(f"solving layer {len(layers) + 1} of {len(self.sites)}")
            layers.append(searches.pop(0).solve())
        return self._judged(layers) if self.judged and not self.interrupted else layers

    def _first_pass(self) -> "list[_LayerSearch]":
        starts = [_LayerStart.draw(self, index) for index in range(len(self.sites))]
        answers = self._ask(self.choosing, [start.question() for start in starts], self._name(0))
        searches: list[_LayerSearch] = []
        while starts:
            self.passes.progress.say(f"layer {len(searches) + 1} of {len(self.sites)}")
            # What one layer was asked and answered is let go before the next is looked at.
            searches.append(_LayerSearch(self, len(searches), starts.pop(0), answers.pop(0)))
        return searches

    def _pass(self, searches: "Sequence[_LayerSearch]", number: int) -> None:
        """Ask in all layers, and have them take their answers."""
        last = number == self.config.passes - 1
        # Random whitened probes need the grams, which the first pass takes along.
        probes = [search.ask(last, measuring=number == 1) for search in searches]
        answers = self._ask(self.choosing, [part.question(last) for part in probes], self._name(number))
        for index, (search, part) in enumerate(zip(searches, probes, strict=True)):
            self.passes.progress.say(f"layer {index + 1} of {len(searches)}")
            search.take(part, answers.pop(0))

    def _judged(self, layers: list[AttentionStatistics]) -> list[AttentionStatistics]:
        try:
            answers = self._ask(self.judging, [_judging(layer) for layer in layers], "judging")
        except KeyboardInterrupt:
            self.interrupted = True
            return layers
        return [_judged(layer, answer) for layer, answer in zip(layers, answers, strict=True)]

    def head_scores(self, layers: Sequence[AttentionStatistics], heads: Sequence[NewHead]) -> list[Candidates]:
        """The query/key side of new heads that attend uniformly so far, one for each of the collector's layers."""
        what = "scores of new heads, "
        # More than there are columns now, for layers that become wider.
        ranks = [place.query_key_dim + self.config.oversampling for place in self.places]
        first = [
            RandomProbes.draw(place.group, 1, place.inputs, rank, self.like(index), self.generator)
            for index, (place, rank) in enumerate(zip(self.places, ranks, strict=True))
        ]
        questions = [
            Question(key=part.key, query=part.query, head=head) for part, head in zip(first, heads, strict=True)
        ]
        answers = self._ask(self.choosing, questions, what + self._name(0))
        searches = []
        for index, (part, answer, layer) in enumerate(zip(first, answers, layers, strict=True)):
            sides = self.sides(Grams(layer.query_gram, layer.key_gram), index).free().to(part.key)
            searches.append(ScoreSearch(part, answer, sides, sides))
        for number in range(1, self.config.passes):
            probes = [search.ask() for search in searches]
            questions = [
                Question(key=part.key_weights, query=part.query_weights, head=head)
                for part, head in zip(probes, heads, strict=True)
            ]
            answers = self._ask(self.choosing, questions, what + self._name(number))
            for search, asked, answer in zip(searches, probes, answers, strict=True):
                search.take(asked, answer)
        found = [search.solve(rank) for search, rank in zip(searches, ranks, strict=True)]
        if not self.judged:
            return found
        questions = [Question(key=part.second, head=head) for part, head in zip(found, heads, strict=True)]
        answers = self._ask(self.judging, questions, what + "judging")
        return [_judged_scores(part, answer) for part, answer in zip(found, answers, strict=True)]

    def _ask(self, batches: Sequence[Batch], questions: Sequence[Question], what: str) -> list[Answers]:
        return ask(self.passes, self.sites, batches, questions, what)

    def _name(self, number: int) -> str:
        return f"pass {number + 1} of {self.config.passes}"


@dataclass(frozen=True)
class _LayerStart:
    """The first, random probes of a layer; `present` where the present columns are asked about too."""

    scores: RandomProbes | None
    circuits: list[CircuitProbes]
    present: bool
    heads: tuple[int, int]

    @classmethod
    def draw(cls, collector: Collector, index: int) -> "_LayerStart":
        """For what is wanted of a layer."""
        place, like, generator = collector.places[index], collector.like(index), collector.generator
        sizes = place.n_heads, place.n_kv_heads
        scores, circuits = None, []
        if collector.wants_score_columns:
            scores = RandomProbes.draw(*sizes, place.inputs, collector.rank(index), like, generator)
        if collector.wants_circuits:
            ends, width = (place.inputs["value"], place.inputs["output"]), collector.circuit_width()
            circuits = [
                CircuitProbes.draw(heads, groups, *ends, width, like, generator)
                for heads, groups in (sizes, UNIFORM_SIZES)
            ]
        present = scores is not None and collector.target(index) == "bottleneck"
        return cls(scores, circuits, present, (place.n_heads, 1))

    def question(self) -> Question:
        """These probes, and what only the first pass is asked."""
        question = _circuit_question(self.circuits, self.heads, metric=True)
        if self.scores is not None:
            question = replace(question, key=self.scores.key, query=self.scores.query)
        return replace(question, grams=True, present=self.present)


@dataclass(frozen=True)
class _LayerProbes:
    """The probes of a layer in a later pass."""

    scores: ScoreProbes | None
    circuits: list[CircuitProbes]
    heads: tuple[int, int]

    def question(self, last: bool) -> Question:
        """These probes as the model takes them; after the last pass nobody looks at NΩ."""
        question = _circuit_question(self.circuits, self.heads, metric=not last)
        if self.scores is None:
            return question
        return replace(question, key=self.scores.key_weights, query=self.scores.query_weights)


def _circuit_question(circuits: Sequence[CircuitProbes], heads: tuple[int, int], metric: bool) -> Question:
    if not circuits:
        return Question()
    outputs = [part.output(count) for part, count in zip(circuits, heads, strict=True)]
    rows = [output for output in outputs if output is not None]
    values = torch.cat([part.columns for part in circuits])
    return Question(value=values, metric=metric, output=torch.cat(rows) if rows else None)


class _LayerSearch:
    """What is searched for in one layer, from the answers to random probes on."""

    def __init__(self, collector: Collector, index: int, start: _LayerStart, answers: Answers) -> None:
        assert answers.grams is not None
        self.collector, self.index, self.heads, self.grams = collector, index, start.heads, answers.grams
        self.scores: ScoreSearch | None = None
        if start.scores is not None:
            sides = collector.sides(answers.grams, index).to(collector.like(index))
            reached = Reached.by(collector.present(index), sides, answers) if start.present else None
            self.scores = ScoreSearch(start.scores, answers, sides, collector.searched(sides, index), reached)
        width, ridge = collector.circuit_width(), collector.pattern_ridge(answers.grams.key)
        self.circuits = [
            CircuitSearch(first, answers, patterns, width, ridge)
            for first, patterns in zip(start.circuits, PATTERNS, strict=False)
        ]

    def ask(self, last: bool, measuring: bool) -> _LayerProbes:
        """The probes of the next pass."""
        generator = self.collector.generator if measuring else None
        scores = None if self.scores is None else self.scores.ask(generator)
        return _LayerProbes(scores, [circuit.ask(last) for circuit in self.circuits], self.heads)

    def take(self, probes: _LayerProbes, answers: Answers) -> None:
        """What was answered to these."""
        if self.scores is not None and probes.scores is not None:
            self.scores.take(probes.scores, answers)
        for circuit, asked in zip(self.circuits, probes.circuits, strict=True):
            circuit.take(asked, answers)

    def solve(self) -> AttentionStatistics:
        """What was found."""
        place, present, nothing = (
            self.collector.places[self.index],
            self.collector.present(self.index),
            torch.zeros(0),
        )
        layer = AttentionStatistics(
            place, self.grams.query, self.grams.key, present.query, present.key, nothing, nothing
        )
        if self.scores is not None and self.scores.energies is not None:
            columns = self.scores.solve(self.collector.rank(self.index))
            layer = replace(layer, columns=columns, **vars(self.scores.energies))
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
