"""Mistyped sizes that no model has, and files of thousands of names, give an error at once.

Without bounds it is minutes, which the limit of a test ends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hocket import cli
from hocket.config.mesh import RANKS_OF_A_CORE
from hocket.config.plan import MOST_PASSES
from hocket.config.rule import ANY, MOST_RANKS, Host, leaf
from hocket.config.schema import bounds_of, changed, types
from hocket.recipes import recipe
from hocket.resolve import resolve

TINY = recipe("tiny")


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(list(words))
    assert isinstance(end.value.code, int)
    return end.value.code, capsys.readouterr().err


HIGHEST = {name: bounds.high for name in types() if (bounds := bounds_of(name)) and bounds.high not in (ANY, 1)}


@pytest.mark.parametrize("setting", HIGHEST)
def test_one_more_than_the_most_is_refused_in_a_line(setting: str) -> None:
    high = HIGHEST[setting]
    value: Any = int(high) + 1 if isinstance(high, int) else high * 2
    value = (value, value) if isinstance(leaf(TINY, setting), tuple) else value
    with pytest.raises(ValueError, match=rf"{setting} = .*fix: at most ") as error:
        resolve(changed(TINY, {setting: value}), Host())
    assert "e+" not in str(error.value).split("at most")[1] or high >= 1e12, "a number that can be typed"


def test_a_mesh_of_too_many_ranks_and_a_step_of_too_many_passes_are_refused() -> None:
    many = changed(TINY, {"mesh.pp": 1, "plan.chunks": 1, "mesh.dp": MOST_RANKS, "mesh.tp": 2})
    with pytest.raises(
        ValueError, match=f"is {2 * MOST_RANKS} ranks; fix: a smaller mesh of {MOST_RANKS} ranks at most"
    ):
        resolve(many, Host())
    long = changed(TINY, {"train.microbatches": MOST_PASSES // TINY.model.layers + 1})
    with pytest.raises(ValueError, match="plan of millions of operations"):
        resolve(long, Host())
    resolve(changed(TINY, {"train.microbatches": MOST_PASSES // TINY.model.layers}), Host())


def test_ranks_take_turns_on_cores_up_to_a_number() -> None:
    mesh = {"mesh.pp": 2, "mesh.ep": 1}
    resolve(changed(TINY, {**mesh, "mesh.dp": RANKS_OF_A_CORE}), Host(cores=2))
    more = changed(TINY, {**mesh, "mesh.dp": RANKS_OF_A_CORE + 1})
    with pytest.raises(
        ValueError,
        match=r"mesh\.dp = 9 .* is 18 processes .* it has 2; fix: a smaller mesh of at most 8 ranks for each core",
    ):
        resolve(more, Host(cores=2))
    resolve(more, Host(cores=2, workers=18, local_workers=18))  # torchrun has started them
    resolve(more, Host(cores=2, gpus=18))


@pytest.mark.parametrize("words", [("--gpus", "100000000"), ("--model.layers", "10000000"), ("--mesh.dp", "1000000")])
def test_commands_answer_at_once(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, err = command(capsys, "explain", "tiny", *words)
    assert code == 2
    assert "fix: " in err


def test_files_of_thousands_of_names_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\n" + "".join(f"stepz{i} = 1\n" for i in range(20_000)))
    code, err = command(capsys, "explain", str(tmp_path / "run.toml"))
    assert (code, len(err.splitlines())) == (2, 1)
    assert "more than 1000" in err


@pytest.mark.parametrize("name", ["a\0b", "two\nlines", "\x1b[31mred", "no text\udcff"])
def test_what_cannot_be_shown_is_no_name_and_a_message_stays_one_line(name: str) -> None:
    for setting, value in (("run.name", name), ("data.paths", ("texts", name)), ("run.folder", name)):
        with pytest.raises(ValueError, match="has a character that cannot be shown; fix: ") as error:
            resolve(changed(TINY, {setting: value}), Host())
        assert len(str(error.value).splitlines()) == 1
        assert str(error.value).isprintable()


def test_names_in_any_script_are_fine() -> None:
    resolve(changed(TINY, {"run.name": "Versuch Ärger\u00a0实验 👩\u200d🔬"}), Host())


def test_a_word_of_the_command_line_is_shown_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = command(capsys, "explain", "tiny", "--train.steps", "1\n2x", "--no\x1bsuch", "1")
    assert code == 2
    assert "train.steps = 1\\n2x (command line" in err
    assert "--no\\x1bsuch (command line)" in err
    assert len(err.splitlines()) == 3


@pytest.mark.parametrize("setting", ["run.name", "data.paths", "plan.order"])
def test_a_value_that_begins_like_a_flag_is_one_line(capsys: pytest.CaptureFixture[str], setting: str) -> None:
    code, err = command(capsys, "explain", "tiny", f"--{setting}", "-x")
    assert code == 2
    assert f"-x (command line): begins like a flag; fix: --{setting}=-x if it is a value" in err
    assert all("fix: " in line for line in err.splitlines()[err.count("settings cannot work") :])


def test_explain_knows_how_many_tokens_bytes_are(capsys: pytest.CaptureFixture[str]) -> None:
    """As a run does, which would refuse it."""
    code, err = command(capsys, "explain", "tiny", "--model.vocab", "100")
    assert code == 2
    assert "model.vocab = 100 (command line, --model.vocab): the tokenizer has 256 tokens" in err
