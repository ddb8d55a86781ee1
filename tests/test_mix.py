"""Several sources in one stream: quotas by position, the file that names them, losses and epochs by source."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.config import Config, DataConfig, MeshConfig, TrainConfig
from hocket.resolve import Settings, resolve
from hocket.train.data import make_streams
from hocket.train.sources import BLOCK, Quotas, open_text, read_sources
from tests.helpers.command import ALONE, SMALL, hocket

weights = st.lists(
    st.sampled_from([Fraction(x) for x in ("0", "0.001", "0.1", "0.3", "1", "7")]), min_size=3, max_size=3
)


def quotas(*changes: tuple[int, list[Fraction]]) -> Quotas:
    return Quotas(changes)


@given(weights.filter(any), st.integers(0, 5))
def test_after_every_block_each_source_has_its_share(given_weights, block):
    position = block * BLOCK
    for share, count in zip(
        quotas((0, given_weights)).shares(0), quotas((0, given_weights)).counts(position), strict=True
    ):
        assert abs(count - share * position) <= Fraction(1, 2) + share * 3 / 2
        assert share or not count


@given(weights.filter(any), weights.filter(any), st.integers(1, 3 * BLOCK))
def test_a_position_is_one_of_one_source_and_no_sequence_is_left_out(first, second, change):
    q, total = quotas((0, first), (change, second)), change + 2 * BLOCK
    places = [q.place(position) for position in range(total)]
    assert [q.place(position) for position in reversed(range(total))] == places[::-1]
    for source in range(3):
        indices = [index for found, index in places if found == source]
        assert indices == list(range(len(indices)))
        assert q.counts(total)[source] == len(indices)
    behind = Counter(source for source, _ in places[change:])
    assert all(second[source] for source in behind)


@given(weights.filter(any), weights.filter(any), st.integers(1, 3 * BLOCK))
def test_weights_that_change_later_change_nothing_before(first, second, change):
    before, after = quotas((0, first)), quotas((0, first), (change, second))
    assert [before.place(p) for p in range(change)] == [after.place(p) for p in range(change)]


def test_halves_do_not_go_to_even_and_odd_ranks():
    q = quotas((0, [Fraction(1), Fraction(1)]))
    of_rank_0 = Counter(q.place(position)[0] for position in range(0, 4 * BLOCK, 2))
    assert min(of_rank_0.values()) > BLOCK / 2


# -- the file --------------------------------------------------------------------------------------------------------


def sources_in(folder: Path, text: str) -> str:
    path = folder / "sources.toml"
    path.write_text(text)
    return str(path)


def settings_of(folder: Path, text: str, dp: int = 1, microbatches: int = 4, eval_batches: int = 0) -> Settings:
    data = DataConfig(
        paths=(sources_in(folder, text),), cache=str(folder / "cache"), sequence_length=8, validation=(0.25,)
    )
    train = TrainConfig(microbatches=microbatches, steps=20, eval_batches=eval_batches)
    return resolve(Config(data=data, mesh=MeshConfig(dp=dp), train=train))


TWO = """
[a]
paths = ["{folder}/a"]
weight = 0.75
[b]
paths = ["{folder}/b.jsonl"]
text_key = "content"
weight = {{0 = 0.25, 10 = 0.75}}
"""


def two(folder: Path) -> str:
    (folder / "a").mkdir(exist_ok=True)
    (folder / "a" / "a.txt").write_text("a" * 400)
    rows = [json.dumps({"content": "b" * 30}) for _ in range(10)]
    (folder / "b.jsonl").write_text("\n".join(rows))
    return TWO.format(folder=folder)


def test_a_step_has_the_sources_of_its_weights_on_any_number_of_ranks(tmp_path):
    def rows(dp: int, step: int) -> list[str]:
        settings = settings_of(tmp_path, two(tmp_path), dp, 16 // dp)
        train, _ = make_streams(open_text(settings), settings)
        found = []
        for m in range(16 // dp):
            for rank in range(dp):
                ids, *_ = train.batch([step * 16 + m * dp + rank])
                found.append(bytes(ids[0].tolist()).replace(b"\0", b"").decode())
        return found

    both = [text for step in range(10, 18) for text in rows(1, step)]
    assert rows(1, 3) == rows(4, 3) == rows(2, 3)
    assert Counter(text[0] for step in range(4) for text in rows(1, step)) == {"a": 48, "b": 16}
    assert Counter(text[0] for text in both) == {"a": 64, "b": 64}


def test_epochs_say_how_often_each_source_was_read(tmp_path):
    settings = settings_of(tmp_path, two(tmp_path), microbatches=16)
    train, _ = make_streams(open_text(settings), settings)
    assert train.epochs(64) == [48 / train.streams[0].sequences, 16 / train.streams[1].sequences]


def test_a_later_change_of_weights_is_no_other_past(tmp_path):
    text = two(tmp_path)
    before = open_text(settings_of(tmp_path, text, microbatches=16))
    after = open_text(settings_of(tmp_path, text.replace("10 = 0.75", "10 = 0.75, 12 = 0.5"), microbatches=16))
    assert before.up_to(12 * 16) == after.up_to(12 * 16)
    assert before.up_to(12 * 16 + 1) != after.up_to(12 * 16 + 1)
    assert "0.5 from step 12 (sequence 192) on" in str(after)
    assert before.up_to(10 * 16).startswith("a (weight 0.75): ")


def test_losses_are_weighed_by_the_shares_of_the_run(tmp_path):
    text = open_text(settings_of(tmp_path, two(tmp_path), microbatches=16))
    assert text.shares == pytest.approx((0.5 * 0.75 + 0.5 * 0.5, 0.5 * 0.25 + 0.5 * 0.5), abs=0.01)
    assert text.mean({"a": 1.0, "b": 3.0}) == pytest.approx(text.shares[0] + 3 * text.shares[1])
    assert text.mean({"b": 3.0}) == 3.0


def test_validation_files_take_the_place_of_the_share(tmp_path):
    (tmp_path / "held.txt").write_text("h" * 50)
    (tmp_path / "a.txt").write_text("a" * 100)
    data = DataConfig(
        paths=(str(tmp_path / "a.txt"),), validation=(str(tmp_path / "held.txt"),), cache=str(tmp_path / "cache")
    )
    text = open_text(resolve(Config(data=data)))
    (corpus,) = text.corpora
    assert bytes(corpus.train.tokens) == b"a" * 100 + b"\0"
    assert bytes(corpus.validation.tokens) == b"h" * 50 + b"\0"
    assert corpus.validation.bounds.tolist() == [0, 51]


@pytest.mark.parametrize(
    ("text", "reasons"),
    [
        ("", ["names no source"]),
        ("weight = 1", ["weight", "sources.toml:1", "belongs to no source"]),
        ("[a]\nweight = 1", ["[a]", "names no text"]),
        ('[a]\npaths = ["x"]\nweight = -1', ["[a] weight = -1", "sources.toml:3", "is no weight"]),
        ('[a]\npaths = ["x"]\nweight = "much"', ["much is no weight"]),
        ('[a]\npaths = ["x"]\nweight = nan', ["is no weight"]),
        ('[a]\npaths = ["x"]\nweight = {10 = 1}', ["not weights by first step"]),
        ('[a]\npaths = ["x"]\nweight = 0', ["the weights of all sources are 0 from step 0 on"]),
        ('[a]\npaths = ["x"]\nweight = {0 = 1, 9 = 0}', ["are 0 from step 9 on"]),
        ('[a]\npath = ["x"]', ["[a] path", "did you mean paths?"]),
        ("[a]\npaths = 1", ["data.paths = 1", "sources.toml:2, [a]"]),
        ('[a]\npaths = ["x"]\n[a]\nweight = 2', ["sources.toml:3", "cannot declare ('a',) twice"]),
        ("[a]\npaths = []", ["[a] (sources.toml): names no text"]),
        ('[a]\npaths = ["x"]\nvalidation = [0.1, 0.2]', ["one share, or files and folders"]),
        ('[a]\npaths = ["x"]\nvalidation = 1.5', ["validation = 1.5", "out of range"]),
        ('[a]\npaths = ["x"]\nvalidation = [0.5, "y"]', ["one share, or files and folders"]),
    ],
)
def test_what_a_file_of_sources_cannot_say(tmp_path, monkeypatch, text, reasons):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="; fix: ") as caught:
        read_sources(DataConfig(paths=(Path(sources_in(tmp_path, text)).name,)), {})
    assert len(str(caught.value).splitlines()) == 1
    for reason in reasons:
        assert reason in str(caught.value)


def test_all_mistakes_are_named_at_once(tmp_path):
    text = '[a]\npaths = ["x"]\nweight = -1\n[b]\nwieght = 2'
    with pytest.raises(ValueError, match=r"3 keys of .* cannot work") as caught:
        read_sources(DataConfig(paths=(sources_in(tmp_path, text),)), {})
    assert "did you mean weight?" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"data.paths = none.toml .*no such file; fix: "):
        read_sources(DataConfig(paths=("none.toml",)), {})


def test_a_source_too_small_for_its_validation_is_named(tmp_path):
    settings = settings_of(tmp_path, two(tmp_path), microbatches=16, eval_batches=1)
    with pytest.raises(
        ValueError, match="validation split has 100 tokens, 12 sequences of 8, but a batch takes 16"
    ) as caught:
        make_streams(open_text(settings), settings)
    assert "2 sources cannot work" in str(caught.value)
    assert "sources.toml:3, [a]" in str(caught.value)


def test_no_file_is_read_twice(tmp_path):
    text = two(tmp_path) + f'[c]\npaths = ["{tmp_path}/*.jsonl"]\n'
    with pytest.raises(ValueError, match=r"b\.jsonl is in \[b\] paths too; fix: name every file once"):
        open_text(settings_of(tmp_path, text))
    held = two(tmp_path).replace('["', '["', 1) + f'validation = ["{tmp_path}/a/a.txt"]\n'
    with pytest.raises(ValueError, match=r"a\.txt is in \[a\] paths too"):
        open_text(settings_of(tmp_path, held))


def test_sources_and_paths_exclude_each_other(tmp_path):
    data = DataConfig(paths=("x.toml", "y"))
    with pytest.raises(ValueError, match="each source names its own text"):
        resolve(Config(data=data))


def test_a_run_reports_each_source_and_goes_on_where_it_was(tmp_path):
    small = [*SMALL, *ALONE, "--train.microbatches", "4", "--data.paths", "sources.toml"]
    small += ["--data.validation", "0.25"]
    two(tmp_path)
    (tmp_path / "a" / "a.txt").write_text("a" * 4000)
    sources_in(tmp_path, TWO.format(folder=tmp_path))
    whole = hocket(tmp_path, "train", *small, "--train.steps", "6", "--run.name", "whole")
    assert whole.code == 0, whole.err
    assert "source   b: " in whole.out
    half = hocket(tmp_path, "train", *small, "--train.steps", "6", "--train.save_every", "3", "--run.name", "half")
    assert half.code == 0, half.err
    again = ["--run.name", "again", "--run.resume", "runs/half/checkpoints/step-00000003", "--train.steps", "6"]
    ended = hocket(tmp_path, "train", *small, *again)
    assert ended.code == 0, ended.err

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]

    losses = {line["step"]: (line["loss"], line["epochs"]) for line in lines("whole") if "loss" in line}
    later = {line["step"]: (line["loss"], line["epochs"]) for line in lines("again") if "loss" in line}
    assert later == {step: losses[step] for step in (4, 5, 6)}
    last = next(line for line in reversed(lines("whole")) if "validation_losses" in line)
    assert set(last["validation_losses"]) == {"a", "b"}
    assert min(last["validation_losses"].values()) <= last["validation_loss"] <= max(last["validation_losses"].values())
