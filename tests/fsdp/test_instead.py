"""`instead_of_fsdp2`: what it replaces comes back, however contexts end."""

from __future__ import annotations

import pytest
from torch.distributed import fsdp

import hocket
from hocket.sharding import instead_of_fsdp2

THEIRS = fsdp.fully_shard


def test_it_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), instead_of_fsdp2():
        raise KeyError
    assert fsdp.fully_shard is THEIRS


def test_the_last_of_several_undoes_it() -> None:
    """As in two threads, the first of which ends first."""
    first, second = instead_of_fsdp2(), instead_of_fsdp2()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert fsdp.fully_shard is hocket.fully_shard
    second.__exit__(None, None, None)
    assert fsdp.fully_shard is THEIRS
    for _ in range(2):
        with first, first:
            assert fsdp.fully_shard is hocket.fully_shard
        assert fsdp.fully_shard is THEIRS
