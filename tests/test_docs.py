"""The documents say what is: tables, excerpts, commands, settings, files, links and words are checked."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import posixpath
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

import hocket
from benchmarks.bench.command import Bench
from benchmarks.prediction_tables import CONTENDERS
from benchmarks.tables import DOCS, MAKERS, PICTURES, RESULTS, ROOT, TABLES, make_ops, make_table, names, picture, renew
from hocket.cli import COMMANDS
from hocket.commands.doctor import PARSER as DOCTOR
from hocket.commands.explain import Explain
from hocket.commands.megatron import PARSER as MEGATRON
from hocket.commands.models import EXPORT, GENERATE, IMPORT, configured
from hocket.commands.options import parse
from hocket.commands.plan import Plan
from hocket.commands.runs import PARSER as RUNS
from hocket.commands.train import Train
from hocket.config import Config
from hocket.config.load import begin
from hocket.config.schema import types
from hocket.program.ops import LANES, UNITS, Verb
from hocket.program.transformer import STANDARD, standard_types
from hocket.recipes import RECIPES
from hocket_trace import load, report
from hocket_trace.cli import parser as trace_parser
from scripts import docs_site
from tests.helpers.command import SMALL
from tests.helpers.command import hocket as hocket_command
from tests.helpers.ranks import run_ranks
from tests.pretrained.folders import saved
from tests.trace.build import Trace

PAGES = sorted({*DOCS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"})
PARSERS = {"import": IMPORT, "export": EXPORT, "generate": GENERATE, "runs": RUNS, "doctor": DOCTOR}
STALE = "run `make docs-tables`, and read again what the text around it says"


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def code(text: str) -> Iterator[str]:
    """Inline code, and every line of a block that a reader may type."""
    yield from re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    for block in re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL):
        lines = block.splitlines()
        typed = [line for line in lines if line.startswith("$ ")] or lines  # behind a prompt, the rest is output
        for line in typed:
            yield line.strip().removeprefix("$ ").split(" #")[0].strip()


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command line, without variables and `python -m` in front."""
    for line in code(text):
        line = re.sub(r"^([A-Z_]+=\S+\s+)+", "", line)
        line = re.sub(r"^(srun|torchrun)\b.*?(?=-m )", "python ", line)
        line = re.sub(r"^\S*python\d?(\.\d+)?\s+-m (hocket|benchmarks|pytest)", r"\2", line)
        if re.match(r"(hocket|make|benchmarks\.\w+)( |$)", line):
            yield shlex.split(line)


SEARCHES = re.compile(r"<!-- search:(.+?) -->\n(.*?)\n<!-- /search -->", re.DOTALL)


@pytest.mark.timeout(600)  # steps are predicted again
@pytest.mark.parametrize("path", DOCS, ids=name)
def test_what_stands_between_markers_is_up_to_date(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but searches, which take half a minute each: see below."""
    text = path.read_text(encoding="utf-8")
    monkeypatch.setitem(MAKERS, "search", dict(SEARCHES.findall(text)).get)
    assert text == renew(text), STALE
    kinds = "|".join(MAKERS)
    opened = re.findall(rf"^<!-- ({kinds}):", text, flags=re.MULTILINE)
    assert opened == re.findall(rf"^<!-- /({kinds}) -->$", text, flags=re.MULTILINE)


@pytest.mark.full
@pytest.mark.parametrize("path", [path for path in DOCS if SEARCHES.search(path.read_text("utf-8"))], ids=name)
def test_searches_are_up_to_date(path: Path) -> None:
    for words, shown in SEARCHES.findall(path.read_text(encoding="utf-8")):
        assert MAKERS["search"](words) == shown, STALE


def test_every_result_has_a_table() -> None:
    shown = {file for files, _ in TABLES.values() for file in files} | set(names())
    for path in RESULTS.glob("*.json"):
        assert path.stem in shown


def test_any_table_can_be_printed() -> None:
    assert "| 2,048: fully_shard_ce |" in make_table("fsdp")
    assert "gate: losses of " in make_table("fsdp_settings")
    with pytest.raises(ValueError, match=r"^quux: there is no such table; fix: python -m benchmarks.tables --list$"):
        make_table("quux")


def test_a_changed_figure_would_be_noticed() -> None:
    text = read("docs/experts.md")
    row = next(line for line in text.splitlines() if line.startswith("| Qwen3-30B-A3B, 12 layers"))
    changed = text.replace(row, row.replace("ms", "s"))
    assert row not in changed
    assert row in renew(changed)
    with pytest.raises(ValueError, match="has no op fwd attn m9"):
        make_ops("0; fwd attn m9; step all; tiny")


@pytest.mark.parametrize("path", PICTURES)
def test_pictures_are_up_to_date(path: str) -> None:
    assert read(path) == picture(PICTURES[path]), STALE


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path: Path) -> None:
    """Also links to a heading, and pictures."""
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text):
        if "://" in target:
            continue
        file, _, heading = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), f"{name(path)} links to {target}"
        if heading:
            titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
            assert heading in anchors, f"{name(path)} links to {target}"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_exist(path: Path) -> None:
    """Targets of the Makefile, commands with all their settings, benchmarks."""
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), flags=re.MULTILINE))
    for words in commands(path.read_text(encoding="utf-8")):
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        elif words[0] == "hocket":
            check_hocket(words[1:])
        else:
            assert importlib.util.find_spec(words[0]), words


KINDS = {"train": Train, "plan": Plan, "bench": Bench, "explain": Explain}
"""Commands that take a recipe -> their options."""


def check_hocket(words: list[str]) -> None:
    if not words or words == ["recipes"] or words[1:] in ([], ["RECIPE"], ["--list"]):
        assert not words or words[0] in COMMANDS, words
        return
    if words == ["explain", "runs/<name>"]:
        return
    if words[0] == "trace":
        trace_parser().parse_intermixed_args(words[1:])
        return
    if words[0] in PARSERS:
        PARSERS[words[0]].read(words[1:])
        return
    if words[0] == "help":
        assert len(words) == 2, words
        return
    if words[0] == "eval":
        assert configured(Config(), words[2:]), words
        return
    command, recipe, *flags = words
    if recipe.startswith("--from-"):
        assert not flags or MEGATRON.read(words[1:]), words
        return
    if "--help" in flags:
        assert command in COMMANDS, words
        return
    parse(KINDS[command], command, ["tiny" if recipe == "RECIPE" or recipe.endswith(".toml") else recipe, *flags])


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_files_of_settings_are_right(path: Path, tmp_path: Path) -> None:
    for block in re.findall(r"```toml\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL):
        (tmp_path / "run.toml").write_text(block)
        assert begin(str(tmp_path / "run.toml")).problems == ()


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_settings_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^\d x .*, commit `\w+`.*$", "", text, flags=re.MULTILINE)  # commands as they were given then
    text = re.sub(r"`[\w./-]+` at `\w+`", "", text)  # and files as they were named
    text = re.sub(r"^### (Removed|Merged settings)$.*?(?=^##|\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    known = set(types())
    sections = "|".join({leaf.split(".")[0] for leaf in known})
    for words in code(text):
        for setting in re.findall(rf"(?<![\w/.-])(?:--)?((?:{sections})(?:\.[a-z0-9_]+)+)\b(?![(/])", words):
            section = any(each.startswith(f"{setting}.") for each in known)
            assert setting in known or section or setting.endswith((".py", ".svg", ".html", ".toml")), (
                f"{name(path)}: {setting}"
            )
        if re.fullmatch(r"[\w./-]+\.(py|md|json|svg|toml|txt)", words) and "/" in words:
            places = [ROOT / words, ROOT / "hocket" / words, path.parent / words]
            made = words.startswith(("runs/", "checkpoints/", "logs/", "traces/"))
            assert made or any(place.exists() for place in places), f"{name(path)}: {words}"


def test_concepts_explains_every_word_of_a_plan() -> None:
    text = read("docs/concepts.md")
    parts = {part.name for kind in standard_types(STANDARD, ep=2) for part in kind.parts}
    words = {*get_args(Verb), *parts, "embed", "head", "act", "grad", "all", "norm", *LANES, *UNITS}
    assert [word for word in sorted(words) if f"`{word}`" not in text] == []


def test_every_recipe_is_named() -> None:
    text = read("docs/training.md")
    assert [recipe for recipe in RECIPES if f"`{recipe}`" not in text] == []


@pytest.mark.timeout(600)  # a dozen commands, one after the other
def test_the_tutorial_runs(tmp_path: Path) -> None:
    """Its commands in order, with fewer and shorter steps, small models, a short text."""
    pytest.importorskip("transformers", minversion="5.0", reason="writes the folder", exc_type=ImportError)
    saved("qwen3", tmp_path / "Qwen3-0.6B", vocab_size=256)
    (tmp_path / "README.md").write_text(read("README.md")[:2000])
    (tmp_path / "text").write_text(read("docs/training.md") * 8)
    text = re.sub(r"--train.steps \d+", "--train.steps 4", read("docs/first-run.md"))
    few = ["--data.paths", "text", "--train.eval_batches", "1", "--data.sequence_length", "16"]
    given, seen = {("train", "tiny"): [*SMALL[1:], *few], ("train", "qwen.toml"): few}, dict[str, str]()
    for line in "".join(re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)).splitlines():
        words = line.split(" #")[0].removeprefix("hocket ")
        done = hocket_command(tmp_path, *shlex.split(words), *given.get(tuple(words.split()[:2]), []))
        assert done.code == 0, (words, done)
        seen[words] = done.out
    merged, sequential = (
        float(re.findall(r"^step ([\d.]+) ms", seen[f"plan tiny{words}"], flags=re.MULTILINE)[0])
        for words in ("", " --overlap.ep.merge off")
    )
    assert merged < sequential
    assert "Communication is exposed for" in seen["trace runs/traced"]
    assert (tmp_path / "exported" / "config.json").exists()


def program(path: str, first: str) -> str:
    """The Python program of a document that starts with a line."""
    blocks = re.findall(r"```python\n(.*?)```", read(path), flags=re.DOTALL)
    return next(block for block in blocks if block.startswith(first))


def recorded(rank: int, text: str, folder: Path) -> None:
    """Run a loop as the document says, with a step that computes and communicates."""
    x, weight = torch.randn(256, 256), torch.randn(256, 256)

    def train_step() -> None:
        dist.all_reduce(weight)
        torch.mm(x, weight)

    with contextlib.chdir(folder):
        exec(text, {"train_step": train_step})


def test_the_page_about_reports_records_a_program(tmp_path: Path) -> None:
    run_ranks(recorded, 2, program("docs/explain.md", "import os"), tmp_path)
    found = report(load(sorted((tmp_path / "traces").iterdir())))
    assert found.ranks == (0, 1)
    assert len({step.step for step in found.steps}) == 2
    assert all(step.kinds["reduce"].count == 1 and step.compute > 0 for step in found.steps)


def test_the_readme_of_hocket_trace_reads_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "without").mkdir()
    for rank in (0, 1):
        for folder, slow in ((tmp_path, 1.0), (tmp_path / "without", 0.8)):
            made = Trace(rank, 2).group("mesh_dp_shard", (0, 1)).annotation("ProfilerStep#3", 0, 100)
            made.kernel("nvjet_sm90", 0, 90 * slow, op="aten::mm")
            if folder == tmp_path:
                made.collective("_allgather_base", "mesh_dp_shard", 80, 100, sent=512, received=1024)
            made.write(folder / f"rank{rank}.json.gz")
    with contextlib.chdir(tmp_path):
        exec(program("hocket_trace/README.md", "from hocket_trace"), {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "rank 0, step 3: 0.000010 of 0.000100 s exposed"
    assert lines[1] == "  gather: 0.000020 s, 50% hidden, 0.000000 s waiting"
    assert lines[4:] == [
        "most compute: gemm",
        "the longest gather of step 3 takes 0.000020 s",
        "a step takes 38.9% longer with communication",
        "  gemm: +25.0%",
    ]


def test_the_readme_of_hocket_trace_names_ops(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(tmp_path):
        exec(program("hocket_trace/README.md", "import json"), {})
    assert "1 [0, 1]\n" in capfd.readouterr().out


def asserted(rank: int, text: str) -> None:
    found: dict[str, Any] = {}
    exec(text, found)
    found["gather_is_hidden"]()


def test_the_page_about_reports_asserts_overlap() -> None:
    run_ranks(asserted, 2, program("docs/explain.md", "import torch\n"))


def test_contenders_are_those_of_the_benchmark() -> None:
    source = read("benchmarks/step_time.py")
    assert [plan for plan in CONTENDERS if f'"{plan}": ' not in source] == []


def nav() -> list[str]:
    """The pages that the site lists."""
    yaml = pytest.importorskip("yaml", reason="PyYAML reads mkdocs.yml")

    def pages(item: Any) -> list[str]:
        if isinstance(item, str):
            return [item]
        return [page for each in (item.values() if isinstance(item, dict) else item) for page in pages(each)]

    return pages(yaml.load(read("mkdocs.yml"), yaml.BaseLoader)["nav"])


def test_the_site_has_every_page_once() -> None:
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert sorted(nav()) == sorted([*pages, *docs_site.BESIDE.values(), "reference.md"])


def test_the_site_is_built(tmp_path: Path) -> None:
    """Strictly: a heading that no link finds, or a name of the reference without a docstring, is an error."""
    for package in ("material", "mkdocstrings"):
        pytest.importorskip(package, reason="make docs needs pip install 'hocket[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [page for page in nav() if not (tmp_path / page).with_suffix(".html").is_file()] == []
    reference = (tmp_path / "reference.html").read_text(encoding="utf-8")
    headings = re.findall(r'<h2 id="(hocket[\w.]*)"', reference)
    assert [heading.rpartition(".")[2] for heading in headings] == [*hocket.__all__, "hocket_trace"]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_of_the_site_stay_on_it(path: Path) -> None:
    place = name(path)
    if place not in docs_site.BESIDE and not place.startswith("docs/"):
        return
    here = posixpath.dirname(docs_site.BESIDE.get(place, place.removeprefix("docs/")))
    for target in re.findall(r"\]\(([^)\s]+)\)", docs_site.for_site(path.read_text(encoding="utf-8"), place)):
        file = target.partition("#")[0]
        if "://" in target or not file:
            continue
        page = posixpath.normpath(posixpath.join(here, file))
        assert page in nav() or (ROOT / "docs" / page).exists(), f"{place}: {target}"


def test_the_reference_has_every_public_name() -> None:
    text = docs_site.reference()
    assert re.findall(r"heading: hocket\.(\w+)", text) == hocket.__all__
    for place in re.findall(r"^::: (.+)$", text, flags=re.MULTILINE):
        module, _, last = place.rpartition(".")
        assert importlib.util.find_spec(place) if last in ("checkpoint", "sharding") or not module else True
        assert not module or hasattr(importlib.import_module(module), last), place
