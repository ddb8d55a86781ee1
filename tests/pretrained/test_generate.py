"""What a model goes on with is what transformers' model goes on with; a cache changes no logits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", minversion="5.0", reason="needs transformers 5", exc_type=ImportError)

from hocket.model.generate import Sampling, generate
from tests.helpers.command import SMALL, hocket, text_in
from tests.pretrained.folders import CASES, VOCAB, made, ours, saved

PROMPT = [3, 1, 41, 5, 9, 26, 53]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = made(case)
    theirs.set_attn_implementation("eager")
    theirs.generation_config.eos_token_id = None  # goes on to the last token
    expected = theirs.generate(torch.tensor([PROMPT]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert list(generate(ours(saved(case, tmp_path)), PROMPT, 20, Sampling())) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("case", ["llama3", "gpt_oss", "qwen3_moe", "glm4_moe_partial", "mistral_window"])
def test_logits_of_single_tokens_are_those_of_the_whole_sequence(case: str, tmp_path: Path) -> None:
    model, seen = ours(saved(case, tmp_path)), list[Tensor]()

    class Spying(Sampling):
        def pick(self, logits_V: Tensor, generator: torch.Generator) -> int:
            seen.append(logits_V)
            return super().pick(logits_V, generator)

    made_tokens = list(generate(model, PROMPT, 9, Spying()))
    assert model.head is not None
    with torch.no_grad():
        whole = model.head(model(torch.tensor([PROMPT + made_tokens[:-1]])))[0, len(PROMPT) - 1 :]
    torch.testing.assert_close(torch.stack(seen), whole, rtol=1e-4, atol=1e-5)
    assert all(model.layer(int(number)).attn.cache is None for number in model.layers)


def test_draws_follow_the_probabilities() -> None:
    logits, generator = torch.tensor([0.5, 2.0, -1.0, 1.5]), torch.Generator().manual_seed(0)

    def share(sampling: Sampling, token: int) -> float:
        return sum(sampling.pick(logits, generator) == token for _ in range(4000)) / 4000

    assert share(Sampling(1.0), 1) == pytest.approx(logits.softmax(0)[1].item(), abs=0.03)
    assert share(Sampling(2.0), 3) == pytest.approx((logits / 2).softmax(0)[3].item(), abs=0.03)
    assert share(Sampling(1.0, top_k=2), 3) == pytest.approx(1 / (1 + math.exp(0.5)), abs=0.03)
    assert share(Sampling(1.0, top_p=0.6), 3) == pytest.approx(1 / (1 + math.exp(0.5)), abs=0.03)
    assert share(Sampling(1.0, top_p=0.3), 1) == 1.0
    assert Sampling().pick(logits, generator) == 1


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
    tokens = generate(ours(tmp_path / "exported"), list(b"def f("), 12, Sampling(), frozenset([0]))
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
    tokens = list(generate(ours(tmp_path / "model"), [3, 1, 41], 5, Sampling(), frozenset([0])))
    assert ended.out == "w3 w1 w41" + " ".join(f"w{token}" for token in tokens) + "\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "--prompt", "a"], "fix: a run with a whole checkpoint"),
        (["nowhere", "--prompt", "a", "--tokens", "0"], "--tokens 0 (command line): out of range; fix: at least 1"),
        (["nowhere", "--prompt", "a", "--top_p", "2"], "fix: at least 1e-09, at most 1"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    ended = hocket(tmp_path, "generate", *words)
    assert ended.code == 2
    assert said in ended.err
    assert ended.err.count("\n") == 1
