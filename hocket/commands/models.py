"""Commands on models: `hocket generate`, `eval`, `export` and `import`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hocket.commands.options import Parser, some, within, write
from hocket.config import BYTE_VOCAB, BYTES, Config, DataConfig, ModelConfig, PrecisionConfig
from hocket.config.load import given
from hocket.config.load import written as toml_of
from hocket.config.rule import Host, problem, show
from hocket.config.schema import changed, flat, impossible, types, unprintable
from hocket.model.tokenizer import FILE, ends_of, known_tokenizer, load_tokenizer, tokenizer_file
from hocket.problems import stop_if
from hocket.rules import broken, rule_lines
from hocket.train.chat import TEMPLATE

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.model.transformer import Chunk
    from hocket.train.corpus import Corpus
    from hocket.train.data import Stream
    from hocket.train.export import StoredModel


GENERATE = Parser(
    "generate", "Print what the model of a run's newest checkpoint, or of a published model, goes on with."
)
GENERATE.add_argument(
    "model", metavar="RUN", type=some, help="the folder of a run, of a checkpoint, or of a published model"
)
GENERATE.add_argument("--prompt", required=True, type=some, metavar="TEXT", help="the text to go on with")
GENERATE.add_argument("--tokens", type=within(int, 1, 1e9), default=100, metavar="N", help="the most tokens")
GENERATE.add_argument(
    "--temperature", type=within(float, 0, 1e9), default=0.0, help="what logits are divided by; 0 takes the likeliest"
)
GENERATE.add_argument("--seed", type=within(int, 0, 2**63 - 1), default=0, help="of the draws")
GENERATE.add_argument(
    "--device", choices=("auto", "cpu", "cuda"), default="auto", help="weights are fp32 on a CPU, bf16 on a GPU"
)


def run_generate(words: list[str]) -> int:
    """Generate. Returns the exit code."""
    options = GENERATE.read(words)
    from hocket.model.transformer import generate

    device = device_of(options.device)
    with _named(f"generate {options.model}", _LOADABLE):
        config, value, data, stored = opened(Path(options.model))
        _require_sound(config, device)
        if data.tokenizer != BYTES and not (file := tokenizer_file(data.tokenizer)).exists():
            raise ValueError(f"there is no {file}, the tokenizer; fix: put the model's {FILE} there")
    tokenizer = load_tokenizer(data, {"data.tokenizer": options.model})
    prompt = [*tokenizer.begins, *map(int, tokenizer.encode([options.prompt.encode()])[0])]
    if not prompt:
        raise _wrong("prompt", options.prompt, "has no token", "a text")
    ends = stored.ends if stored else ends_of(Path(options.model)) or [tokenizer.separator]
    with _named(f"generate {options.model}", _LOADABLE):
        model = filled(config, value, device)
    tokens = generate(model, prompt, options.tokens, ends, options.seed, options.temperature)
    print(options.prompt + tokenizer.decode(list(tokens)))
    return 0


_LOADABLE = "a run with a whole checkpoint, or a folder of a family that hocket computes"


@contextmanager
def _named(what: str, fix: str) -> Iterator[None]:
    """Errors from files inside this context name the command, and get `fix` if they have none."""
    try:
        yield
    except (OSError, ValueError) as error:
        said = "" if "; fix: " in str(error) else f"; fix: {fix}"
        raise ValueError(f"{what} (command line): {error}{said}") from None


def device_of(asked: str) -> str:
    """The device to compute on. Raises ValueError for `cuda` without a GPU."""
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise _wrong("device", asked, "torch sees no GPU here", "device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked


def _wrong(name: str, value: Any, reason: str, fix: str) -> ValueError:
    return ValueError(f"--{name} {value} (command line): {reason}; fix: {fix}")


def opened(
    folder: Path,
) -> tuple[ModelConfig, Callable[[str, tuple[int, ...]], Tensor], DataConfig, StoredModel | None]:
    """A model's settings, a getter of parameters by name and full shape, its data settings, and a run's checkpoint."""
    from hocket.model.source import whole_shapes
    from hocket.pretrained.weights import PretrainedFolder
    from hocket.train.checkpoint import newest_of
    from hocket.train.export import StoredModel

    if (folder / "config.json").exists():
        published = PretrainedFolder(str(folder))
        published.check(whole_shapes(published.model))
        stored, model, value = None, published.model, published.value
        data = DataConfig(tokenizer=str(folder))
        if model.vocab == BYTE_VOCAB and not tokenizer_file(data.tokenizer).exists():  # written by hocket export
            print(f"note: {folder} has {BYTE_VOCAB} tokens and no tokenizer: a token is a byte", file=sys.stderr)
            template = folder / TEMPLATE
            data = DataConfig(tokenizer=BYTES, chat_template=str(template) if template.exists() else "")
    else:
        stored = StoredModel(newest_of(folder).resolve())
        model, value, data = stored.model, stored.value, stored.data
    return model, value, data, stored


def _require_sound(model: ModelConfig, device: str) -> None:
    """Raise ValueError for a model that no run could compute here, by the rules of runs."""
    config = Config(model=model, precision=PrecisionConfig(compute="bf16" if device == "cuda" else "fp32"))
    about = [
        rule
        for rule in broken(config, Host(), {})
        if all(setting.startswith("model.") or setting == "precision.compute" for setting in rule.settings)
    ]
    stop_if(rule_lines(about, config, Host(), {"": "the model"}))


def filled(config: ModelConfig, value: Callable[[str, tuple[int, ...]], Tensor], device: str) -> Chunk:
    """The whole model with its weights, which are loaded one parameter at a time."""
    import torch

    from hocket.model.source import init_biases
    from hocket.model.transformer import Chunk

    model = Chunk(config, range(config.layers))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(torch.empty(param.shape, dtype=dtype, device=device)))
    model.tie()
    init_biases(model, device)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(value(name, tuple(tensor.shape)))
    return model


# -- `hocket eval`: the held-out loss of a model, by source ------------------------------------------------------------

EVAL_USAGE = """usage: hocket eval RUN|FOLDER --data.paths PATH...

The loss of a model in nats per token: of a run's newest checkpoint, a checkpoint, or a folder of Hugging Face. Every
token of the text that is learnt counts once; of a TOML file of several sources
hocket eval tells the loss of each, too.

  --data.paths                   the text, none of which is kept back (docs/training.md)
  --data.*                       how it is read: as the run has read its own, a folder with data.packing = on and
                                 data.sequence_length = 1024
  --train.sequences              sequences that are computed together, by default 1
  --train.device                 auto takes a GPU if there is one. On a CPU weights are fp32, on a GPU bf16"""
UNREAD = ("data.validation",)
"""Data settings that have no effect on an evaluation."""


def run_eval(words: list[str]) -> int:
    """Evaluate. Returns the exit code."""
    if {"-h", "--help"} & set(words):
        print(EVAL_USAGE)
        return 0
    if not words or words[0].startswith("-"):
        raise ValueError("hocket eval (command line): no model; fix: hocket eval RUN --data.paths my/texts")
    model, *flags = words
    from hocket.train.corpus import open_corpus
    from hocket.train.sources import read_sources

    with _named(f"eval {model}", _LOADABLE):
        sizes, value, read, *_ = opened(Path(model))
    if (Path(model) / "config.json").exists():
        read = replace(read, packing="on", sequence_length=1024)
    config, origins = configured(Config(model=sizes, data=replace(read, paths=())), flags)
    with _named(f"eval {model}", _LOADABLE):
        chunk = filled(sizes, value, device_of(config.train.device))
    found = list[tuple[float, int]]()
    for source in read_sources(config.data, origins):
        corpus = open_corpus(replace(source.data, validation=(0.0,)), source.origins)
        if corpus.vocab > sizes.vocab:
            reason, fix = f"has {corpus.vocab} tokens, and the model {sizes.vocab}", "the model's own tokenizer"
            raise ValueError(problem("data.tokenizer", source.data.tokenizer, source.origins, reason, fix))
        found.append(_loss(chunk, corpus, source.data, config.train.sequences))
        if source.name:
            print(_line(source.name, *found[-1]))
    total, count = (sum(each) for each in zip(*found, strict=True))
    if not count:
        raise ValueError("hocket eval (command line): no token of it is learnt; fix: text with answers")
    if len(found) > 1 or not config.data.sources:
        print(_line("all" if len(found) > 1 else "", total, int(count)))
    return 0


def configured(config: Config, flags: list[str]) -> tuple[Config, dict[str, str]]:
    """The settings, with the flags applied. Raises ValueError for flags that don't apply to an evaluation."""
    found = given(flags, config, {})
    origins, problems = found.origins, found.problems
    read = {name for name in types() if name.startswith("data.") and name not in UNREAD}
    for name in origins.keys() - read - {"train.sequences", "train.device"}:
        problems.append(f"{name} ({origins[name]}): no effect on an evaluation; fix: leave it out")
    if not problems and "data.paths" not in origins:
        problems.append("hocket eval (command line): no text; fix: --data.paths my/texts")
    stop_if(problems)
    config = changed(config, found.settings)
    stop_if(list(impossible(config, origins).values()))
    return config, origins


def _line(name: str, total: float, count: int) -> str:
    mean = total / max(count, 1)
    perplexity = math.exp(mean) if mean < 700 else math.inf
    return f"{name and f'{name}  '}loss {mean:.6f} nats per token, perplexity {perplexity:.4g}, {count:,} tokens"


def _streams(corpus: Corpus, data: DataConfig) -> Iterator[Stream]:
    """All sequences of a text. Unless they are packed by best fit, the remainder after the last one comes as well."""
    from hocket.train.corpus import Split
    from hocket.train.data import Stream

    (tokens, bounds, masked), length = corpus.train, data.sequence_length
    if data.packing == "best_fit":
        stream = Stream(corpus.train, length, 0, data.packing)
        if stream.left_out:
            print(f"note: {stream.left_out:,} documents longer than {length} tokens are left out")
        yield stream
        return
    rest = max(len(tokens) - 1, 0) % length
    for size, first in ((length, 0), (rest, len(tokens) - 1 - rest)):
        if size:
            yield Stream(Split(tokens[first:], bounds - first, masked - first), size, 0, data.packing)


def _loss(chunk: Chunk, corpus: Corpus, data: DataConfig, together: int) -> tuple[float, int]:
    """The summed loss over the learnt tokens of a text, and their number."""
    import torch

    from hocket.kernels import IGNORED
    from hocket.model.documents import documents_of

    total, learnt = 0.0, 0
    device = next(chunk.parameters()).device
    with torch.no_grad():
        for stream in _streams(corpus, data):
            for first in range(0, stream.sequences, together):
                rows = stream.batch(range(first, min(first + together, stream.sequences)))
                ids, targets = (x.to(device) for x in rows[:2])
                documents = None if rows[2] is None else documents_of(rows[2]).to(device)
                count = int((targets != IGNORED).sum())
                total += float(chunk.loss(chunk(ids, documents), targets)) * count
                learnt += count
    return total, learnt


# -- `hocket export`: a run's model in Hugging Face's format ----------------------------------------------------------


EXPORT = Parser("export", "Write the newest checkpoint of a run, or one that is named, as config.json and safetensors.")
EXPORT.add_argument("run", metavar="RUN", type=some, help="the folder of a run, or of a checkpoint")
EXPORT.add_argument("folder", metavar="FOLDER", type=some, help="a new folder")
EXPORT.add_argument(
    "--dtype", choices=("run", "fp32", "bf16"), default="run", help="by default what the run computed in"
)


def run_export(words: list[str]) -> int:
    """Export a checkpoint. Returns the exit code."""
    options = EXPORT.read(words)
    from hocket.train.checkpoint import newest_of
    from hocket.train.export import export  # imports torch

    checkpoint = newest_of(Path(options.run))
    dtype = "" if options.dtype == "run" else options.dtype
    with _named(f"export {options.run} {options.folder}", "a run with a whole checkpoint of a model of some family"):
        family, remarks = export(checkpoint.resolve(), Path(options.folder), dtype)
    print(f"wrote {options.folder}: {family}, of {checkpoint}")
    for remark in remarks:
        print(f"note: {remark}")
    return 0


# -- `hocket import`: the settings of a model in Hugging Face's format -------------------------------------------------

IMPORT = Parser(
    "import",
    "Reads config.json and the headers of all tensors of DIR, and writes the settings of its model to FILE.toml. A "
    "run of that file begins with the weights of DIR: hocket train FILE.toml --mesh.dp 8 --data.paths my/texts",
)
IMPORT.add_argument("folder", metavar="DIR", type=some)
IMPORT.add_argument("target", metavar="FILE.toml", type=some)
IMPORT.add_argument(
    "--data.eos", dest="eos", default="", metavar="TOKEN", help="the token that ends a text, where no file of DIR does"
)


def run_import(words: list[str]) -> int:
    """Check a folder, and write a settings file. Returns the exit code."""
    options = IMPORT.read(words)
    folder, target, eos = str(Path(options.folder).absolute()), options.target, options.eos
    if not target.endswith(".toml"):
        raise ValueError(f"{target} (command line): not a TOML file; fix: hocket import DIR FILE.toml")
    if Path(target).exists():
        raise ValueError(f"{target} (command line): is there already; fix: another name, or remove it")
    if unprintable(folder):
        raise ValueError(f"{show(folder)} (command line): has a character that cannot be shown; fix: rename the folder")
    from hocket.model.source import open_weights  # imports torch
    from hocket.pretrained.families import model_of, read_config

    with _named(folder, "a whole folder of a family that is there"):
        config = read_config(Path(folder))
        model = model_of(config)
        opened = open_weights(replace(model, weights=folder))
        data, remark = _data(folder, model, eos)
    write(target, _toml(folder, config["model_type"], model, data))
    if remark:
        print(f"note: {remark}")
    if opened.further:
        some = f"{len(opened.further)} tensors, such as {min(opened.further)},"
        print(f"note: {some} belong to layers that predict further tokens; hocket leaves them out, and exports none")
    return 0


def _data(folder: str, model: ModelConfig, eos: str) -> tuple[dict[str, str], str]:
    """Settings of the folder's tokenizer, and a note if it has none. Raises ValueError without an end-of-text token."""
    tokenizer = tokenizer_file(folder)
    if tokenizer.exists():
        data = DataConfig(tokenizer=str(tokenizer), eos=eos)
        known_tokenizer(data, {"data.tokenizer": "import", "data.eos": "command line, --data.eos"})
        return {"tokenizer": data.tokenizer} | ({"eos": eos} if eos else {}), ""
    if model.vocab == BYTE_VOCAB:  # hocket export writes such folders
        return {"tokenizer": BYTES}, f"{folder} has {BYTE_VOCAB} tokens and no tokenizer: a token is a byte"
    needs = "a run of this file needs data.tokenizer, or it is refused"
    return {}, f"{folder} has no {FILE}: {needs}"


def _toml(folder: str, family: str, model: ModelConfig, data: dict[str, str]) -> str:
    """The text of a settings file."""
    default = flat(asdict(ModelConfig()))
    said = {name: value for name, value in flat(asdict(model)).items() if value != default[name]}
    settings = {f"model.{name}": value for name, value in {**said, "weights": folder}.items()}
    return toml_of(f"{folder}, {family}", settings | {f"data.{name}": value for name, value in data.items()})
