"""What makes tokens of text: bytes, files of `tokenizers`, models of sentencepiece."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.model.tokenizer import load_tokenizer, tokenizer_vocab
from hocket.train.corpus import open_corpus
from tests.test_data import data_in, write


def tokenizer_file(folder: Path, **content: Any) -> str:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_the_size_of_a_tokenizer_file_is_known_without_its_package(tmp_path):
    vocab = {"a": 0, "b": 1}
    assert tokenizer_vocab("bytes", {}) == 256
    assert tokenizer_vocab(tokenizer_file(tmp_path, model={"vocab": vocab}), {}) == 3  # and a separator
    added = [{"content": "</s>", "id": 5}]
    assert tokenizer_vocab(tokenizer_file(tmp_path, model={"vocab": vocab}, added_tokens=added), {}) == 6
    assert tokenizer_vocab(tokenizer_file(tmp_path, model={"vocab": [["a", -1.0], ["<eos>", -2.0]]}), {}) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"vocab": {}}}'])
def test_something_else_than_a_tokenizer_file_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=r"data\.tokenizer = .*not a tokenizer file; fix:"):
        tokenizer_vocab(str(tmp_path / "t.json"), {})


def test_a_missing_tokenizer_file_and_package_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"cannot be read \(No such file"):
        tokenizer_vocab(str(tmp_path / "none.json"), {})
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # importing it now fails
    with pytest.raises(ValueError, match=r"pip install 'hocket\[text\]'"):
        load_tokenizer(tokenizer_file(tmp_path, model={"vocab": {"a": 0}}), {})


def test_a_tokenizer_file_is_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install hocket[text]")
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hello": 0, "world": 1, "?": 2}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "t.json"))
    write(tmp_path / "text", a="hello world")
    corpus = open_corpus(data_in(tmp_path, str(tmp_path / "text"), tokenizer=str(tmp_path / "t.json")), {})
    assert corpus.tokens.tolist() == [0, 1, 3]
    assert corpus.vocab == 4


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of sentencepiece."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the extra: pip install hocket[text]")
    model = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    words = iter(["the cat sat on the mat", "a dog sat on a log", "größer"] * 20)
    with model.open("wb") as out:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=words, model_writer=out, vocab_size=40, minloglevel=2, hard_vocab_limit=False
        )
    return model


def test_a_model_of_sentencepiece_is_used(tmp_path, pieces):
    backend = pytest.importorskip("sentencepiece").SentencePieceProcessor(str(pieces))
    write(tmp_path / "text", a="the cat sat on größer")
    for name in (str(pieces), str(pieces.parent)):
        corpus = open_corpus(data_in(tmp_path, str(tmp_path / "text"), tokenizer=name), {})
        assert corpus.tokens.tolist() == [*backend.encode("the cat sat on größer"), backend.eos_id()]
        assert corpus.vocab == tokenizer_vocab(name, {}) == backend.vocab_size()


def test_a_missing_damaged_or_unreadable_model_of_sentencepiece_is_refused(tmp_path, monkeypatch, pieces):
    damaged = tmp_path / "bad.model"
    damaged.write_bytes(pieces.read_bytes()[:-100])
    for text in (b"", b"no model", damaged.read_bytes()):
        damaged.write_bytes(text)
        with pytest.raises(ValueError, match=r"bad.model \(.*not a model of sentencepiece; fix:"):
            tokenizer_vocab(str(damaged), {})
    with pytest.raises(ValueError, match=r"none.model .*cannot be read \(No such file"):
        tokenizer_vocab(str(tmp_path / "none.model"), {})


def test_without_its_package_a_model_of_sentencepiece_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)  # importing it now fails
    with pytest.raises(ValueError, match=r"data.tokenizer = a.model .*pip install 'hocket\[text\]'"):
        tokenizer_vocab("a.model", {})


@pytest.mark.parametrize("kind", ["bytes", "json", "pieces"])
def test_places_say_where_each_token_begins(tmp_path, kind, request):
    text, name = "the cat größer", "bytes"
    if kind == "json":
        tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install hocket[text]")
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "?": 2}, unk_token="?"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        name = str(tmp_path / "t.json")
        backend.save(name)
    if kind == "pieces":
        name = str(request.getfixturevalue("pieces"))
    tokenizer = load_tokenizer(name, {})
    tokens, firsts = tokenizer.places(text)
    assert tokens.tolist() == tokenizer.encode([text.encode()])[0].tolist()
    assert (np.diff(firsts) >= 0).all()
    if kind == "json":
        assert firsts.tolist() == [0, 4, 8]
    if kind == "bytes":
        assert firsts.tolist() == [*range(11), 10, 11, 11, 12, 13][: len(tokens)] or bytes(tokens) == text.encode()
        assert [text[i] for i in firsts][10:12] == ["ö", "ö"]
