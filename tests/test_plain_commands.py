"""Commands without a recipe: `hocket generate` and `hocket export` tell each mistake in one line."""

from __future__ import annotations

import pytest

from hocket import cli
from hocket.commands.models import Export, Generate
from hocket.commands.options import parse_plain

MISTAKES = [
    ("generate", "hocket generate (command line): no model and no prompt; fix: hocket generate RUN --prompt TEXT"),
    ("generate run", "hocket generate (command line): no prompt; fix: hocket generate RUN --prompt TEXT"),
    ("generate --prompt a", "hocket generate (command line): no model; fix: "),
    ("generate run --prompt", "--prompt = (nothing) (command line): not text; fix: give text"),
    ("generate run --prompt=", "--prompt = (empty) (command line): names nothing; fix: "),
    ("generate run --prompt once upon", "upon (command line): one word too many; fix: hocket generate RUN --prompt"),
    ("generate run --prompt a --tokens many", "--tokens = many (command line): not a whole number; fix: give a whole"),
    ("generate run --prompt a --tokens 0", "--tokens 0 (command line): out of range; fix: at least 1, at"),
    ("generate run --prompt a --seed 18446744073709551616", "--seed 18446744073709551616 (command line): out of"),
    ("generate run --prompt a --temperature nan", "--temperature nan (command line): out of range; fix: "),
    ("generate run --prompt a --prompt b", "--prompt = a and b (command line): given twice; fix: give it once"),
    ("generate run --prompt a --seeds 1", "--seeds (command line): there is no such option; fix: did you mean --seed"),
    ("generate run --prompt a --train.steps 3", "--train.steps (command line): there is no such option; fix: hocket"),
    ("generate run --prompt a --device tpu", "--device = tpu (command line): not one of auto, cpu, cuda; fix"),
    ("export", "hocket export (command line): no run and no folder; fix: hocket export RUN FOLDER"),
    ("export run", "hocket export (command line): no folder; fix: hocket export RUN FOLDER"),
    ("export run folder --dtype fp8", "--dtype = fp8 (command line): not one of run, fp32, bf16; fix: give one"),
    ("export run folder more", "more (command line): one word too many; fix: "),
]  # fmt: skip


@pytest.mark.parametrize(("words", "line"), MISTAKES)
def test_a_mistake_is_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"hocket: {line}")
    assert len(err.splitlines()) == 1
    assert "; fix: " in err


def test_an_empty_place_is_named() -> None:
    with pytest.raises(ValueError, match=r"^folder = \(empty\) \(command line\): names nothing; fix: "):
        cli.run(["export", "run", ""])


@pytest.mark.parametrize("text", ["- a list", "--dashes", "a=b", "two words"])
def test_any_text_can_be_a_prompt(text: str) -> None:
    for words in (["run", "--prompt", text, "--tokens", "3"], ["--tokens=3", f"--prompt={text}", "run"]):
        assert parse_plain(Generate, "generate", "usage", words) == Generate(model="run", prompt=text, tokens=3)


def test_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_plain(Export, "export", "usage", ["-h"])
    assert ended.value.code == 0
    assert "--dtype" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["runs --help", "recipes -h", "help -h"])
def test_lists_have_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words.split()) == 0
    assert capsys.readouterr().out
