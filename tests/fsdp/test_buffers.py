"""Buffers of full size: memory that comes and goes under bound views, and the ring of staging buffers."""

import weakref

import pytest
import torch
from torch import nn

from hocket.fsdp.buffers import FullBuffer, StagingMemory, StagingRing
from hocket.runtime.queue import History, Queue
from hocket.runtime.transports import Pending

CPU = torch.device("cpu")


def ring(count=2):
    return StagingRing(count, 100, torch.bfloat16, CPU)


def reduction(queue, log, name):
    return queue.submit(name, lambda: Pending(lambda: log.append(name)))


def test_dynamic_memory_comes_and_goes_under_bound_views():
    buffer = FullBuffer.dynamic(100, torch.float32, CPU)
    assert not buffer.is_fixed
    assert not buffer.allocated
    assert buffer.nbytes == 400
    buffer.allocate()
    param = nn.Parameter(torch.empty(3, 4))
    param.data = buffer.flat[10:22].view(3, 4)
    shifted = param.t()  # what autograd saves of a linear layer
    for value in (1.0, 2.0):
        buffer.free()
        assert buffer.flat.untyped_storage().nbytes() == 0
        buffer.allocate()
        buffer.allocate()
        buffer.flat.fill_(value)
        assert (param == value).all()
        assert (shifted == value).all()


def test_fixed_memory_stays():
    buffer = FullBuffer.fixed(100, torch.bfloat16, CPU)
    pointer = buffer.flat.data_ptr()
    assert 0.01 < buffer.flat.float().std() < 0.03
    buffer.free()
    buffer.allocate()
    assert buffer.is_fixed
    assert buffer.allocated
    assert buffer.flat.data_ptr() == pointer
    assert buffer.nbytes == 200


def test_a_ring_makes_buffers_when_needed_and_reuses_the_one_given_back_first():
    log, queue, staging = [], Queue("reduce", CPU), ring()
    assert staging.made == 0
    a = staging.take("a", 100)
    assert staging.made == 1
    staging.give(a, reduction(queue, log, "reduce a"))
    b = staging.take("b", 70)  # a is being reduced, so a new one
    assert (staging.made, b.numel()) == (2, 70)
    assert staging.nbytes == 400
    staging.give(b, reduction(queue, log, "reduce b"))
    assert not log
    c = staging.take("c", 0)  # waits for that one only
    assert log == ["reduce a"]
    staging.give(c, None)
    d = staging.take("d", 100)
    assert d.data_ptr() == a.data_ptr()
    assert staging.take("e", 100).data_ptr() == b.data_ptr()
    assert log == ["reduce a", "reduce b"]
    assert staging.made == 2


def test_a_ring_does_not_grow_while_old_buffers_are_done():
    log, queue, staging = [], Queue("reduce", CPU), ring(count=4)
    buffer = staging.take("a", 100)
    staging.give(buffer, reduction(queue, log, "reduce a"))
    queue.join()
    assert staging.take("b", 100).data_ptr() == buffer.data_ptr()
    assert staging.made == 1


@pytest.mark.parametrize("make", [ring, lambda count: memory(count)[0]], ids=["ring", "memory"])
def test_the_caller_waits_for_one_reduction_only(make):
    history = History()
    queue, other = Queue("reduce", CPU, history), Queue("other", CPU, history)
    staging = make(1)
    buffer = staging.take("a", 100)
    staging.give(buffer, reduction(queue, [], "reduce a"))
    reduction(other, [], "outer a")
    staging.take("b", 100)
    written = history.note("backward b")
    assert history.before(history.one("reduce a"), written)
    assert history.concurrent(history.one("outer a"), written)


def test_a_full_ring_names_who_holds_it():
    staging = ring()
    kept = [staging.take(f"unit 'layers.{i}'", 100) for i in range(2)]
    with pytest.raises(ValueError, match=r"unit 'layers.2' needs .* all 2 .* of unit 'layers.0', unit 'layers.1':.*=2"):
        staging.take("unit 'layers.2'", 100)
    assert len(kept) == 2


def memory(count=2):
    """With the stream of its caller, which a test may change."""
    stream = [0]
    return StagingMemory(count, torch.bfloat16, CPU, lambda: stream[0]), stream


def test_staging_memory_goes_when_the_caller_is_behind_its_reduction():
    log, queue, (staging, _) = [], Queue("reduce", CPU), memory()
    references = []
    for i, numel in enumerate((100, 10, 50, 20)):
        buffer = staging.take(i, numel)
        assert buffer.numel() == numel
        references.append(weakref.ref(buffer))
        staging.give(buffer, reduction(queue, log, i))
        del buffer
        assert len(log) == max(0, i - 1)  # as many as may be are on their way: the oldest one is waited for
        assert [reference() is None for reference in references] == [j < i - 1 for j in range(i + 1)]
    assert staging.nbytes == 2 * (100 + 10)
    queue.join()
    staging.settle()
    assert all(reference() is None for reference in references)


def test_staging_memory_that_is_made_finds_room(monkeypatch):
    """What goes is gone before memory is asked for, not afterwards."""
    queue, (staging, _) = Queue("reduce", CPU), memory()
    references, alive, empty = [], [], torch.empty

    def counted(*args, **kwargs):
        alive.append(sum(reference() is not None for reference in references))
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", counted)
    for i in range(4):
        buffer = staging.take(i, 100)
        references.append(weakref.ref(buffer))
        staging.give(buffer, reduction(queue, [], i))
        del buffer
    assert alive == [0, 1, 1, 1]


def test_staging_memory_is_more_where_nothing_can_be_sent():
    staging, _ = memory(count=1)
    taken = [staging.take(i, 100) for i in range(3)]
    assert len({buffer.data_ptr() for buffer in taken}) == 3
    assert staging.nbytes == 600
    for buffer in taken:
        staging.give(buffer, None)
    staging.give(staging.take("one", 400), None)
    assert staging.nbytes == 800


def test_staging_memory_is_given_back_by_the_stream_that_made_it():
    log, queue, (staging, stream) = [], Queue("reduce", CPU), memory(count=1)
    buffer = staging.take("a", 100)
    staging.give(buffer, reduction(queue, log, "reduce a"))
    reference = weakref.ref(buffer)
    del buffer
    stream[0] = 1
    kept = staging.take("b", 100)
    queue.join()
    staging.settle()
    assert reference() is not None
    stream[0] = 0
    staging.settle()
    assert reference() is None
    staging.give(kept, None)


def test_staging_memory_of_nothing():
    staging, _ = memory()
    empty = [staging.take(i, 0) for i in range(3)]
    for buffer in empty:
        staging.give(buffer, None)
    assert staging.nbytes == 0
