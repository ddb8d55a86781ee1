"""Text of which a part is learnt: prompts, chats, and whole documents in sequences."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hocket.commands.models import filled
from hocket.config import Config, DataConfig, PrecisionConfig, TrainConfig
from hocket.kernels import IGNORED
from hocket.model.documents import PADDING, documents_of
from hocket.model.source import init_tensor
from hocket.resolve import Settings, resolve
from hocket.train.chat import Chats
from hocket.train.corpus import Corpus, Split, inside, open_corpus
from hocket.train.data import Stream, best_fit, make_streams
from hocket.train.documents import BadFileError
from hocket.train.sources import open_text
from hocket.train.trainer import Trainer
from tests.helpers.command import ALONE, SMALL, hocket
from tests.helpers.plans import small

CHATML = """{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<end>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
TAGGED = """{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>
{% generation %}{{ message.content }}<end>{% endgeneration %}
{% else %}<|{{ message.role }}|>{{ message.content | trim }}{% endif %}{% endfor %}"""
CHAT = [
    {"role": "user", "content": "what is 1 + 1?"},
    {"role": "assistant", "content": "größer: 2"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def lines_in(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def opened(folder: Path, *rows: dict[str, Any], **more: Any) -> Corpus:
    return open_corpus(data_of(folder, *rows, **more), {})


def data_of(folder: Path, *rows: dict[str, Any], template: str = CHATML, **more: Any) -> DataConfig:
    if template:
        (folder / "t.jinja").write_text(template)
        more.setdefault("chat_template", str(folder / "t.jinja"))
    data = DataConfig(paths=(lines_in(folder, *rows),), cache=str(folder / "cache"), validation=(0.0,))
    return replace(data, **more)


def learnt(corpus: Corpus) -> bytes:
    """The tokens that are targets, each document's behind the one before."""
    mask = np.ones(len(corpus.whole.tokens), dtype=bool)
    for first, end in corpus.whole.masked:
        mask[first:end] = False
    return bytes(corpus.whole.tokens[mask])


# -- prompts and chats -----------------------------------------------------------------------------------------------


def test_a_prompt_is_read_and_not_learnt(tmp_path):
    rows = [{"question": f"what is {i}? ", "answer": f"größer {i}"} for i in range(20)]
    corpus = opened(tmp_path, *rows, text_key=("question", "answer"))
    texts = {(row["question"] + row["answer"]).encode() for row in rows}
    assert set(bytes(corpus.whole.tokens).split(b"\0")[:-1]) == texts
    assert sorted(learnt(corpus).split(b"\0")[:-1]) == sorted(row["answer"].encode() for row in rows)
    assert f"of which {sum(len(row['question']) for row in rows)} are read and not learnt" in str(corpus)


def test_what_the_assistant_says_is_learnt(tmp_path):
    corpus = opened(tmp_path, {"messages": CHAT}, text_key=("messages",))
    assert bytes(corpus.whole.tokens).decode().startswith("<|user|>what is 1 + 1?<end>\n<|assistant|>größer: 2<end>\n")
    assert learnt(corpus).decode() == "größer: 2<end>\nyes<end>\n"


def test_a_template_says_what_is_learnt(tmp_path):
    corpus = opened(tmp_path, {"messages": CHAT}, text_key=("messages",), template=TAGGED)
    assert learnt(corpus).decode() == "größer: 2<end>yes<end>"


def test_tables_have_chats_and_prompts_too(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra: pip install hocket[text]")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    data = data_of(tmp_path, text_key=("messages",))
    parquet.write_table(pyarrow.table({"messages": [CHAT, CHAT[:2]]}), tmp_path / "a.parquet")
    corpus = open_corpus(replace(data, paths=(str(tmp_path / "a.parquet"),)), {})
    assert sorted(learnt(corpus).decode().split("<end>\n")) == ["", "größer: 2", "größer: 2", "yes"]


@pytest.mark.parametrize("template", [TAGGED, TAGGED.replace("{{ bos_token }}", "")])
def test_tokens_and_masks_are_those_of_transformers(tmp_path, template):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "</s>", "<end>", "<|user|>", "<|assistant|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["what is 1 + 1? sure? yes, it is 2"] * 10, trainer)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = template
    theirs.save_pretrained(tmp_path / "model")
    expected = theirs.apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
    )
    more = {"tokenizer": str(tmp_path / "model"), "text_key": ("messages",)}
    corpus = opened(tmp_path, {"messages": CHAT}, template="", **more)
    assert corpus.whole.tokens[:-1].tolist() == expected["input_ids"]
    mask = np.ones(len(corpus.whole.tokens), dtype=int)
    for first, end in corpus.whole.masked:
        mask[first:end] = 0
    assert mask.tolist() == [*expected["assistant_masks"], 0]
    assert any(mask)


THINKS = """{% set ns = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}
{% set ns.last = messages.index(m) %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}<A>
{% if loop.index0 > ns.last %}<think>{{ m.thoughts or '' }}</think>{% endif %}{{ m.content.split('</think>')[-1] }}<end>
{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<A>
{% endif %}"""
"""As Qwen3's: thoughts are written in turns since the last question."""
FORGETS = """{% for m in messages %}{% if m.role == 'assistant' %}<A>{{ m.content.split('</think>')[-1] }}<end>
{%- else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>
{% endif %}"""
"""As DeepSeek-R1's: no thoughts are written, and the prompt for an answer opens one."""


def taught(corpus: Corpus) -> dict[str, list[str]]:
    """What is learnt of each document: its ranges, by the document's text."""
    split, tokens = [*corpus.whole.bounds[1:-1], len(corpus.whole.tokens)], corpus.whole.tokens
    mask = np.ones(len(tokens), dtype=bool)
    for first, end in corpus.whole.masked:
        mask[first:end] = False
    found = {}
    for first, end in zip(corpus.whole.bounds[:-1], split, strict=True):
        edges = np.flatnonzero(np.diff(mask[first:end], prepend=False, append=False)).reshape(-1, 2)
        found[bytes(tokens[first : end - 1]).decode()] = [
            bytes(tokens[first + a : first + b]).decode() for a, b in edges
        ]
    assert len(found) == corpus.documents
    return found


def test_a_template_that_drops_thoughts_makes_a_document_of_each_turn(tmp_path):
    chat = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "one", "thoughts": "ein"},
        {"role": "user", "content": "2?"},
        {"role": "assistant", "content": "call", "thoughts": "zwei"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3?"},
        {"role": "assistant", "content": "three", "thoughts": "drei"},
        {"role": "user", "content": "4?"},
    ]
    found = taught(opened(tmp_path, {"messages": chat}, text_key=("messages",), template=THINKS))
    assert found == {
        "<user>1?<A>\n<think>ein</think>one<end>\n": ["<think>ein</think>one<end>\n"],
        "<user>1?<A>\none<end>\n<user>2?<A>\n<think>zwei</think>call<end>\n<tool>two<A>\n<think></think>2<end>\n": [
            "<think>zwei</think>call<end>\n",
            "<think></think>2<end>\n",
        ],
        "<user>1?<A>\none<end>\n<user>2?<A>\ncall<end>\n<tool>two<A>\n2<end>\n<user>3?<A>\n<think>drei</think>three<end>"
        "\n": ["<think>drei</think>three<end>\n"],
    }


@pytest.mark.parametrize("said", ["four", "<think>2 + 2</think>four", "<thin four"])
def test_a_prompt_that_opens_a_thought_is_no_part_of_the_answer(tmp_path, said):
    chat = [*CHAT[:2], {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": said}]
    found = taught(opened(tmp_path, {"messages": chat}, text_key=("messages",), template=FORGETS))
    text = said.split(">")[-1]
    assert found == {
        f"<user>what is 1 + 1?<A>größer: 2<end><user>2 + 2?<A>{text}<end>": ["größer: 2<end>", f"{text}<end>"]
    }


TOOLED = """{% if tools %}{{ tools | tojson(sort_keys=true) }}{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' and m.content is none %}
{%- for call in m.tool_calls %}{{ call | tojson }}{% endfor %}{% endif %}
{%- for key in m if key not in ('role', 'content', 'tool_calls') %}!{{ key }}{% endfor %}<end>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("template", [TOOLED, CHATML])
def test_chats_of_a_table_are_those_of_lines(tmp_path, template, as_text):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra: pip install hocket[text]")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    tools: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "int"}}}},
        {"type": "function", "function": {"name": "see", "parameters": {"b": {"type": "str"}}}},
    ]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    calls = [
        {"role": "user", "content": "and 1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "add"},
        {"role": "assistant", "content": "it is 2"},
    ]
    rows = [{"messages": calls, "tools": json.dumps(tools) if as_text else tools}, {"messages": CHAT}]
    data = data_of(tmp_path, *rows, text_key=("messages",), template=template)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert "tool_calls': None" in str(parquet.read_table(tmp_path / "a.parquet").to_pylist())
    found = taught(open_corpus(data, {}))
    assert taught(open_corpus(replace(data, paths=(str(tmp_path / "a.parquet"),)), {})) == found
    text = next(text for text in found if "and 1?" in text)
    assert "None" not in text
    if template == TOOLED:
        assert text.startswith(
            '[{"function": {"name": "add", "parameters": {"a": {"type": "int"}}}, "type": "function"}'
        )
        assert '<assistant>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}<end>' in text


def test_json_in_a_template_is_that_of_transformers(tmp_path):
    utils = pytest.importorskip("transformers.utils.chat_template_utils", reason="needs transformers")
    forms = [
        "",
        "separators=(',', ':')",
        "sort_keys=true",
        "indent=2, sort_keys=true",
        "ensure_ascii=true",
        "true",
        "false, 1",
    ]
    template = "".join(f"{{{{ tools | tojson{f'({form})' if form else ''} }}}}\n" for form in forms)
    template += "{% for m in messages %}{{ m.content }}{% endfor %}"
    tools = [{"type": "function", "function": {"name": "größer<'&>", "b": [1, {"z": 1, "a": 2}]}}]
    corpus = opened(tmp_path, {"messages": CHAT, "tools": tools}, text_key=("messages",), template=template)
    ((theirs,), _) = utils.render_jinja_template([CHAT], tools=tools, chat_template=template)
    assert bytes(corpus.whole.tokens[:-1]).decode() == theirs


REWRITES = "{% for message in messages %}{% if loop.last %}[{{ message.content }}]{% else %}.{% endif %}{% endfor %}"


@pytest.mark.parametrize(
    ("messages", "template", "reason"),
    [
        (CHAT, REWRITES, "writes the turns before an answer in another way"),
        (CHAT, "{{ raise_exception('no user') }}", r"t\.jinja refuses \(no user\)"),
        (CHAT, "{% if %}", r"t\.jinja has no template"),
        (CHAT, "{{ ''.__class__.__mro__[1].__subclasses__() }}", r"t\.jinja refuses .*unsafe"),
        (
            CHAT,
            "{{ 1 // 0 }}",
            r"in line 1 that the template of .*t\.jinja refuses \(integer division or modulo by zero\)",
        ),
        (CHAT, "{{ range(10**12) }}", r"in line 1 that .*t\.jinja refuses \(Range too big"),
        (CHAT, "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", r"t\.jinja refuses \(maximum recursion depth"),
        (CHAT, "{{ raise_exception('a\\nb\\x1b[2J') }}", r"t\.jinja refuses \(a b\\x1b\[2J\)"),
        (CHAT, "{{" + "(" * 10**5 + "}}", r"t\.jinja has no template \("),
        (CHAT, "", "there is no chat template; fix: data.chat_template = "),
        (["hello"], CHATML, "has no message but 'hello' in line 1"),
        ([{"content": "x"}], CHATML, "has no message but"),
        ([{"from": "human", "value": "x"}], CHATML, "in line 1; fix: messages of role and content"),
        ([{"role": "user", "content": "a\ufdd0"}], CHATML, "code points in line 1"),
        (7, CHATML, "has no text but 7 as messages in line 1"),
    ],
)
def test_chats_that_are_refused(tmp_path, messages, template, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        opened(tmp_path, {"messages": messages}, text_key=("messages",), template=template)
    assert "; fix: " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("content", ["[" * 10**5, '{"chat_template": [1]}', '{"bos_token": {"a": 1}}', "[]", "{"])
def test_a_damaged_file_beside_a_tokenizer_is_one_line(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    chats = Chats(DataConfig(tokenizer=str(tmp_path)))
    with pytest.raises(BadFileError, match=r"^has chats, and .*tokenizer_config\.json cannot be read \(") as caught:
        chats.marked(CHAT, None, "line 1")
    assert len(str(caught.value).splitlines()) == 1


LOOPS = """{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.revindex0 }}
{{ loop.cycle(1, 2) }}{% for k, v in m.items() if v %}{{ k ~ v * 2 }}{% else %}none{% endfor %}{{ loop.nextitem }}
{% if loop.last %}{% break %}{% endif %}
{% endfor %}{% for x in [[1, [2]], 3] recursive %}{{ loop(x) if x is sequence else x ** 2 }}{% endfor %}"""


def test_loops_are_those_of_jinja(tmp_path):
    sandbox = importlib.import_module("jinja2.sandbox").ImmutableSandboxedEnvironment
    plain = sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]).from_string(LOOPS)
    (tmp_path / "t.jinja").write_text(LOOPS)
    asked = [message for message in CHAT if message["role"] == "user"]
    (found,) = Chats(DataConfig(chat_template=str(tmp_path / "t.jinja"))).marked(asked, None, "line 1")
    assert found.text == plain.render(messages=asked)


def test_a_missing_template_or_package_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"data.chat_template = none .*no such file; fix: "):
        opened(tmp_path, {"messages": CHAT}, chat_template="none")
    monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)  # importing it now fails
    with pytest.raises(ValueError, match=r"pip install 'hocket\[text\]'"):
        opened(tmp_path, {"messages": CHAT}, text_key=("messages",))


def test_a_changed_template_is_another_text(tmp_path):
    first = opened(tmp_path, {"messages": CHAT}, text_key=("messages",))
    second = opened(tmp_path, {"messages": CHAT}, text_key=("messages",), template=TAGGED.replace("<", "["))
    assert bytes(first.whole.tokens) != bytes(second.whole.tokens)
    assert first.sample != second.sample


def settings_of(data: DataConfig, microbatches: int = 1, eval_batches: int = 0) -> Settings:
    return resolve(Config(data=data, train=TrainConfig(microbatches=microbatches, eval_batches=eval_batches)))


def test_masks_are_ranges_on_disk(tmp_path):
    """A byte for each token is much for a large corpus. Ranges that touch, and their borders, count as they should."""
    corpus = opened(tmp_path, *[{"p": "abc", "a": "de" * n} for n in range(1, 9)], text_key=("p", "a"), template="")
    masked = corpus.whole.masked
    assert isinstance(masked, np.memmap)
    assert (masked[:, 1] - masked[:, 0]).tolist() == [3] * 8
    assert corpus.whole.unlearnt == 24
    mask = np.zeros(20, dtype=bool)
    mask[2:9] = mask[12:13] = True
    assert (inside(np.arange(20), np.array([[2, 5], [5, 9], [12, 13]])) == mask).all()


def test_masks_need_sequences_that_know_their_documents(tmp_path):
    data = data_of(tmp_path, {"messages": CHAT}, text_key=("messages",))
    settings = settings_of(data)
    with pytest.raises(ValueError, match=r"data.packing = off learns everything; fix: data.packing = best_fit, or on"):
        make_streams(open_text(settings), settings)


@pytest.mark.parametrize("packing", ["on", "best_fit"])
def test_sequences_ask_for_answers_alone(tmp_path, packing):
    rows = [{"p": "?" * (i % 5 + 1), "a": chr(97 + i) * (i + 1)} for i in range(12)]
    data = data_of(tmp_path, *rows, text_key=("p", "a"), packing=packing, sequence_length=20, template="")
    settings = settings_of(data)
    stream, _ = make_streams(open_text(settings), settings)
    asked = Counter[int]()
    for position in range(stream.streams[0].sequences):
        ids, targets, numbers = stream.row(position)
        assert numbers is not None
        asked.update(targets[targets != IGNORED].tolist())
        assert (ids[(targets != IGNORED) & (targets > 0)] != PADDING).all()
    answers = Counter(x for row in rows for x in [*row["a"].encode(), 0])
    if packing == "best_fit":
        assert asked == answers
    else:  # what is left at the end is no sequence
        assert asked <= answers
        assert asked.total() > answers.total() - 21
    assert ord("?") not in asked


# -- whole documents -------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 120))
def test_bins_hold_everything_once_and_are_filled_well(sizes, room):
    bins = best_fit(np.array(sizes, dtype=int), room)
    assert sorted(thing for each in bins for thing in each) == list(range(len(sizes)))
    loads = [sum(sizes[thing] for thing in each) for each in bins]
    assert all(load <= room for load in loads)
    assert len(bins) <= 11 / 9 * -(-sum(sizes) // room) + 1 or sorted(loads)[0] + sorted(loads)[1] > room


@given(st.lists(st.integers(2, 12), min_size=1, max_size=20), st.integers(4, 12))
def test_whole_documents_stand_in_sequences_with_padding_behind(lengths, length):
    tokens = np.arange(1, sum(lengths) + 1)
    bounds = np.cumsum([0, *lengths])
    stream = Stream(Split(tokens, bounds, np.zeros((0, 2), dtype=np.int64)), length, 0, "best_fit")
    assert stream.left_out == sum(n - 1 > length for n in lengths)
    found = []
    for position in range(stream.sequences):
        ids, targets, numbers = stream.row(position)
        assert numbers is not None
        real = numbers != PADDING
        assert ((targets == ids + 1) == real).all()
        assert (targets[~real] == IGNORED).all()
        assert not real[np.flatnonzero(~real)[0] :].any() if not real.all() else True
        each = [numbers == number for number in set(numbers[real].tolist())]
        found += [[*ids[here].tolist(), int(targets[here][-1])] for here in each]
    whole = [tokens[a:b].tolist() for a, b in pairwise(bounds) if b - a - 1 <= length]
    assert sorted(found) == whole


def test_a_document_on_the_border_of_a_split_is_in_neither(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / str(i)).write_text(chr(97 + i) * 9)
    data = DataConfig(
        paths=(str(tmp_path / "text"),), cache=str(tmp_path / "cache"), packing="best_fit", validation=(0.25,),
        sequence_length=30,
    )  # fmt: skip
    settings = settings_of(data, eval_batches=1)
    train, validations = make_streams(open_text(settings), settings)
    texts = []
    for stream in (train.streams[0], validations[""]):
        rows = [stream.row(position)[0] for position in range(stream.sequences)]
        texts.append(Counter(int(x) for row in rows for x in row if x))
    assert set(texts[0].values()) == set(texts[1].values()) == {9}
    assert (len(texts[0]), len(texts[1])) == (7, 2)
    assert not set(texts[0]) & set(texts[1])


def test_documents_longer_than_a_sequence_ask_for_longer_sequences(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(10):
        (tmp_path / "text" / str(i)).write_text(chr(97 + i) * 9)
    data = DataConfig(
        paths=(str(tmp_path / "text"),), cache=str(tmp_path / "cache"), packing="best_fit", validation=(0.25,),
        sequence_length=4,
    )  # fmt: skip
    settings = settings_of(data, eval_batches=1)
    with pytest.raises(ValueError, match=r"documents are longer .*fix: data.packing = on, .*, a longer data.sequence"):
        make_streams(open_text(settings), settings)


def chat(i: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "say " + "x" * (i % 9)}, {"role": "assistant", "content": "y" * (i % 7 + 1)}]


def test_a_run_of_chats_has_the_same_losses_on_any_ranks(tmp_path):
    data_of(tmp_path, *({"messages": chat(i)} for i in range(60)))
    small = [*SMALL, "--data.paths", "rows.jsonl", "--data.text_key", "messages", "--data.chat_template", "t.jinja"]
    small += ["--data.packing", "best_fit", "--data.sequence_length", "64", "--data.validation", "0.4"]
    small += ["--train.steps", "2", "--precision.compute", "fp32", "--model.aux_loss", "0", "--model.bias_rate", "0"]
    losses = []
    for name, mesh, microbatches in (("one", ALONE, 4), ("two", ["--mesh.pp", "1", "--mesh.ep", "1"], 2)):
        some = [*mesh, "--train.microbatches", str(microbatches), "--run.name", name]
        ended = hocket(tmp_path, "train", *small, *some)
        assert ended.code == 0, ended.err
        assert "are read and not learnt" in ended.out
        assert "% full" in ended.out
        lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        losses.append([line.get("loss", line.get("validation_loss")) for line in map(json.loads, lines)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_validation_loss_is_the_mean_over_all_its_targets(tmp_path):
    """Of answers of one token and of many, the loss of a plain model, whatever a batch is; a run learns nothing."""
    rows = [
        {"p": "?" * (1 + i % 9), "a": "".join(chr(97 + i * k % 26) for k in range(1 + i % 3 * 12))} for i in range(40)
    ]
    data = data_of(
        tmp_path, *rows, text_key=("p", "a"), packing="best_fit", sequence_length=48, template="",
        validation=(0.5,),
    )  # fmt: skip
    model, told = small(vocab=256, experts=0, layers=2), []
    for batch, count in ((1, 8), (2, 4)):
        train = TrainConfig(microbatches=batch, eval_batches=count, device="cpu", keep=(0,), transport="gloo")
        precision = PrecisionConfig(compute="fp32")
        settings = resolve(Config(model=model, data=data, train=train, precision=precision))
        trainer = Trainer(settings, 0, torch.device("cpu"))
        trainer.begin()
        metrics = Said()
        trainer._validate(metrics)  # type: ignore[arg-type]
        told.append(metrics.losses)
        stream = trainer.validation_streams[""]
        trainer.engine.close()
    plain = filled(model, lambda name, shape: init_tensor(name, shape, model, 0), "cpu")
    ids, targets, numbers = stream.batch(list(range(8)))
    assert numbers is not None
    assert plain.head is not None
    with torch.no_grad():
        logits = plain.head(plain(ids, documents_of(numbers))).flatten(0, 1).double()
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED).item()
    assert told == [[pytest.approx(expected, rel=1e-6)]] * 2


class Said:
    """In the place of a run's metrics."""

    def __init__(self) -> None:
        self.losses = list[float]()

    def validation(self, step: int, loss: float, by_source: object) -> None:
        self.losses.append(loss)


def test_a_message_without_content_is_refused_or_left_out(tmp_path):
    ask, empty = {"role": "user", "content": "?"}, {"role": "assistant", "content": None}
    rows = {"text": [ask, empty]}, {"text": chat(1)}
    with pytest.raises(ValueError, match=r"has a message of assistant without content in line 1; fix: content for it"):
        opened(tmp_path, *rows)
    kept = opened(tmp_path, *rows, skip_empty=True)
    assert (kept.documents, kept.empty) == (1, 1)


def test_text_of_which_nothing_is_learnt_is_refused(tmp_path):
    data = data_of(tmp_path, *({"text": [{"role": "user", "content": "hello"}]} for _ in range(40)))
    settings = settings_of(replace(data, packing="best_fit"))
    with pytest.raises(ValueError, match=r"no token of it is learnt: .* fix: text with answers"):
        make_streams(open_text(settings), settings)
