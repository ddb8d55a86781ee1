"""What makes tokens of text: bytes, files of `tokenizers`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hocket.config import DataConfig
from hocket.model.tokenizer import known_tokenizer, load_tokenizer
from hocket.train.corpus import open_corpus
from tests.helpers.command import command
from tests.test_data import data_in, write


def tokenizer_file(folder: Path, **content: Any) -> str:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content))
    return str(path)


def vocab_of(name: str) -> int:
    return known_tokenizer(DataConfig(tokenizer=name), {}).vocab


def test_the_size_of_a_tokenizer_file_is_known_without_its_package(tmp_path):
    vocab = {"a": 0, "b": 1}
    assert vocab_of("bytes") == 256
    added = [{"content": "</s>", "id": 5}]
    assert vocab_of(tokenizer_file(tmp_path, model={"vocab": vocab}, added_tokens=added)) == 6
    assert vocab_of(tokenizer_file(tmp_path, model={"vocab": [["a", -1.0], ["<eos>", -2.0]]})) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"vocab": {}}}'])
def test_something_else_than_a_tokenizer_file_is_refused(tmp_path, text):
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ValueError, match=r"data\.tokenizer = .*not a tokenizer file; fix:"):
        vocab_of(str(tmp_path / "t.json"))


def test_a_missing_tokenizer_file_and_package_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"cannot be read \(No such file"):
        vocab_of(str(tmp_path / "none.json"))
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # importing it now fails
    with pytest.raises(ValueError, match=r"pip install 'hocket\[text\]'"):
        load_tokenizer(DataConfig(tokenizer=tokenizer_file(tmp_path, model={"vocab": {"a": 0}})), {})


def test_a_tokenizer_file_is_used(tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install hocket[text]")
    vocab = {"hello": 0, "world": 1, "?": 2, "</s>": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "t.json"))
    write(tmp_path / "text", a="hello world")
    corpus = open_corpus(data_in(tmp_path, str(tmp_path / "text"), tokenizer=str(tmp_path / "t.json")), {})
    assert corpus.whole.tokens.tolist() == [0, 1, 3]
    assert corpus.vocab == 4


@pytest.mark.parametrize("kind", ["bytes", "json"])
def test_places_say_where_each_token_begins(tmp_path, kind):
    text, name = "the cat größer", "bytes"
    if kind == "json":
        tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install hocket[text]")
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "?": 2}, unk_token="?"))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        name = str(tmp_path / "t.json")
        backend.save(name)
    tokenizer = load_tokenizer(DataConfig(tokenizer=name), {})
    tokens, firsts = tokenizer.places(text)
    assert tokens.tolist() == tokenizer.encode([text.encode()])[0].tolist()
    assert (np.diff(firsts) >= 0).all()
    if kind == "json":
        assert firsts.tolist() == [0, 4, 8]
    if kind == "bytes":
        assert firsts.tolist() == [*range(11), 10, 11, 11, 12, 13][: len(tokens)] or bytes(tokens) == text.encode()
        assert [text[i] for i in firsts][10:12] == ["ö", "ö"]


# -- where a text begins and ends --------------------------------------------------------------------------------------

WORDS = ["?", "<s>", "<end>", "<|user|>", "hello", "world"]


def published(folder: Path, begins: bool = False, words: Sequence[str] = WORDS, **files: Any) -> str:
    """A folder with a tokenizer of words, which may put <s> before a text, and with files of JSON beside it."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra: pip install hocket[text]")
    vocab = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([word for word in words if word.startswith("<")])
    if begins:
        template = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
        trims = tokenizers.processors.ByteLevel(trim_offsets=False)
        backend.post_processor = tokenizers.processors.Sequence([trims, template])
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


END, USER, HELLO = (WORDS.index(word) for word in ("<end>", "<|user|>", "hello"))


@pytest.mark.parametrize(
    ("files", "eos", "found"),
    [
        ({"tokenizer_config": {"eos_token": "<end>"}, "config": {"eos_token_id": USER}}, "", END),
        ({"tokenizer_config": {"eos_token": {"content": "<end>", "lstrip": False}}}, "", END),
        ({"special_tokens_map": {"eos_token": "<end>"}, "tokenizer_config": {"eos_token": None}}, "", END),
        ({"tokenizer_config": {"eos_token": "<other>"}, "config": {"eos_token_id": USER}}, "", USER),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": [99, END, USER]}}, "", END),
        ({"tokenizer_config": {"eos_token": "<end>"}}, "hello", HELLO),
        ({"config": {"eos_token_id": 99}}, "", -1),
        ({}, "", -1),
    ],
)
def test_files_beside_a_tokenizer_say_what_ends_a_text(tmp_path, files, eos, found):
    data = DataConfig(tokenizer=published(tmp_path / "model", **files), eos=eos)
    if found < 0:
        with pytest.raises(ValueError, match=r"not known which token ends a text: .*; fix: data\.eos = that token"):
            known_tokenizer(data, {})
        write(tmp_path / "text", a="hello world")
        with pytest.raises(ValueError, match=r"not known which token ends a text"):
            open_corpus(replace(data_in(tmp_path, str(tmp_path / "text")), tokenizer=data.tokenizer), {})
        return
    assert known_tokenizer(data, {}).separator == load_tokenizer(data, {}).separator == found
    assert known_tokenizer(data, {}).vocab == len(WORDS)


def test_an_end_that_a_tokenizer_lacks_and_a_damaged_file_beside_it_are_refused(tmp_path):
    data = DataConfig(tokenizer=published(tmp_path / "model"), eos="<other>")
    with pytest.raises(ValueError, match=r"data\.eos = <other> .*has no such token; fix: "):
        known_tokenizer(data, {})
    (tmp_path / "model" / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is no table of JSON; fix: mend it"):
        known_tokenizer(data, {})


@pytest.mark.parametrize("bos", ["auto", "on", "off"])
@pytest.mark.parametrize("begins", [True, False])
def test_text_begins_as_by_transformers(tmp_path, bos, begins):
    transformers = pytest.importorskip("transformers", reason="needs transformers", exc_type=ImportError)
    named = {"eos_token": "<end>", "bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    # Beside tokenizer.json transformers does not read add_bos_token.
    folder = published(tmp_path / "model", begins, tokenizer_config={**named, "add_bos_token": not begins})
    write(tmp_path / "text", a="hello world", b=" ")
    data = data_in(tmp_path, str(tmp_path / "text"), tokenizer=folder, bos=bos, validation=(0.0,))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)("hello world")["input_ids"]
    plain = [HELLO, HELLO + 1]
    expected = {"auto": theirs, "on": [1, *plain], "off": plain}[bos]
    assert open_corpus(data, {}).whole.tokens.tolist() == [*expected, END]  # and no text stays none
    assert known_tokenizer(data, {}).begin == "<s>" * (len(expected) - 2)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"p": "hello", "a": "world"}))
    rows = replace(data, paths=(str(tmp_path / "rows.jsonl"),), text_key=("p", "a"))
    corpus = open_corpus(rows, {})
    assert corpus.whole.tokens.tolist()[: len(expected) - 2] == expected[:-2]
    assert corpus.whole.masked.tolist() == [[0, len(corpus.whole.tokens) - 1]]  # one word, with an end that is learnt


def test_a_chat_begins_once(tmp_path):
    pytest.importorskip("jinja2", reason="needs the extra: pip install hocket[text]")
    template = "{{ bos_token }} {% for m in messages %}<|user|> {{ m.content }} {% endfor %}<end>"
    named = {"eos_token": "<end>", "bos_token": "<s>", "chat_template": template}
    folder = published(tmp_path / "model", True, tokenizer_config=named)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": [{"role": "user", "content": "hello"}]}))
    for bos in ("auto", "on"):
        data = data_in(tmp_path, str(tmp_path / "rows.jsonl"), tokenizer=folder, bos=bos, validation=(0.0,))
        assert open_corpus(data, {}).whole.tokens.tolist() == [1, USER, HELLO, END, END]


def test_a_beginning_that_no_file_names_is_refused(tmp_path):
    data = DataConfig(tokenizer=published(tmp_path / "model", tokenizer_config={"eos_token": "<end>"}), bos="on")
    with pytest.raises(
        ValueError, match=r"data\.bos = on .*name no token that begins a text; fix: data\.bos = auto, or"
    ):
        known_tokenizer(data, {})


def test_a_file_that_cuts_and_fills_texts_does_not(tmp_path):
    folder = Path(published(tmp_path / "model", tokenizer_config={"eos_token": "<end>"}))
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    content["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "?",
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(DataConfig(tokenizer=str(folder)), {})
    texts = ["hello", " ".join(["world"] * 9)]
    assert [len(tokens) for tokens in tokenizer.encode([text.encode() for text in texts])] == [1, 9]
    assert [len(tokenizer.places(text)[0]) for text in texts] == [1, 9]


def test_another_beginning_or_end_is_another_cache_and_explained(tmp_path, capsys):
    named = {"eos_token": "<end>", "bos_token": "<s>"}
    folder = published(tmp_path / "model", True, tokenizer_config=named)
    write(tmp_path / "text", a="hello world")
    data = data_in(tmp_path, str(tmp_path / "text"), tokenizer=folder, validation=(0.0,))
    ways = (data, replace(data, bos="off"), replace(data, eos="<s>"))
    found = [open_corpus(way, {}).whole.tokens.tolist() for way in ways]
    assert found == [[1, HELLO, HELLO + 1, END], [HELLO, HELLO + 1, END], [1, HELLO, HELLO + 1, 1]]
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({**named, "eos_token": "<|user|>"}))
    assert open_corpus(data, {}).whole.tokens.tolist() == [1, HELLO, HELLO + 1, USER]
    words = ["explain", "tiny", "--data.tokenizer", folder]
    assert "data.bos = auto: each document that is no chat begins with <s>" in command(capsys, *words)[1]
    assert "data.bos = " not in command(capsys, *words, "--data.bos", "off")[1]


def test_bytes_have_no_beginning_and_no_end_to_choose(tmp_path, capsys):
    for words in (["--data.bos", "on"], ["--data.eos", "</s>"]):
        code, _, err = command(capsys, "plan", "tiny", *words)
        assert code == 2
        assert f"{words[0][2:]} = {words[1]} (command line, {words[0]}): byte 0 ends" in err
