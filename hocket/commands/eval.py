"""`hocket eval`: the held-out loss of a model, by source."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.config import Config, DataConfig
from hocket.problems import stop_if
from hocket.settings.overrides import given, split, value_of
from hocket.settings.schema import changed, impossible, problem, types

if TYPE_CHECKING:
    from hocket.model.transformer import Chunk
    from hocket.train.corpus import Corpus
    from hocket.train.data import Shuffled

USAGE = """usage: hocket eval RUN|FOLDER --data.paths PATH...

The loss of a model in nats per token: of a run's newest checkpoint, a checkpoint, or a folder of Hugging Face. Every
token of the text that is learnt counts once; hocket eval RUN --data.sources FILE also tells the loss of each source.

  --data.paths, --data.sources   the text, none of which is kept back (docs/data.md)
  --data.*                       how it is read: as the run has read its own, a folder with data.packing = on and
                                 data.sequence_length = 1024
  --train.sequences              sequences that are computed together, by default 1
  --train.device                 auto takes a GPU if there is one. On a CPU weights are fp32, on a GPU bf16"""
UNREAD = ("data.validation", "data.validation_paths", "data.seed")
"""Settings of text for training alone."""


def run(words: list[str]) -> int:
    """Evaluate. Returns the exit code."""
    if {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    if not words or words[0].startswith("-"):
        raise ValueError("hocket eval (command line): no model; fix: hocket eval RUN --data.paths my/texts")
    model, *flags = words
    from hocket.commands.generate import device_of, filled, opened
    from hocket.train.corpus import open_corpus
    from hocket.train.sources import read_sources

    try:
        sizes, value, read, *_ = opened(Path(model))
    except (OSError, ValueError) as error:
        fix = "a run with a whole checkpoint, or a folder of a family that hocket computes"
        raise ValueError(f"eval {model} (command line): {error}; fix: {fix}") from None
    if (Path(model) / "config.json").exists():
        read = replace(read, packing="on", sequence_length=1024)
    config, origins = configured(Config(model=sizes, data=replace(read, paths=(), sources="")), flags)
    chunk, found = filled(sizes, value, device_of(config.train.device)), list[tuple[float, int]]()
    for source in read_sources(config.data, origins):
        corpus = open_corpus(replace(source.data, validation=0.0, validation_paths=()), source.origins)
        if corpus.vocab > sizes.vocab:
            reason, fix = f"has {corpus.vocab} tokens, and the model {sizes.vocab}", "the model's own tokenizer"
            raise ValueError(problem("data.tokenizer", source.data.tokenizer, source.origins, reason, fix))
        found.append(_loss(chunk, corpus, source.data, config.train.sequences))
        if source.name:
            print(_line(source.name, *found[-1]))
    total, count = (sum(each) for each in zip(*found, strict=True))
    if not count:
        raise ValueError("hocket eval (command line): no token of it is learnt; fix: text with answers")
    if len(found) > 1 or not config.data.sources:
        print(_line("all" if len(found) > 1 else "", total, int(count)))
    return 0


def configured(config: Config, flags: list[str]) -> tuple[Config, dict[str, str]]:
    """The settings with those of the command line. Raises ValueError for flags that mean nothing here."""
    origins, problems = given(flags, config, {})
    read = {name for name in types() if name.startswith("data.") and name not in UNREAD}
    for name in origins.keys() - read - {"train.sequences", "train.device"}:
        problems.append(f"{name} ({origins[name]}): no effect on an evaluation; fix: leave it out")
    if not problems and not {"data.paths", "data.sources"} & origins.keys():
        problems.append("hocket eval (command line): no text; fix: --data.paths my/texts")
    stop_if(problems)
    said = {flag.removeprefix("--").replace("-", "_"): values for flag, values in split(flags, [])}
    config = changed(config, {name: value_of(values, types()[name]) for name, values in said.items()})
    stop_if(list(impossible(config, origins).values()))
    return config, origins


def _line(name: str, total: float, count: int) -> str:
    mean = total / max(count, 1)
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return f"{name and f'{name}  '}loss {mean:.6f} nats per token, perplexity {perplexity:.4g}, {count:,} tokens"


def _streams(corpus: Corpus, data: DataConfig) -> Iterator[Shuffled]:
    """All sequences of a text, and where sequences are cut from it what is left behind the last one."""
    from hocket.train.data import Bins, Stream

    tokens, length = corpus.train, data.sequence_length
    if data.packing == "best_fit":
        stream = Bins(tokens, length, 0, corpus.whole_documents[0], corpus.masked)
        if stream.left_out:
            print(f"note: {stream.left_out:,} documents longer than {length} tokens are left out")
        yield stream
        return
    packed, rest = data.packing == "on", max(len(tokens) - 1, 0) % length
    for size, first in ((length, 0), (rest, len(tokens) - 1 - rest)):
        if size:
            starts = corpus.starts - first if packed else None
            yield Stream(tokens[first:], size, 0, starts, corpus.masked - first)


def _loss(chunk: Chunk, corpus: Corpus, data: DataConfig, together: int) -> tuple[float, int]:
    """The sum of losses over a text's learnt tokens, and their number."""
    import torch

    from hocket.kernels import IGNORED
    from hocket.model.documents import documents_of

    total, learnt = 0.0, 0
    device = next(chunk.parameters()).device
    with torch.no_grad():
        for stream in _streams(corpus, data):
            for first in range(0, stream.sequences, together):
                rows = stream.batch(range(first, min(first + together, stream.sequences)))
                ids, targets = (x.to(device) for x in rows[:2])
                documents = None if rows[2] is None else documents_of(rows[2]).to(device)
                count = int((targets != IGNORED).sum())
                total += float(chunk.loss(chunk(ids, documents), targets)) * count
                learnt += count
    return total, learnt
