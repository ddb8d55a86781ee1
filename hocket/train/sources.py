"""The text of a run: one source, or several with weights, as a file of TOML names them.

[web]
paths = ["corpus/web"]
weight = 0.7

[code]
paths = ["corpus/code/*.parquet"]
text_key = "content"
weight = {0 = 0.3, 1000 = 0.5}    # 0.5 from step 1000 on
validation_paths = ["held-out/code.jsonl"]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hocket.config import DataConfig
from hocket.problems import stop_if
from hocket.resolve import Settings
from hocket.settings.schema import problem
from hocket.settings.sources import as_setting
from hocket.settings.suggest import meant
from hocket.settings.tomlfile import Entry, read
from hocket.train.corpus import Corpus, find_files, open_corpus
from hocket.train.mix import Quotas
from hocket.train.tokenising import Say
from hocket.typed import describe, is_a

LENT = {
    "paths": tuple[str, ...],
    "text_key": str,
    "prompt_key": str,
    "validation": float,
    "validation_paths": tuple[str, ...],
}
"""Settings of `data` that a source may have for itself, with their types."""
WEIGHT = 1
"""Weight of a source that names none."""


@dataclass(frozen=True)
class Source:
    """One source. The only source of a run has no name."""

    name: str
    data: DataConfig
    """Settings as if it were the only one."""
    origins: Mapping[str, str]
    weights: tuple[tuple[int, Fraction], ...] = ((0, Fraction(WEIGHT)),)
    """First steps, ascending, and the weight from there on."""

    @property
    def has_validation(self) -> bool:
        """Whether some of its text is for validation."""
        return bool(self.data.validation_paths) or self.data.validation > 0

    def weight(self, step: int) -> Fraction:
        """Its weight in a step, counted from 0."""
        return next((weight for first, weight in reversed(self.weights) if first <= step), Fraction(0))


@dataclass(frozen=True)
class Text:
    """What a run reads."""

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
        """Loss of a model that knows only how often each token occurs in the mix, in nats per token.

        As the validation loss of a mix, a mean over the sources that have validation tokens, by their shares.
        """
        if len(self.corpora) == 1:
            return self.corpora[0].unigram_entropy
        counts = [corpus.counts() for corpus in self.corpora]
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
        """Numbers that are the same on two ranks only if they have found the same text. All have as many."""
        each = [(len(c.train), len(c.validation), c.documents, c.sample) for c in self.corpora]
        return [len(each), *(int(x) for x in np.array(each, dtype=np.int64).T @ np.arange(1, len(each) + 1))]

    @property
    def samples(self) -> list[int]:
        """Checksums of where the text of each source begins and ends, which its numbers do not tell."""
        return [corpus.sample for corpus in self.corpora]

    def __str__(self) -> str:
        return self.up_to(math.inf)

    def up_to(self, position: float) -> str:
        """What is read, with the weights up to a position: those from there on may change."""
        if not self.sources[0].name:
            return str(self.corpora[0])
        each = zip(self.sources, self.corpora, strict=True)
        return "; ".join(f"{source.name} ({self._said(source, position)}): {corpus}" for source, corpus in each)

    def _said(self, source: Source, position: float) -> str:
        """Its weights. Their first sequences are told: with another batch a position means another place."""
        (_, first), *later = source.weights
        texts = [
            f"{float(w):g} from step {s} (sequence {s * self.batch:,}) on"
            for s, w in later
            if s * self.batch < position
        ]
        return f"weight {', '.join([f'{float(first):g}', *texts])}"


def open_text(settings: Settings, say: Say = lambda words: None) -> Text:
    """All that a run reads, from the cache or tokenised now.

    Raises ValueError for a file of sources that is none, with all of its mistakes, and for what `open_corpus` refuses.
    """
    sources = read_sources(settings.data, settings.origins)
    without = Path(settings.run.folder)
    _require_apart(sources, without)
    corpora = tuple(open_corpus(source.data, source.origins, without=without, say=say) for source in sources)
    quotas = quotas_of(sources, settings.batch, settings.data.seed)
    total = settings.batch * settings.train.steps
    shares = tuple(count / total for count in quotas.counts(total))
    return Text(sources, corpora, quotas, shares, settings.batch)


def quotas_of(sources: Sequence[Source], batch: int, seed: int) -> Quotas:
    """How sources share a stream of which a step takes `batch` sequences."""
    steps = sorted({first for source in sources for first, _ in source.weights})
    return Quotas([(step * batch, [source.weight(step) for source in sources]) for step in steps], seed)


def _require_apart(sources: Sequence[Source], without: Path) -> None:
    """Raise ValueError if a file is read twice: what is learnt from must not be what is validated with."""
    found: dict[Path, str] = {}
    for source in sources:
        for setting in ("paths", "validation_paths"):
            paths = getattr(source.data, setting)
            if setting == "validation_paths" and not paths:
                continue
            for file in find_files(paths, source.origins, without, f"data.{setting}"):
                where = f"[{source.name}] {setting}" if source.name else f"data.{setting}"
                if file in found:
                    reason = f"{file} is in {found[file]} too"
                    name = f"data.{setting}"
                    raise ValueError(problem(name, paths, source.origins, reason, "name every file once"))
                found[file] = where


def read_sources(data: DataConfig, origins: Mapping[str, str]) -> tuple[Source, ...]:
    """The sources that the settings name. Raises ValueError with all mistakes of the file."""
    if not data.sources:
        return (Source("", data, origins),)
    file = data.sources
    if not Path(file).is_file():
        raise ValueError(problem("data.sources", file, origins, "there is no such file", "name a TOML file"))
    tables: dict[str, list[Entry]] = {}
    problems: list[str] = []
    for entry in read(file):
        name, _, key = entry.name.partition(".")
        if not key and not isinstance(entry.value, dict):
            problems.append(f"{name} ({file}:{entry.line}): belongs to no source; fix: [a-name] above it")
        elif key:
            tables.setdefault(name, []).append(Entry(key, entry.value, entry.line))
        else:  # a source in braces, or one without a key
            inside = [Entry(key, value, entry.line) for key, value in entry.value.items()]
            tables.setdefault(name, []).extend(inside)
    sources = [_source(name, entries, data, origins, problems) for name, entries in tables.items()]
    if not tables and not problems:
        problems.append(problem("data.sources", file, origins, "names no source", "[a-name] with paths below it"))
    if not problems:
        for step in sorted({first for source in sources for first, _ in source.weights}):
            if not any(source.weight(step) for source in sources):
                reason = f"the weights of all sources are 0 from step {step} on"
                problems.append(problem("data.sources", file, origins, reason, "a weight above 0"))
    stop_if(problems, f"keys of {file}")
    return tuple(sources)


def _source(
    name: str, entries: list[Entry], data: DataConfig, origins: Mapping[str, str], problems: list[str]
) -> Source:
    file = data.sources
    changes, found = dict[str, Any](), {**origins, "data.paths": f"{file}: [{name}]"}
    weights = Source.weights
    for key, value, line in (
        (entry.name, as_setting(entry.value, LENT.get(entry.name)), entry.line) for entry in entries
    ):
        where = f"[{name}] {key} = {value} ({file}:{line})"
        if key == "weight":
            weights = tuple(_weights(where, value, problems)) or weights
        elif key not in LENT:
            close = meant(key, [*LENT, "weight"])
            fix = f"did you mean {close}?" if close else f"one of {', '.join(LENT)}, weight"
            problems.append(f"[{name}] {key} ({file}:{line}): there is no such key; fix: {fix}")
        elif not is_a(value, LENT[key]):
            problems.append(f"{where}: not {describe(LENT[key])}; fix: give {describe(LENT[key])}")
        elif key == "validation" and not 0 <= value <= 0.9:
            problems.append(f"{where}: out of range; fix: a share from 0 to 0.9")
        else:
            changes[key] = value
            found[f"data.{key}"] = f"{file}:{line}, [{name}]"
    if not changes.get("paths") and not any(problem.startswith(f"[{name}] path") for problem in problems):
        problems.append(f'[{name}] ({file}): names no text; fix: paths = ["a-folder"] below it')
    if changes.get("validation_paths") and "validation" in changes:
        problems.append(f"[{name}] ({file}): has validation and validation_paths; fix: leave one of them out")
    return Source(name, dataclasses.replace(data, **changes), found, weights)


def _weights(where: str, value: Any, problems: list[str]) -> Iterator[tuple[int, Fraction]]:
    """First steps and weights, ascending. A table has weights by step."""
    given = value if isinstance(value, dict) else {"0": value}
    if not all(step.isdecimal() for step in given) or "0" not in given:
        problems.append(f"{where}: not weights by first step; fix: such as {{0 = 0.3, 1000 = 0.5}}")
        return
    for step, weight in sorted(given.items(), key=lambda pair: int(pair[0])):
        if not is_a(weight, float) or not 0 <= weight < math.inf:
            problems.append(f"{where}: {weight} is no weight; fix: a number, 0 or more")
            return
        yield int(step), Fraction(str(weight))
