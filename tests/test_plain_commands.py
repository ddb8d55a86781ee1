"""Commands without a recipe: `hocket generate` and `hocket export` tell each mistake in one line."""

from __future__ import annotations

import pytest

from hocket import cli
from hocket.commands.models import GENERATE

GENERATE_SAYS, EXPORT_SAYS = "hocket generate (command line): ", "hocket export (command line): "
MISTAKES = [
    ("generate", f"{GENERATE_SAYS}the following arguments are required: "),
    ("generate run", f"{GENERATE_SAYS}the following arguments are required: --prompt; fix: "),
    ("generate run --prompt", f"{GENERATE_SAYS}argument --prompt: expected one argument; fix: "),
    ("generate run --prompt=", f"{GENERATE_SAYS}argument --prompt: names nothing; fix: "),
    ("generate run --prompt once upon", f"{GENERATE_SAYS}unrecognized arguments: upon; fix: "),
    ("generate run --prompt a --tokens many", f"{GENERATE_SAYS}argument --tokens: invalid number value: 'many'; fix: "),
    ("generate run --prompt a --tokens 0", f"{GENERATE_SAYS}argument --tokens: 0 is not from 1 to 1e+09; fix: "),
    ("generate run --prompt a --seed 18446744073709551616", f"{GENERATE_SAYS}argument --seed: 18446744073709551616 is"),
    ("generate run --prompt a --temperature nan", f"{GENERATE_SAYS}argument --temperature: nan is not from 0 to"),
    ("generate run --prompt a --prompt=b", f"{GENERATE_SAYS}argument --prompt: given twice; fix: "),
    (
        "generate run --prompt a --seeds 1",
        f"{GENERATE_SAYS}unrecognized arguments: --seeds 1; fix: did you mean --seed?",
    ),
    ("generate run --prompt a --device tpu", f"{GENERATE_SAYS}argument --device: invalid choice: 'tpu' (choose from"),
    ("export run", f"{EXPORT_SAYS}the following arguments are required: FOLDER; fix: hocket export --help"),
    ("export run folder --dtype fp8", f"{EXPORT_SAYS}argument --dtype: invalid choice: 'fp8' (choose from"),
    ("export run folder more", f"{EXPORT_SAYS}unrecognized arguments: more; fix: "),
    ("import run", "hocket import (command line): the following arguments are required: FILE.toml; fix: "),
    ("import run file.json", "file.json (command line): not a TOML file; fix: "),
    ("runs --htm x", "hocket runs (command line): unrecognized arguments: --htm; fix: did you mean --html?"),
]


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
    with pytest.raises(ValueError, match=r"argument FOLDER: names nothing; fix: "):
        cli.run(["export", "run", ""])


@pytest.mark.parametrize("text", ["- a list", "--dashes", "a=b", "two words"])
def test_any_text_can_be_a_prompt(text: str) -> None:
    for words in (["run", "--prompt", text, "--tokens", "3"], ["--tokens=3", f"--prompt={text}", "run"]):
        options = GENERATE.read(words)
        assert (options.model, options.prompt, options.tokens) == ("run", text, 3)


@pytest.mark.parametrize(
    ("words", "has"),
    [("export -h", "--dtype"), ("runs --help", "--html"), ("import -h", "--data.eos"), ("doctor -h", "--measure")],
)
def test_help_is_printed(words: str, has: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.run(words.split())
    assert ended.value.code == 0
    assert has in capsys.readouterr().out


@pytest.mark.parametrize("words", ["recipes -h", "help -h"])
def test_lists_have_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words.split()) == 0
    assert capsys.readouterr().out
