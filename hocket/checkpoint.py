"""Saving and loading what `hocket.fully_shard` has sharded.

    context = hocket.fully_shard(model, ...)                        # or the model itself, in the place of its context
    hocket.checkpoint.save(context, optimizer, "checkpoints/10")
    hocket.checkpoint.load(context, optimizer, "checkpoints/10")    # on any number of ranks

`load_pretrained`, `save_pretrained` and `pretrained_buckets` have weights as Hugging Face's files have them, of planned
steps too. State dicts in memory are those of `torch.distributed.checkpoint.state_dict`.
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
