"""Sources of settings: presets, recipes, files and flags; which one wins, and what is wrong with them."""

from __future__ import annotations

import os
import pickle
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hocket import recipes
from hocket.cli import main
from hocket.commands.options import parse
from hocket.commands.plan import Plan
from hocket.config import Config
from hocket.config.load import begin, lines_of, read, written
from hocket.config.rule import leaf
from hocket.config.schema import Implied, asked, changed, flat, source, types
from hocket.recipes import PRESETS
from hocket.resolve import resolve
from tests.helpers.command import command

RUN = """# a run
recipe = "tiny"

[train]
steps = 40  # short
betas = [
    0.8,   # "not = a key"
    0.9,
]

[overlap]
defer_wgrad = "off"
dp = { prefetch = 3, strategy = "optim_grads" }

[overlap.ep]
merge = "off"

[data]
paths = ["a # b", 'c = d']
"""
LINES = {
    "recipe": 2, "train.steps": 5, "train.betas": 6, "overlap.defer_wgrad": 12, "overlap.dp": 13,
    "overlap.ep.merge": 16, "data.paths": 19,
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "run.toml") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


def said(capsys: Any, *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def made(*words: str) -> tuple[Config, dict[str, str]]:
    options, origins = parse(Plan, "plan", list(words))
    return options.config, origins


# ------------------------------------------------------------------------------------------------------- files


def test_every_key_has_the_line_that_it_stands_on(here: Path) -> None:
    assert {entry.name: entry.line for entry in read(write(RUN))} == LINES


@pytest.mark.parametrize("text", ['a = """\nb = 1\n"""\nc = 2', 'a = [\n  "]",\n]\nc = 2', "a = 1 # [b\n[t]\n\nc = 2"])
def test_what_looks_like_a_key_in_a_text_is_none(here: Path, text: str) -> None:
    found = read(write(text))
    assert [entry.name.removeprefix("t.") for entry in found] == ["a", "c"]
    assert found[-1].line == 4


NASTY = st.text(st.sampled_from(list("ab.#=[]{}\"'\\\n\r\t\x00\x0b\x1f\x7f\x85\u2028\ufeff😀")), max_size=12) | st.text(
    max_size=5
)
PLAIN = st.booleans() | st.integers() | st.floats(allow_nan=False) | NASTY
SETTINGS = st.dictionaries(
    st.from_regex(r"[a-z_]{1,4}(\.[a-z]{1,3}){0,2}", fullmatch=True), PLAIN | st.tuples(PLAIN, PLAIN)
)


@given(NASTY, SETTINGS, NASTY)
def test_what_is_written_sets_these_settings_and_no_others(title: str, wanted: dict[str, Any], source: str) -> None:
    names = sorted(wanted)
    assume(not any(b.startswith(f"{a}.") for a in names for b in names))  # a setting is no section
    text = written(title, wanted, dict.fromkeys(wanted, source))
    said = flat(tomllib.loads(text))
    assert {name: tuple(value) if isinstance(value, list) else value for name, value in said.items()} == wanted
    assert {name for name, (_, is_key) in lines_of(text).items() if is_key} == set(wanted)  # and the lines agree


def test_a_text_that_no_file_holds_is_not_written() -> None:
    with pytest.raises(ValueError, match=r"'a\\udcff' is no text of UTF-8"):
        written("a run", {"run.name": "a\udcff"})


def test_a_file_sets_settings_and_remembers_lines(here: Path) -> None:
    config, origins = made(write(RUN))
    assert (config.train.steps, config.train.betas) == (40, (0.8, 0.9))
    assert (config.overlap.dp.prefetch, config.overlap.dp.strategy) == (3, "optim_grads")
    assert config.data.paths == ("a # b", "c = d")
    assert config.model.layers == 8  # the recipe's
    assert origins["overlap.ep.merge"] == "run.toml:16"
    assert origins["overlap.dp.prefetch"] == "run.toml:13"
    assert origins[""] == "recipe tiny"


def test_runs_of_two_files_on_one_recipe_have_two_folders(here: Path) -> None:
    names = {resolve(made(write('recipe = "tiny"\n', name))[0]).run.folder for name in ("a.toml", "b.toml")}
    assert names == {"runs/a", "runs/b"}
    assert made(write('recipe = "tiny"\nrun.name = "c"\n'))[0].run.name == "c"


MISTAKES: list[tuple[str, str]] = [
    ("[overlap.ep]\nmergee = 'on'", "overlap.ep.mergee (run.toml:2): UNKNOWN overlap.ep.merge?"),
    ("steps = 3", "steps (run.toml:1): UNKNOWN train.steps?"),
    ("[plan]\nmerge = 'on'", "plan.merge (run.toml:2): there is no such setting; fix: did you mean overlap.ep.merge?"),
    ("[overlap.epp]\nmerge = 'on'", "overlap.epp.merge (run.toml:2): UNKNOWN overlap.ep.merge?"),
    ("[trian]", "trian (run.toml:1): UNKNOWN train?"),
    ("[overlap.ep]\nmerge = 'onn'", "overlap.ep.merge = onn (run.toml:2): not one of auto, on, off; fix: did you mean"),
    ("[overlap.ep]\nmerge = true", "overlap.ep.merge = True (run.toml:2): not one of auto, on, off; fix: give"),
    ("[train]\nsteps = '3'", "train.steps = \"3\" (run.toml:2): not a whole number; fix: give a whole number"),
    ("[train]\nbetas = [0.9]", "train.betas = 0.9 (run.toml:2): not 2 numbers"),
    ("overlap = 'on'", "overlap = on (run.toml:1): is a table of settings; fix: [overlap] with dp."),
    ("[train.steps]\n", "train.steps (run.toml:1): is a setting, not a table; fix: steps = 100"),
    ("[train]\nsteps = 3\nlr = 1.0\nsteps = 4", "run.toml:4: not TOML: cannot overwrite a value; fix: "),
    ("[train]\nsteps = 3\n[mesh]\n[train]\nlr = 1.0", "run.toml:4: not TOML: cannot declare ('train',) twice; fix: "),
    ("[plan]\norder = 1f1b", "run.toml:2: not TOML: "),
    ("recipe = 3", "recipe = 3 (run.toml:1): not text"),
    ("recipe = 'tinny'", "recipe = tinny (run.toml:1): there is no such recipe; fix: did you mean tiny?"),
    ("preset = 'memroy'", "preset = memroy (run.toml:1): there is no such preset; fix: did you mean memory?"),
    ("[plan]\nchunks = 2.0", "plan.chunks = 2.0 (run.toml:2): not a whole number; fix: give a whole number"),
    ("'train.steps' = 3", "'train.steps' (run.toml:1): in quotes a dot is part of a name; fix: without quotes"),
    ("[mesh]\ndp = 2\n[[train]]\nsteps = 3", "train = [{'steps': 3}] (run.toml:3): is a table of settings; fix: "),
    (f"train.steps = {'9' * 5000}", "run.toml (command line): a number is too long"),
    (f"data.paths = {'[' * 3000}{']' * 3000}", "run.toml (command line): brackets are too deep"),
    ("overlap.ep = {merge = 'no'}", "overlap.ep.merge = no (run.toml:1): not one of auto, on, off"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_in_a_file_is_one_line_with_its_place(here: Path, capsys: Any, text: str, line: str) -> None:
    code, out, err = said(capsys, "plan", write(text))
    assert (code, out) == (2, "")
    assert err.startswith(f"hocket: {line.replace('UNKNOWN', 'there is no such setting; fix: did you mean')}"), err
    assert "fix: " in err
    assert len(err.splitlines()) == 1


def test_all_mistakes_of_a_file_and_of_flags_come_at_once(here: Path, capsys: Any) -> None:
    path = write("[train]\nstep = 3\nlr = 'x'\n[mesh]\npp = 1.5\n")
    _, _, err = said(capsys, "train", path, "--train.seeed", "3")
    assert [line.split(":")[1] for line in err.splitlines()[1:]] == ["2)", "3)", "5)", " there is no such setting; fix"]
    assert err.startswith("hocket: 4 settings cannot work:\n")


def test_all_mistakes_of_a_table_in_braces_come_at_once(here: Path) -> None:
    path = write("overlap = {ep = {mergee = 1, merge = 'off'}, dp = {prefetch = 'x'}}\nplan = {merge = 'on'}\n")
    found = begin(path)
    assert [line.split()[0] for line in found.problems] == ["overlap.ep.mergee", "overlap.dp.prefetch", "plan.merge"]
    assert leaf(found.config, "overlap.ep.merge") == "off"


@pytest.mark.parametrize(("name", "words"), [("no.toml", "No such file"), (".", "Is a directory")])
def test_a_file_that_cannot_be_read_is_one_line(here: Path, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read(name)


def test_a_file_that_is_no_text(here: Path) -> None:
    Path("run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="not text"):
        read("run.toml")


# ----------------------------------------------------------------------------------------------------- recipes

MODULE = """
from hocket.config import Config, TrainConfig
from hocket.config.schema import changed
def mine(): return Config(train=TrainConfig(steps=7))
def merged(): return changed(Config(), {"overlap.ep.merge": "on"})
def number(): return 3
def fails(): raise ValueError("no data")
def breaks(): return {}["x"]
def leaves(): raise SystemExit(3)
"""


def test_a_function_of_ones_own_is_a_recipe(here: Path) -> None:
    write(MODULE, "my_recipes_a.py")
    for words in (["my_recipes_a:mine"], ["--recipe", "my_recipes_a:mine"], [write('recipe="my_recipes_a:mine"')]):
        config, origins = made(*words)
        assert config.train.steps == 7
        assert origins[""] == "recipe my_recipes_a:mine"
        assert config.run.name == ("run" if words[0].endswith("toml") else "mine")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_recipes_b:min", "my_recipes_b has no function min; fix: did you mean mine?"),
        ("my_recipes_b:number", "it returns int"),
        ("my_recipes_b:fails", "it fails: no data"),
        ("my_recipes_b:breaks", "it fails: KeyError 'x'; fix: "),
        ("my_recipes_b:leaves", "it fails: SystemExit 3; fix: "),
        ("my_recipes_c:mine", "my_recipes_c cannot be imported: No module named"),
        ("my_recipes_wrong:mine", "my_recipes_wrong cannot be imported: SyntaxError "),
        ("my_recipes_b.py:mine", "my_recipes_b.py cannot be imported: "),
        (":mine", "nothing cannot be imported: "),
    ],
)
def test_a_function_that_is_none_is_one_line(here: Path, name: str, words: str) -> None:
    write(MODULE, "my_recipes_b.py")
    write("def (", "my_recipes_wrong.py")
    with pytest.raises(ValueError) as caught:
        made(name)
    assert f"recipe = {name} (command line): {words}" in str(caught.value)
    with pytest.raises(ValueError, match=r"run.toml:1"):
        made(write(f'recipe = "{name}"'))


@pytest.mark.parametrize(
    ("made_in_python", "line"),
    [
        ("train=None", "train = None (recipe my_recipes_e:mine): not a TrainConfig; fix: give a TrainConfig"),
        ("train=TrainConfig(steps='5')", 'train.steps = "5" (recipe my_recipes_e:mine): not a whole number; fix: give'),
    ],
)
def test_wrong_types_of_a_recipe_are_one_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, made_in_python: str, line: str
) -> None:
    monkeypatch.delitem(sys.modules, "my_recipes_e", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    text = f"from hocket.config import *\ndef mine(): return Config({made_in_python})\n"
    write(text, "my_recipes_e.py")
    with pytest.raises(ValueError) as caught:
        made("my_recipes_e:mine")
    assert str(caught.value).startswith(line)


def test_an_empty_recipe_is_none() -> None:
    with pytest.raises(ValueError, match="the recipe is missing"):
        made("--recipe", "")


def test_a_file_may_begin_with_a_byte_order_mark(here: Path) -> None:
    Path("run.toml").write_bytes(b'\xef\xbb\xbfrecipe = "tiny"')
    assert made("run.toml")[1][""] == "recipe tiny"


def test_two_recipes_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="leave one of them out"):
        made("tiny", "--recipe", "moe_8gpu")


# ------------------------------------------------------------------------------------------------------ presets


def test_presets_set_settings_that_are_there_to_values_that_they_can_have() -> None:
    for name, each in PRESETS.items():
        assert set(each.changes) <= set(types()), name
        config, origins = made("llama3_8b", "--preset", name)
        assert resolve(config, None, origins).origins
        for setting, value in each.changes.items():
            assert leaf(config, setting) == value
            assert origins[setting] == f"preset {name}"
            assert not asked(origins, setting)


def test_what_a_recipe_takes_from_a_preset_is_said(here: Path) -> None:
    write(MODULE, "my_recipes_d.py")
    config, origins = made("my_recipes_d:merged", "--preset", "debug")
    assert (config.overlap.ep.merge, config.overlap.dp.prefetch) == ("on", 0)
    found = {d.setting: d for d in resolve(config, None, origins).decisions}["overlap.ep.merge"]
    assert found.unmet
    assert (found.asked, found.source) == ("off", "preset debug")
    assert "recipe my_recipes_d:merged sets it" in found.reason
    assert "overlap.ep.merge = off in a file" in found.fix


def test_an_origin_that_is_implied_survives_pickling() -> None:
    origin = pickle.loads(pickle.dumps(Implied("recipe tiny", lost="off", by="preset debug")))
    assert (origin, origin.lost, origin.by) == ("recipe tiny", "off", "preset debug")


# ------------------------------------------------------------------------------------------------- precedence

CHOICES: dict[str, tuple[Any, ...]] = {
    "overlap.ep.merge": ("on", "off"),
    "overlap.defer_wgrad": ("on", "off"),
    "overlap.pp.defer_layers": (0, 1, 2),
    "overlap.dp.prefetch": (0, 1, 3),
    "train.steps": (5, 6, 7),
}
SOME = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in CHOICES.items()})


@settings(max_examples=40, deadline=None)
@given(SOME, SOME, SOME, SOME)
def test_the_stronger_source_wins_and_is_remembered(
    tmp_path_factory: pytest.TempPathFactory, preset: Any, recipe: Any, file: Any, flags: Any
) -> None:
    path = tmp_path_factory.getbasetemp() / "some.toml"
    lines = ['recipe = "some"', 'preset = "some"', *(f"{name} = {value!r}" for name, value in file.items())]
    path.write_text("\n".join(lines))
    flag_words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recipes.PRESETS, "some", recipes.Preset("", preset))
        patch.setitem(recipes.RECIPES, "some", lambda: changed(Config(), recipe))
        config, origins = made(str(path), *flag_words)
    for name in CHOICES:
        default = leaf(Config(), name)
        of_recipe = recipe if recipe.get(name, default) != default else {}  # a default is what a recipe left open
        levels = [
            (flags, f"command line, --{name}"), (file, f"{path}:"), (of_recipe, "recipe some"), (preset, "preset some"),
        ]  # fmt: skip
        wanted, origin = next(((level[name], text) for level, text in levels if name in level), (default, "default"))
        assert leaf(config, name) == wanted
        if wanted != default or origin.startswith(("command", os.sep)):
            assert source(config, origins, name).startswith(origin)


def test_a_start_without_a_recipe_is_the_defaults(here: Path) -> None:
    start = begin(write("[train]\nsteps = 3\n"))
    assert start.config == changed(Config(), {"train.steps": 3, "run.name": "run"})
    assert start.origins == {"": "default", "train.steps": "run.toml:2"}
    assert begin("tiny").origins == {"": "recipe tiny"}


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero"])
@pytest.mark.parametrize(
    "words",
    [
        ["plan", "FILE.toml"],
        ["explain", "FILE.json"],
        ["train", "tiny", "--data.tokenizer", "FILE.json"],
        ["plan", "tiny", "--hardware.gpu", "FILE.json"],
    ],
)
def test_what_has_no_end_is_refused_and_not_read(capsys, tmp_path, monkeypatch, kind: str, words: list[str]) -> None:
    """A pipe or a device in place of a file of settings, of a tokenizer, of rates or of an explanation."""
    monkeypatch.chdir(tmp_path)
    for name in ("FILE.toml", "FILE.json"):
        if kind == "pipe":
            os.mkfifo(name)
        else:
            Path(name).symlink_to(kind)
    code, _, err = command(capsys, *words)
    assert code == 2
    assert "a pipe or a device, which may have no end" in err
    assert "; fix: " in err


def test_names_of_runs_and_files_are_shown_and_not_obeyed(capsys, tmp_path) -> None:
    name = "\x1b[2Jrun"
    (tmp_path / name).mkdir()
    (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    code, out, _ = command(capsys, "runs", str(tmp_path))
    assert code == 0
    assert "\\x1b[2Jrun" in out
    assert "\x1b" not in out
    (tmp_path / f"{name}.toml").write_text("[model]\nhidden = 'x'")
    code, _, err = command(capsys, "plan", str(tmp_path / f"{name}.toml"))
    assert code == 2
    assert "\x1b" not in err
