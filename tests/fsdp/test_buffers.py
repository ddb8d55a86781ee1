"""Buffers of full size: memory that comes and goes, under bound views and for gradients on their way."""

import weakref

import torch
from torch import nn

from benchmarks.history import History
from hocket.fsdp.buffers import FullBuffer, StagingMemory
from hocket.runtime.queue import Queue
from hocket.runtime.transports import Pending

CPU = torch.device("cpu")


def reduction(queue, log, name):
    return queue.submit(name, lambda: Pending(lambda: log.append(name)))


def test_dynamic_memory_comes_and_goes_under_bound_views():
    buffer = FullBuffer(100, torch.float32, CPU)
    assert buffer.nbytes == 0
    buffer.allocate()
    assert buffer.nbytes == 400
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


def test_the_caller_waits_for_one_reduction_only():
    history = History()
    queue, other = history.watch(Queue("reduce", CPU)), history.watch(Queue("other", CPU))
    staging, _ = memory(1)
    buffer = staging.take(100)
    staging.give(buffer, reduction(queue, [], "reduce a"))
    reduction(other, [], "outer a")
    staging.take(100)
    written = history.note("backward b")
    assert history.before(history.one("reduce a"), written)
    assert history.concurrent(history.one("outer a"), written)


def memory(count=2):
    """With the stream of its caller, which a test may change."""
    stream = [0]
    return StagingMemory(count, torch.bfloat16, CPU, lambda: stream[0]), stream


def test_staging_memory_goes_when_the_caller_is_behind_its_reduction():
    log, queue, (staging, _) = [], Queue("reduce", CPU), memory()
    references = []
    for i, numel in enumerate((100, 10, 50, 20)):
        buffer = staging.take(numel)
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
        buffer = staging.take(100)
        references.append(weakref.ref(buffer))
        staging.give(buffer, reduction(queue, [], i))
        del buffer
    assert alive == [0, 1, 1, 1]


def test_staging_memory_is_more_where_nothing_can_be_sent():
    staging, _ = memory(count=1)
    taken = [staging.take(100) for i in range(3)]
    assert len({buffer.data_ptr() for buffer in taken}) == 3
    assert staging.nbytes == 600
    for buffer in taken:
        staging.give(buffer, None)
    staging.give(staging.take(400), None)
    assert staging.nbytes == 800


def test_staging_memory_is_given_back_by_the_stream_that_made_it():
    log, queue, (staging, stream) = [], Queue("reduce", CPU), memory(count=1)
    buffer = staging.take(100)
    staging.give(buffer, reduction(queue, log, "reduce a"))
    reference = weakref.ref(buffer)
    del buffer
    stream[0] = 1
    kept = staging.take(100)
    queue.join()
    staging.settle()
    assert reference() is not None
    stream[0] = 0
    staging.settle()
    assert reference() is None
    staging.give(kept, None)


def test_staging_memory_of_nothing():
    staging, _ = memory()
    empty = [staging.take(0) for i in range(3)]
    for buffer in empty:
        staging.give(buffer, None)
    assert staging.nbytes == 0
