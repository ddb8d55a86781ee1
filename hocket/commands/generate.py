"""`hocket generate`: what a model goes on with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from hocket.commands.options import parse_plain
from hocket.config import DataConfig, ModelConfig
from hocket.files import json_in
from hocket.settings.schema import written

if TYPE_CHECKING:
    from torch import Tensor

    from hocket.model.tokenizer import Tokenizer
    from hocket.model.transformer import Chunk

UNFINISHED = "�"
"""What a decoder puts in place of a character whose last bytes are still to come."""


@dataclass(frozen=True)
class Generate:
    """Print what a model goes on with: that of a run's newest checkpoint, or of a folder of Hugging Face."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder of a run, of a checkpoint, or of a published model."""
    prompt: str
    """The text to go on with."""
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
    from hocket.model.tokenizer import load_tokenizer

    device = device_of(options.device)
    try:
        config, value, data = opened(Path(options.model))
    except (OSError, ValueError) as error:
        fix = "a run with a whole checkpoint, or a folder of a family that hocket computes"
        raise ValueError(f"generate {options.model} (command line): {error}; fix: {fix}") from None
    tokenizer = load_tokenizer(data.tokenizer, {"data.tokenizer": options.model})
    (prompt,) = tokenizer.encode([options.prompt.encode()])
    if not len(prompt):
        raise _wrong("prompt", options.prompt, "has no token", "a text")
    model = filled(config, value, device)
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    sys.stdout.write(options.prompt)
    ends = _ends(Path(options.model), tokenizer)
    _print(generate(model, [int(token) for token in prompt], options.tokens, sampling, ends), tokenizer)
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


def opened(folder: Path) -> tuple[ModelConfig, Callable[[str, tuple[int, ...]], Tensor], DataConfig]:
    """A model's settings, its parameters by name and whole shape, and the settings of its text."""
    from hocket.config import BYTE_VOCAB, BYTES
    from hocket.model.source import whole_shapes
    from hocket.model.tokenizer import tokenizer_file
    from hocket.pretrained.convert import PretrainedFolder
    from hocket.train.export import StoredModel
    from hocket.train.folders import newest_of

    if (folder / "config.json").exists():
        published = PretrainedFolder(str(folder))
        published.check(whole_shapes(published.model))
        named = str(folder)
        if published.model.vocab == BYTE_VOCAB and not tokenizer_file(named).exists():
            print(f"note: {folder} has {BYTE_VOCAB} tokens and no tokenizer: a token is a byte", file=sys.stderr)
            named = BYTES  # hocket export writes such folders
        return published.model, published.value, DataConfig(tokenizer=named)
    stored = StoredModel(newest_of(folder).resolve())
    return stored.model, stored.value, stored.data


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


def _ends(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end a text: the tokenizer's separator, and what a published model's files say."""
    ends = {tokenizer.separator}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            found = json_in(folder / name)
            said = found.get("eos_token_id") if isinstance(found, dict) else None
            ends |= {token for token in (said if isinstance(said, list) else [said]) if isinstance(token, int)}
    return frozenset(ends)


def _print(tokens: Iterable[int], tokenizer: Tokenizer) -> None:
    """Print tokens as they come, each character when its last byte is there."""
    seen, shown = list[int](), 0
    for token in tokens:
        seen.append(token)
        text = tokenizer.decode(seen)
        whole = text.removesuffix(UNFINISHED)
        sys.stdout.write(whole[shown:])
        sys.stdout.flush()
        shown = len(whole)
    sys.stdout.write(tokenizer.decode(seen)[shown:] + "\n")
