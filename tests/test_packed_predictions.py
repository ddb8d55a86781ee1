"""Predictions go by the documents that share sequences, where the run's text is known."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hocket
from hocket.commands.plan import with_documents
from hocket.config import Config
from hocket.config.rule import Host
from hocket.config.schema import changed
from hocket.explain.build import simulated
from hocket.planning import as_json, documents_of, page_head, predict, program_of, report
from hocket.predict.hardware import H200
from hocket.program.documents import Lengths, lengths_of, merged
from hocket.recipes import recipe
from hocket.resolve import Settings, resolve
from hocket.train.data import known_documents, make_streams
from hocket.train.sources import open_text

LENGTH = 4096
GIVEN: dict[str, Any] = {
    "data.packing": "on", "data.sequence_length": LENGTH, "train.sequences": 1, "train.microbatches": 4,
    "mesh.dp": 2, "mesh.pp": 1, "hardware.gpu": "h200",
}  # fmt: skip


def settings_of(folder: Path, **more: Any) -> Settings:
    paths: dict[str, Any] = {} if "data.paths" in more else {"data.paths": (text_in(folder),)}
    config = changed(recipe("llama3_8b"), GIVEN | paths | {"data.cache": str(folder / "cache")} | more)
    return resolve(config, Host(gpus=8), dict.fromkeys(more, "test"))


def text_in(folder: Path, name: str = "text") -> str:
    draws, path = random.Random(0), folder / name
    path.mkdir(exist_ok=True)
    for n in range(60):
        if not (path / f"{n:02}.txt").exists():
            (path / f"{n:02}.txt").write_text("abcdefgh" * (1 + int(draws.lognormvariate(4, 1.5))))
    return str(path)


def pairs(lengths: Lengths) -> float:
    return sum(tokens * length / 2 for length, tokens in lengths)


@pytest.mark.parametrize("packing", ["on", "best_fit"])
@pytest.mark.parametrize("several", [False, True])
def test_documents_are_known_once_text_is_tokenised(tmp_path: Path, packing: str, several: bool) -> None:
    more: dict[str, Any] = {"data.packing": packing, "train.eval_batches": 0}
    if several:
        listed = [f'[{n}]\npaths = ["{text_in(tmp_path, n)}"]\nweight = {w}\n' for n, w in (("a", 1), ("b", 3))]
        (tmp_path / "sources.toml").write_text("".join(listed))
        more["data.paths"] = (str(tmp_path / "sources.toml"),)
    settings = settings_of(tmp_path, **more)
    assert known_documents(settings) == ()
    assert not (tmp_path / "cache").exists()
    stream, _ = make_streams(open_text(settings), settings)
    found = known_documents(settings)
    assert found == tuple(lengths_of(stream.lengths(n).tolist()) for n in range(settings.batch))
    assert {sum(tokens for _, tokens in each) for each in found} == {LENGTH}
    assert known_documents(settings_of(tmp_path, **more, **{"data.skip_empty": True})) == ()
    assert known_documents(settings_of(tmp_path, **{"data.paths": (str(tmp_path / "elsewhere"),)})) == ()


def test_a_step_is_predicted_with_them_and_says_so(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    open_text(settings)
    known, program = with_documents(settings), program_of(settings)
    short, whole = (float(predict(each, program, H200).makespan) for each in (known, settings))
    assert short < 0.99 * whole
    (told,) = [
        line for line in report(known, program_of(known), H200, 80, 0).splitlines() if line.startswith("documents")
    ]
    count = sum(tokens // length for length, tokens in merged(known.host.documents))
    assert f"those of the first step: {count}, " in told
    assert "each sequence counts as one document" in report(settings, program_of(settings), H200, 80, 0)
    assert as_json(known, program_of(known), H200)["documents"] == told.removeprefix("documents  ")
    assert as_json(known, program_of(known), H200)["predicted"]["step_seconds"] == pytest.approx(short)
    assert any("those of the first step" in line for line in page_head(known, program, H200)[1])
    assert "those of the first step" in simulated(known)[0].note
    assert simulated(known)[0].step == pytest.approx(short)


def test_a_microbatch_takes_as_long_as_that_of_the_slowest_rank(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    open_text(settings)
    known = with_documents(settings)
    sequences = known.host.documents
    dearest = sorted(sequences, key=pairs, reverse=True)
    assert sorted(documents_of(known)) == sorted(merged([each]) for each in dearest[::2]), "neighbours run together"
    total = sum(map(pairs, documents_of(known)))
    assert total < sum(max(map(pairs, sequences[n : n + 2])) for n in range(0, 8, 2))
    fewer = replace(known, train=replace(known.train, microbatches=2))
    assert documents_of(fewer) == [merged(documents_of(known))] * 2


@pytest.mark.parametrize("given", [{"data.packing": "off"}, {"precision.compute": "fp32"}], ids=str)
def test_documents_do_not_matter_where_attention_takes_as_long(tmp_path: Path, given: dict[str, Any]) -> None:
    settings = settings_of(tmp_path, **given)
    open_text(settings)
    assert with_documents(settings).host.documents == ()
    assert "documents  " not in report(settings, program_of(settings), H200, 80, 0)


def test_whoever_has_a_plan_gives_documents_of_its_own() -> None:
    config = changed(recipe("llama3_8b"), GIVEN | {"train.device": "cuda"})
    step = hocket.plan(config)
    documents = [[LENGTH]] * 4 + [[LENGTH // 4] * 4] * 4
    whole, same, less = (float(hocket.simulate(step, each).makespan) for each in ((), [[LENGTH]] * 8, documents))
    assert whole == float(predict(step.settings, step.program, step.hardware).makespan)
    assert same == pytest.approx(whole, rel=1e-9)
    assert less < 0.99 * whole
    for wrong, why in (
        (documents[1:], "of 7 sequences, and a step has 8"),
        ([*documents[1:], [LENGTH - 1]], "those of sequence 7 have 4095 tokens"),
        ([*documents[1:], [LENGTH, 0]], "4096 tokens, 0 the shortest"),
        ([*documents[1:], []], "those of sequence 7 have 0 tokens"),
    ):
        with pytest.raises(ValueError, match=why):
            hocket.simulate(step, wrong)
    with pytest.raises(ValueError, match=r"data.packing = off, so each sequence is one; fix"):
        hocket.simulate(hocket.plan(changed(config, {"data.packing": "off"})), documents)


def test_a_plan_of_the_defaults_has_no_documents() -> None:
    assert documents_of(resolve(Config())) == []
