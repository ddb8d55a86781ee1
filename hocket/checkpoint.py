"""Saves and loads what `hocket.fully_shard` has sharded.

    context = hocket.fully_shard(model, ...)                        # the model itself works in place of its context
    hocket.checkpoint.save(context, optimizer, "checkpoints/10")
    hocket.checkpoint.load(context, optimizer, "checkpoints/10")    # on any number of ranks

`load_pretrained`, `save_pretrained` and `pretrained_buckets` use Hugging Face's format of weights; they also work with
planned steps. For state dicts in memory use `torch.distributed.checkpoint.state_dict`.
"""

from hocket.adapters.live import load_pretrained, pretrained_buckets, save_pretrained
from hocket.fsdp.saving.checkpoint import load, save

__all__ = [
    "load",
    "load_pretrained",
    "pretrained_buckets",
    "save",
    "save_pretrained",
]
