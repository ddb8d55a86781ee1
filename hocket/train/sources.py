"""The text of a run: one source, or several weighted ones, listed in a TOML file.

[web]
paths = ["corpus/web"]
weight = 0.7

[code]
paths = ["corpus/code/*.parquet"]
text_key = "content"
weight = {0 = 0.3, 1000 = 0.5}    # 0.5 from step 1000 on
validation = ["held-out/code.jsonl"]
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hocket.config import Config, DataConfig
from hocket.config.load import Entry, as_setting, read
from hocket.config.rule import problem, show
from hocket.config.schema import impossible, meant, types
from hocket.problems import stop_if
from hocket.resolve import Settings
from hocket.train.corpus import Asked, Corpus, Say, find_files, open_corpus
from hocket.typed import is_a

# -- mix ---------------------------------------------------------------------------------------------------------------
# Which source is at which position of the stream.
#
# Note: [The source of a position is a function of the position]
# A run's only state is the number of consumed sequences, from which any number of ranks can continue. So the source at
# a position, and the index of its sequence, may depend only on settings and the position. Weights apply to sequences of
# equal length, not to documents: otherwise long documents would shift the mix.
#
# Between two changes of weights, sources get sequences as parties get seats by Webster's method: the k-th sequence
# (from 0) of a source with share w is due at time (k + 1/2) / w, and sequences are sorted by these times. At time t a
# source has t * w sequences, rounded, so after n sequences of S sources it has n * w, within 1/2 + w * S / 2. The order
# repeats after as many sequences as the integer weights add up to. Within blocks of `BLOCK` sequences, sources are then
# shuffled. Otherwise a mix of two halves would give one source to all even data-parallel ranks, the other to the odd.

BLOCK = 64
"""Number of sequences within which sources are shuffled."""
PERIOD = 1 << 20
"""Longest period of the order of sources. Weights that need a longer one are rounded."""


class Quotas:
    """How sources share a stream. `changes` has ascending positions, from 0, and the weights from each position on.

    Weights are at least 0, and one of each change is above 0. Two streams whose weights are the same up to a position
    have the same sources up to it, whatever follows.
    """

    def __init__(self, changes: Sequence[tuple[int, Sequence[Fraction]]], seed: int = 0) -> None:
        assert changes[0][0] == 0
        self._firsts, self._seed = [first for first, _ in changes], seed
        self._weights = [_whole(weights) for _, weights in changes]
        self._block = (-1, -1)
        self._order = self._sources = _order(self._weights[0])
        """Sources of one period, in the current segment."""
        self._taken = self._weights[0]
        self._before = [np.zeros_like(self._weights[0])]
        for first in self._firsts[1:]:
            self._before.append(np.array(self.counts(first)))

    def place(self, position: int) -> tuple[int, int]:
        """(source, index among its sequences, counted over all its epochs) at a position."""
        segment, offset = self._find(position)
        source = int(self._sources[offset])
        return source, self._count(segment, offset, source)

    def counts(self, position: int) -> list[int]:
        """Sequences of each source before a position."""
        if not position:
            return [0] * len(self._weights[0])
        segment, offset = self._find(position - 1)
        return [self._count(segment, offset + 1, source) for source in range(len(self._taken))]

    def shares(self, position: int) -> list[Fraction]:
        """Share of each source from a position on."""
        weights = self._weights[bisect_right(self._firsts, position) - 1]
        return [Fraction(int(weight), int(weights.sum())) for weight in weights]

    def _count(self, segment: int, offset: int, source: int) -> int:
        within = int(np.count_nonzero(self._sources[:offset] == source))
        return int(self._before[segment][source] + self._taken[source]) + within

    def _find(self, position: int) -> tuple[int, int]:
        """Make a position's block the current one. Returns its segment and the offset in the block."""
        segment = min(bisect_right(self._firsts, position), len(self._before)) - 1
        block, offset = divmod(position - self._firsts[segment], BLOCK)
        if (segment, block) != self._block:
            weights = self._weights[segment]
            if segment != self._block[0]:
                self._order = _order(weights)
            self._block, order = (segment, block), self._order
            periods, rest = divmod(block * BLOCK, len(order))
            self._taken = periods * weights + np.bincount(order[:rest], minlength=len(weights))
            shuffled = np.random.default_rng([self._seed, segment, block]).permutation(BLOCK)
            self._sources = np.take(order, rest + np.arange(BLOCK), mode="wrap")[shuffled]
        return segment, offset


def _whole(weights: Sequence[Fraction]) -> np.ndarray:
    """The weights as integers whose sum is at most about `PERIOD`."""
    factor = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * factor) for weight in weights]
    whole = [weight // math.gcd(*whole) for weight in whole]
    if (total := sum(whole)) > PERIOD:
        whole = [max(round(weight * PERIOD / total), min(weight, 1)) for weight in whole]
    return np.array(whole)


def _order(weights: np.ndarray) -> np.ndarray:
    """The source of each sequence of a period."""
    due = np.concatenate([(np.arange(weight) + 0.5) / max(weight, 1) for weight in weights])
    return np.repeat(np.arange(len(weights)), weights)[np.argsort(due, kind="stable")]


# -- sources -----------------------------------------------------------------------------------------------------------

PER_SOURCE = ("paths", "text_key", "validation")
"""Settings of `data` that each source may set."""
WEIGHT = 1
"""Default weight of a source."""


@dataclass(frozen=True)
class Source:
    """One source. The only source of a run has no name."""

    name: str
    data: DataConfig
    """The settings that apply to this source alone."""
    origins: Mapping[str, str]
    weights: tuple[tuple[int, Fraction], ...] = ((0, Fraction(WEIGHT)),)
    """Ascending steps, and the weight from each step on."""

    @property
    def has_validation(self) -> bool:
        """Whether part of its text is for validation."""
        return bool(self.data.held_out) or self.data.kept_back > 0

    def weight(self, step: int) -> Fraction:
        """The weight at a step, counted from 0."""
        return next((weight for first, weight in reversed(self.weights) if first <= step), Fraction(0))


@dataclass(frozen=True)
class Text:
    """All text that a run reads."""

    sources: tuple[Source, ...]
    corpora: tuple[Corpus, ...]
    """One for each source."""
    quotas: Quotas
    shares: tuple[float, ...]
    """Share of each source in the sequences of the whole run."""
    batch: int
    """Sequences of a step."""

    @cached_property
    def unigram_entropy(self) -> float:
        """Loss of a model that predicts the token frequencies of the mix, in nats per token.

        The cross-entropy of validation tokens under the frequencies of training tokens (each count plus one, so that no
        token is impossible), or of training tokens if no source has validation. For a mix, the mean by shares.
        """
        counts = [corpus.counts for corpus in self.corpora]
        seen = [each + 1 for each, _ in counts]
        mixed = sum(share * each / each.sum() for share, each in zip(self.shares, seen, strict=True))
        losses = {}
        for source, (learnt, held) in zip(self.sources, counts, strict=True):
            asked = held if any(each.any() for _, each in counts) else learnt
            if asked.any():
                losses[source.name] = float(-(asked * np.log(mixed)).sum() / asked.sum())
        return self.mean(losses)

    def mean(self, losses: Mapping[str, float]) -> float:
        """The mean of losses by source, weighed by the shares of the sources in the whole run."""
        shares = {source.name: share for source, share in zip(self.sources, self.shares, strict=True)}
        total = sum(shares[name] for name in losses)
        if len(losses) == 1 or not total:
            return sum(losses.values()) / len(losses)
        return sum(shares[name] * loss for name, loss in losses.items()) / total

    @property
    def fingerprint(self) -> list[int]:
        """Numbers that differ between two ranks that found different text. Their count is the same on all ranks."""
        each = [(len(c.train.tokens), len(c.validation.tokens), c.documents, c.sample) for c in self.corpora]
        return [len(each), *(int(x) for x in np.array(each, dtype=np.int64).T @ np.arange(1, len(each) + 1))]

    @property
    def samples(self) -> list[int]:
        """Checksums of the first and last tokens of each source, which the text's description does not cover."""
        return [corpus.sample for corpus in self.corpora]

    def __str__(self) -> str:
        return self.up_to(math.inf)

    def up_to(self, position: float) -> str:
        """Describe the text, with the weights up to a position: later ones may change."""
        if not self.sources[0].name:
            return str(self.corpora[0])
        each = zip(self.sources, self.corpora, strict=True)
        return "; ".join(f"{source.name} ({self._said(source, position)}): {corpus}" for source, corpus in each)

    def _said(self, source: Source, position: float) -> str:
        """The weights of a source, with the first sequence of each, since a step's position depends on the batch."""
        (_, first), *later = source.weights
        texts = [
            f"{float(w):g} from step {s} (sequence {s * self.batch:,}) on"
            for s, w in later
            if s * self.batch < position
        ]
        return f"weight {', '.join([f'{float(first):g}', *texts])}"


def open_text(settings: Settings, say: Say = lambda words: None) -> Text:
    """All text of a run, from the cache or tokenised now.

    Raises ValueError for an invalid sources file, with all of its mistakes, and where `open_corpus` does.
    """
    sources = read_sources(settings.data, settings.origins)
    without = Path(settings.run.folder)
    _require_apart(sources, without)
    corpora = tuple(open_corpus(source.data, source.origins, without=without, say=say) for source in sources)
    quotas = quotas_of(sources, settings.batch, settings.train.seed)
    total = settings.batch * settings.train.steps
    shares = tuple(count / total for count in quotas.counts(total))
    return Text(sources, corpora, quotas, shares, settings.batch)


def quotas_of(sources: Sequence[Source], batch: int, seed: int) -> Quotas:
    """How sources share a stream whose steps take `batch` sequences."""
    steps = sorted({first for source in sources for first, _ in source.weights})
    return Quotas([(step * batch, [source.weight(step) for source in sources]) for step in steps], seed)


def _require_apart(sources: Sequence[Source], without: Path) -> None:
    """Raise ValueError if a file is read twice: training and validation text must be disjoint."""
    found: dict[Path, str] = {}
    for source in sources:
        for setting, paths in (("paths", source.data.paths), ("validation", source.data.held_out)):
            if setting == "validation" and not paths:
                continue
            asked = Asked(f"data.{setting}", paths, source.origins)
            for file in find_files(asked, without):
                where = f"[{source.name}] {setting}" if source.name else f"data.{setting}"
                one = file.resolve()
                if found.setdefault(one, where) != where:
                    raise asked.refused(f"{file} is in {found[one]} too", "name every file once")


def read_sources(data: DataConfig, origins: Mapping[str, str]) -> tuple[Source, ...]:
    """The sources that the settings name. Raises ValueError with all mistakes of the file."""
    if not data.sources:
        return (Source("", data, origins),)
    file = data.sources
    if not Path(file).is_file():
        raise ValueError(problem("data.paths", file, origins, "there is no such file", "name a TOML file"))
    tables: dict[str, list[Entry]] = {}
    problems: list[str] = []
    for entry in read(file):
        name, _, key = entry.name.partition(".")
        if not key and not isinstance(entry.value, dict):
            problems.append(f"{name} ({file}:{entry.line}): belongs to no source; fix: [a-name] above it")
        elif key:
            tables.setdefault(name, []).append(Entry(key, entry.value, entry.line))
        else:  # an inline table, or a source without keys
            inside = [Entry(key, value, entry.line) for key, value in entry.value.items()]
            tables.setdefault(name, []).extend(inside)
    sources = [_source(name, entries, data, origins, problems) for name, entries in tables.items()]
    if not tables and not problems:
        problems.append(problem("data.paths", file, origins, "names no source", "[a-name] with paths below it"))
    if not problems:
        for step in sorted({first for source in sources for first, _ in source.weights}):
            if not any(source.weight(step) for source in sources):
                reason = f"the weights of all sources are 0 from step {step} on"
                problems.append(problem("data.paths", file, origins, reason, "a weight above 0"))
    stop_if(problems, f"keys of {file}")
    return tuple(sources)


def _source(
    name: str, entries: list[Entry], data: DataConfig, origins: Mapping[str, str], problems: list[str]
) -> Source:
    file = data.sources
    changes, found, weights = dict[str, Any](), {**origins, "data.paths": f"{file}: [{name}]"}, Source.weights
    for key, value, line in ((entry.name, entry.value, entry.line) for entry in entries):
        if key == "weight":
            weights = tuple(_weights(f"[{name}] {key} = {show(value)} ({file}:{line})", value, problems)) or weights
        elif key in PER_SOURCE:
            changes[key] = as_setting(value, types()[f"data.{key}"])
            found[f"data.{key}"] = f"{file}:{line}, [{name}]"
        else:
            close = meant(key, [*PER_SOURCE, "weight"])
            fix = f"did you mean {close}?" if close else f"one of {', '.join(PER_SOURCE)}, weight"
            problems.append(f"[{name}] {key} ({file}:{line}): there is no such key; fix: {fix}")
    own = dataclasses.replace(data, **changes)
    wrong = impossible(dataclasses.replace(Config(), data=own), found)
    problems += [wrong[f"data.{key}"] for key in changes if f"data.{key}" in wrong]
    if "data.validation" not in wrong and len(own.validation) > 1 and len(own.held_out) < len(own.validation):
        reason, fix = "one share, or files and folders", "one of them"
        problems.append(problem("data.validation", own.validation, found, reason, fix))
    if "data.text_key" not in wrong and len(own.text_key) not in (1, 2):
        reason, fix = "not the name of the text, or of prompt and text", "one name, or two"
        problems.append(problem("data.text_key", own.text_key, found, reason, fix))
    if (
        "data.paths" not in wrong
        and not changes.get("paths")
        and not any(p.startswith(f"[{name}] path") for p in problems)
    ):
        problems.append(f'[{name}] ({file}): names no text; fix: paths = ["a-folder"] below it')
    return Source(name, own, found, weights)


def _weights(where: str, value: Any, problems: list[str]) -> Iterator[tuple[int, Fraction]]:
    """Ascending steps and the weight from each on. A table gives weights by step."""
    given = value if isinstance(value, dict) else {"0": value}
    if not all(step.isdecimal() for step in given) or "0" not in given:
        problems.append(f"{where}: not weights by first step; fix: such as {{0 = 0.3, 1000 = 0.5}}")
        return
    for step, weight in sorted(given.items(), key=lambda pair: int(pair[0])):
        if not is_a(weight, float) or not 0 <= weight < math.inf:
            problems.append(f"{where}: {weight} is no weight; fix: a number, 0 or more")
            return
        yield int(step), Fraction(str(weight))
