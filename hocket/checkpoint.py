"""Saving and loading what `hocket.fully_shard` has sharded.

    context = hocket.fully_shard(model, ...)                        # or the model itself, in the place of its context
    hocket.checkpoint.save(context, optimizer, "checkpoints/10")
    hocket.checkpoint.load(context, optimizer, "checkpoints/10")    # on any number of ranks

`model_state` and `optimizer_state` are the same as dictionaries of whole tensors. `load_pretrained`, `save_pretrained`
and `pretrained_buckets` have weights as Hugging Face's files have them, of planned steps too.
"""

from hocket.adapters.live import load_pretrained, pretrained_buckets, save_pretrained
from hocket.fsdp.saving.checkpoint import load, save
from hocket.fsdp.saving.state import load_model_state, load_optimizer_state, model_state, optimizer_state

__all__ = [
    "load",
    "load_model_state",
    "load_optimizer_state",
    "load_pretrained",
    "model_state",
    "optimizer_state",
    "pretrained_buckets",
    "save",
    "save_pretrained",
]
