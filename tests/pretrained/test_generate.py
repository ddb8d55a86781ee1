"""What a model goes on with is what transformers' model goes on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5", exc_type=ImportError)

from hocket.model.transformer import generate, pick
from tests.helpers.command import ALONE, SMALL, hocket, text_in
from tests.pretrained.folders import CASES, VOCAB, made, ours, saved

PROMPT = [3, 1, 41, 5, 9, 26, 53]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = made(case)
    theirs.set_attn_implementation("eager")
    theirs.generation_config.eos_token_id = None  # goes on to the last token
    expected = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=10, do_sample=False, pad_token_id=0)
    assert list(generate(ours(saved(case, tmp_path)), PROMPT, 10)) == expected[0, len(PROMPT) :].tolist()


def test_draws_follow_the_probabilities() -> None:
    logits, generator = torch.tensor([0.5, 2.0, -1.0, 1.5]), torch.Generator().manual_seed(0)

    def share(token: int, temperature: float) -> float:
        return sum(pick(logits, generator, temperature) == token for _ in range(4000)) / 4000

    assert share(1, 1.0) == pytest.approx(logits.softmax(0)[1].item(), abs=0.03)
    assert share(3, 2.0) == pytest.approx((logits / 2).softmax(0)[3].item(), abs=0.03)
    assert pick(logits, generator) == 1


def test_a_run_and_its_export_go_on_alike(tmp_path: Path) -> None:
    mesh = ["--mesh.pp", "2", "--mesh.dp", "2", "--mesh.ep", "2"]
    words = [*SMALL, *mesh, "--model.shared_ffn", "0", "--model.qk_norm", "True", "--model.dense_layers", "0"]
    words += ["--data.paths", text_in(tmp_path), "--train.steps", "3", "--model.aux_loss", "0"]
    assert hocket(tmp_path, "train", *words).code == 0
    ask = ["--prompt", "def f(", "--tokens", "12"]
    run = hocket(tmp_path, "generate", "runs/tiny", *ask)
    assert run.code == 0, run.err
    assert run.out.startswith("def f(")
    again = hocket(tmp_path, "generate", "runs/tiny/checkpoints/latest", *ask)
    assert again.out == run.out
    assert hocket(tmp_path, "export", "runs/tiny", "exported").code == 0
    modes = {file.stat().st_mode for file in (tmp_path / "exported").iterdir()}
    assert len(modes) == 1, "weights are for the same readers as config.json"
    tokens = generate(ours(tmp_path / "exported"), list(b"def f("), 12, {0})
    assert run.out == "def f(" + bytes(tokens).decode(errors="replace") + "\n"
    drawn = [hocket(tmp_path, "generate", "runs/tiny", *ask, "--temperature", "2", "--seed", s).out for s in "112"]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_published_model_goes_on_with_its_own_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    saved("llama", tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    ended = hocket(tmp_path, "generate", "model", "--prompt", "w3 w1 w41", "--tokens", "5")
    assert ended.code == 0, ended.err
    tokens = list(generate(ours(tmp_path / "model"), [3, 1, 41], 5, {0}))
    assert ended.out == "w3 w1 w41" + " ".join(f"w{token}" for token in tokens) + "\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "--prompt", "a"], "fix: a run with a whole checkpoint"),
        (
            ["nowhere", "--prompt", "a", "--tokens", "0"],
            "hocket generate (command line): argument --tokens: 0 is not from 1 to",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    ended = hocket(tmp_path, "generate", *words)
    assert ended.code == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1


# -- where an answer ends ----------------------------------------------------------------------------------------------

TEMPLATE = """{% for m in messages %}{{ m.content }} {% if m.role == 'assistant' %}[END] {% endif %}{% endfor %}
{%- if add_generation_prompt %}w41{% endif %}"""
"""What ends an answer stands in it as [END]."""


def words_of(folder: Path, *specials: str, **files: Any) -> Path:
    """Beside a model of so many tokens a tokenizer that has a word for each and begins texts with w0."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["w0", *specials])
    tokenizer.post_processor = processors.TemplateProcessing(single="w0 $A", special_tokens=[("w0", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def by_transformers(folder: Path, count: int, prompt: str) -> list[int]:
    """What transformers goes on with by default, without tokens that end it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    given = tokenizer(prompt, return_tensors="pt")
    found = model.generate(**given, max_new_tokens=count, do_sample=False, pad_token_id=0)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    new = found[0, given["input_ids"].shape[1] :].tolist()
    return new[:-1] if new and new[-1] in ends else new


def test_a_published_model_stops_where_transformers_does(tmp_path: Path) -> None:
    folder = words_of(saved("llama", tmp_path / "model"), tokenizer_config={"eos_token": "w9"})
    config = json.loads((folder / "config.json").read_text())
    generation = folder / "generation_config.json"

    def same(count: int = 20) -> list[int]:
        expected = by_transformers(folder, count, "w3 w1 w41")
        ended = hocket(tmp_path, "generate", "model", "--prompt", "w3 w1 w41", "--tokens", str(count))
        assert ended.code == 0, ended.err
        assert ended.out == "w3 w1 w41" + " ".join(f"w{token}" for token in expected if token) + "\n"
        return expected

    generation.write_text(json.dumps({"eos_token_id": 60}))
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 60}))
    whole = same()
    later = next(token for token in whole[3:] if token not in whole[:3])
    generation.write_text(json.dumps({"eos_token_id": [59, later]}))
    assert 3 <= len(same()) < len(whole)
    generation.unlink()
    assert len(same()) == len(whole)
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [59, later]}))
    assert 3 <= len(same()) < len(whole)


OWN = [
    *SMALL, *ALONE, "--model.shared_ffn", "0", "--model.qk_norm", "True", "--model.aux_loss", "0",
    "--train.lr", "1e-30", "--train.min_lr", "0", "--train.steps", "1", "--train.eval_batches", "0",
    "--data.paths", "texts",
]  # fmt: skip
"""A run whose weights stay those at the start."""


def answers(folder: Path, model: str, *prompt: str) -> list[str]:
    ended = hocket(folder, "generate", model, "--tokens", "20", *prompt)
    assert ended.code == 0, ended.err
    return ended.out.split()


def test_an_exported_model_of_words_goes_on_as_its_run(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words_of(tmp_path, "w7", "w8").joinpath("tokenizer.json").rename(tmp_path / "words.json")  # which no library knows
    (tmp_path / "texts").write_text(" ".join(f"w{i * i % VOCAB}" for i in range(3000)))
    ask = ["--prompt", "w3 w1"]
    words = [*OWN, "--model.vocab", str(VOCAB), "--data.tokenizer", "words.json", "--data.eos"]

    def exported(eos: str, *more: str) -> Path:
        assert (done := hocket(tmp_path, "train", *words, eos, "--run.name", eos, *more)).code == 0, done.err
        assert (done := hocket(tmp_path, "export", f"runs/{eos}", eos)).code == 0, done.err
        assert "note:" not in done.out
        return tmp_path / eos

    folder = exported("w60")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert tokenizer("w3 w1")["input_ids"] == [0, 3, 1]
    assert (tokenizer.eos_token, model.config.eos_token_id, model.generation_config.eos_token_id) == ("w60", 60, 60)
    assert answers(tmp_path, "runs/w60", *ask)[2:] == answers(tmp_path, "w60", *ask)[2:]
    assert tokenizer.decode(by_transformers(folder, 20, "w3 w1"), skip_special_tokens=True).split()
    # another beginning than the tokenizer's own, an end that comes, and a chat template
    (tmp_path / "t.jinja").write_text(TEMPLATE.replace("[END]", "w7"))
    tokens = by_transformers(folder, 20, "w3 w1")
    later = next(f"w{token}" for token in tokens[3:] if token not in tokens[:3] and token > 8)
    folder = exported(later, "--data.bos", "off", "--data.chat_template", "t.jinja")
    another: Any = AutoTokenizer.from_pretrained(folder)
    assert another("w3 w1")["input_ids"] == [3, 1]
    ends = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    assert ends == [another.convert_tokens_to_ids(later), 7]
    expected = by_transformers(folder, 20, "w3 w1")
    found = [answers(tmp_path, name, *ask) for name in (f"runs/{later}", later)]
    assert found[0] == found[1] == f"w3 w1{another.decode(expected, skip_special_tokens=True)}".split()


def test_an_exported_model_of_bytes_ends_at_byte_0(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "texts").write_text("some text of bytes " * 100)
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    done = hocket(tmp_path, "train", *OWN, "--data.chat_template", "t.jinja", "--run.name", "run")
    assert done.code == 0, done.err
    assert hocket(tmp_path, "export", "runs/run", "exported").code == 0
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert model.config.bos_token_id is model.generation_config.bos_token_id is None
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 0
    ask = ["--prompt", "what?"]
    assert answers(tmp_path, "runs/run", *ask) == answers(tmp_path, "exported", *ask)
    (tmp_path / "t.jinja").unlink()
    done = hocket(tmp_path, "export", "runs/run", "again")
    assert "note: there is no t.jinja any more, so hocket wrote no chat template" in done.out
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == 0


def test_what_no_run_computes_is_refused(tmp_path: Path) -> None:
    folder = words_of(saved("qwen3_moe", tmp_path / "model"), tokenizer_config={"eos_token": "w60"})
    made("qwen3_moe", moe_intermediate_size=19).save_pretrained(folder)
    ended = hocket(tmp_path, "generate", "model", "--prompt", "w3")
    assert ended.code == 2
    assert "model.expert_ffn = 19 (the model): products of experts need rows of a multiple of 16 bytes" in ended.err
    assert ended.err.count("\n") == 1


def test_a_folder_without_a_tokenizer_is_told_what_would_help(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    ended = hocket(tmp_path, "generate", "model", "--prompt", "w3")
    assert ended.code == 2
    assert "there is no model/tokenizer.json, the tokenizer; fix: put the model's tokenizer.json there" in ended.err
    assert ended.err.count("fix:") == 1
    words_of(folder)
    assert hocket(tmp_path, "generate", "model", "--prompt", "w3").code == 0
