"""`hocket generate`: what a model goes on with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from hocket.commands.options import parse_plain
from hocket.config import BYTE_VOCAB, BYTES, Config, DataConfig, ModelConfig, PrecisionConfig
from hocket.model.tokenizer import FILES, ends_of, load_tokenizer, tokenizer_file
from hocket.problems import stop_if
from hocket.settings.rule import Host
from hocket.settings.rules import broken, rule_lines
from hocket.settings.schema import written
from hocket.train.chat import NAMING, TEMPLATE, Chats
from hocket.train.documents import BadFileError

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.model.tokenizer import Tokenizer
    from hocket.model.transformer import Chunk
    from hocket.train.export import StoredModel

UNFINISHED = "�"
"""What a decoder puts in place of a character whose last bytes are still to come."""


@dataclass(frozen=True)
class Generate:
    """Print what a model goes on with: that of a run's newest checkpoint, or of a folder of Hugging Face."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run, of a checkpoint, or of a published model."""
    prompt: str
    """The text to go on with."""
    chat: bool = False
    """The prompt is a user's message in the chat template. Prints the answer, up to where the template ends it."""
    tokens: int = 100
    """The most tokens."""
    temperature: float = 0.0
    """What logits are divided by; 0 takes the likeliest token."""
    top_k: int = 0
    """Draw from that many of the likeliest tokens; 0 means all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that have this probability together."""
    seed: int = 0
    """Of the draws."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU if there is one. On a CPU weights are fp32, on a GPU bf16."""


def run(words: list[str]) -> int:
    """Generate. Returns the exit code."""
    options = parse_plain(Generate, "generate", "hocket generate RUN --prompt TEXT", words)
    _check(options)
    from hocket.model.generate import Sampling, generate

    device = device_of(options.device)
    try:
        config, value, data, stored = opened(Path(options.model))
        _require_sound(config, device)
        if data.tokenizer != BYTES and not (file := tokenizer_file(data.tokenizer)).exists():
            raise ValueError(f"there is no {file}, the tokenizer; fix: put the model's {' or '.join(FILES)} there")
    except (OSError, ValueError) as error:
        fix = "; fix: a run with a whole checkpoint, or a folder of a family that hocket computes"
        fix = "" if "; fix: " in str(error) else fix
        raise ValueError(f"generate {options.model} (command line): {error}{fix}") from None
    tokenizer = load_tokenizer(data, {"data.tokenizer": options.model})
    text, end = _in_chat(options, data) if options.chat else (options.prompt, "")
    prompt = [*(() if options.chat else tokenizer.begins), *map(int, tokenizer.encode([text.encode()])[0])]
    if not prompt:
        raise _wrong("prompt", options.prompt, "has no token", "a text")
    ends = stored.ends if stored else ends_of(Path(options.model)) or [tokenizer.separator]
    if (special := tokenizer.special(end)) >= 0:
        ends, end = [*ends, special], ""
    model = filled(config, value, device)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    sys.stdout.write("" if options.chat else options.prompt)
    _print(generate(model, prompt, options.tokens, sampling, frozenset(ends)), tokenizer, end)
    return 0


def device_of(asked: str) -> str:
    """Where to compute. Raises ValueError for a GPU that is not there."""
    import torch

    if asked == "cuda" and not torch.cuda.is_available():
        raise _wrong("device", asked, "torch sees no GPU here", "device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if asked == "auto" else asked


def _check(options: Generate) -> None:
    least: dict[str, tuple[float, float]] = {
        "tokens": (1, 1e9), "temperature": (0, 1e9), "top_k": (0, 1e9), "top_p": (1e-9, 1),
        "seed": (0, 2**63 - 1),
    }  # fmt: skip
    for name, (low, high) in least.items():
        given = getattr(options, name)
        if not low <= given <= high:
            raise _wrong(name, given, "out of range", f"at least {low:g}, at most {written(high)}")


def _wrong(name: str, value: Any, reason: str, fix: str) -> ValueError:
    return ValueError(f"--{name} {value} (command line): {reason}; fix: {fix}")


def opened(
    folder: Path,
) -> tuple[ModelConfig, Callable[[str, tuple[int, ...]], Tensor], DataConfig, StoredModel | None]:
    """A model's settings, its parameters by name and whole shape, the settings of its text, and a run's checkpoint."""
    from hocket.model.source import whole_shapes
    from hocket.pretrained.convert import PretrainedFolder
    from hocket.train.export import StoredModel
    from hocket.train.folders import newest_of

    if (folder / "config.json").exists():
        published = PretrainedFolder(str(folder))
        published.check(whole_shapes(published.model))
        stored, model, value = None, published.model, published.value
        data = DataConfig(tokenizer=str(folder))
        if model.vocab == BYTE_VOCAB and not tokenizer_file(data.tokenizer).exists():  # hocket export writes such ones
            print(f"note: {folder} has {BYTE_VOCAB} tokens and no tokenizer: a token is a byte", file=sys.stderr)
            template = folder / TEMPLATE
            data = DataConfig(tokenizer=BYTES, chat_template=str(template) if template.exists() else "")
    else:
        stored = StoredModel(newest_of(folder).resolve())
        model, value, data = stored.model, stored.value, stored.data
    return model, value, data, stored


def _require_sound(model: ModelConfig, device: str) -> None:
    """Raise ValueError for a model that no run computes here, by the rules of runs."""
    config = Config(model=model, precision=PrecisionConfig(compute="bf16" if device == "cuda" else "fp32"))
    about = [rule for rule in broken(config, Host(), {}) if all(map(_of_the_model, rule.settings))]
    stop_if(rule_lines(about, config, Host(), {"": "the model"}))


def _of_the_model(setting: str) -> bool:
    return setting.startswith("model.") or setting == "precision.compute"


def _in_chat(options: Generate, data: DataConfig) -> tuple[str, str]:
    """The prompt as a user's message, and the text that ends an answer."""
    chats = Chats(data)
    try:
        return chats.question(options.prompt), chats.end
    except BadFileError as error:
        beside = "a run with data.chat_template" if data.tokenizer == BYTES else f"{TEMPLATE} beside the tokenizer"
        fix = error.fix if error.fix != NAMING else f"leave it out, or {beside}"
        raise ValueError(f"--chat (command line): {options.model} {error}; fix: {fix}") from None


def filled(config: ModelConfig, value: Callable[[str, tuple[int, ...]], Tensor], device: str) -> Chunk:
    """The whole model with its weights, one parameter at a time."""
    import torch

    from hocket.model.init import init_biases
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


def _print(tokens: Iterable[int], tokenizer: Tokenizer, end: str) -> None:
    """Print tokens as they come, each character when its last byte is there, until a text comes that is the end."""
    seen, shown = list[int](), 0
    for token in tokens:
        seen.append(token)
        text, found, _ = tokenizer.decode(seen).partition(end) if end else (tokenizer.decode(seen), "", "")
        whole = text if found else text.removesuffix(UNFINISHED)
        begun = 0 if found else max((n for n in range(1, len(end)) if whole.endswith(end[:n])), default=0)
        sys.stdout.write(whole[shown : len(whole) - begun])
        sys.stdout.flush()
        shown = max(shown, len(whole) - begun)
        if found:
            sys.stdout.write("\n")
            return
    sys.stdout.write(tokenizer.decode(seen)[shown:] + "\n")
