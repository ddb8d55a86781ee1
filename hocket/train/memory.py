"""Copies of a run's state in the memory of its hosts: a process or a host that is lost costs few steps.

Note: [A copy in memory is a checkpoint in parts]
Every `train.memory_every` steps each rank writes its file of a checkpoint into a folder in its host's memory, such as
/dev/shm, which outlives processes. It sends the file to a rank of the next host, which writes it too. `meta.json` and
`.metadata` are on every host. So each file is on two hosts, of which one may be lost. A host deletes the copy before
when all hosts have the new one. A run that starts takes the newest copy of which every file is on some host with its
checksum, unless a checkpoint on disk is as new. Each host fetches the files that its ranks read and that it lacks.
Ranks may be fewer or more than before, as for checkpoints on disk.

Note: [Whose copies they are]
Beside its checkpoints a run keeps a random number. That number and the path of its folder are the name of its copies.
So copies of checkpoints that somebody has deleted, renamed or copied are found by nobody. A run that has ended well, or
goes on from anything but its copies, deletes them and takes another number: a host that was away may still have some,
newer than the run is then. One that was killed leaves them until it starts again; `hocket doctor` lists them.

All methods are collective: every rank calls them with the same arguments.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import create_default_local_load_plan

from hocket.config import COPIES
from hocket.environment import available_memory
from hocket.fsdp.saving import background
from hocket.fsdp.saving.background import Saving
from hocket.fsdp.saving.dcp import CheckpointWriter, run_dcp
from hocket.fsdp.saving.flat_tensor import FlatTensor
from hocket.fsdp.saving.harmless import METADATA, HarmlessReader
from hocket.fsdp.saving.host_memory import copied_bytes
from hocket.fsdp.saving.whole import WholeFolder, free, shown
from hocket.resolve import Settings
from hocket.runtime.sent_files import Sent, send_files
from hocket.runtime.world import by_first, everyone, of_rank, rank_and_world, together
from hocket.settings.schema import leaf, problem
from hocket.train.checkpoint import (
    IDENTITY,
    Copy,
    Groups,
    Moment,
    SaveFailed,
    checkpoints_of,
    in_time,
    meta_of,
    state_of,
)
from hocket.train.damage import FORMAT, META, damage_of_file, is_complete, is_sealed
from hocket.train.folders import STEPS, name_of

_FIX = "a larger file system (docker run --shm-size), another folder, or train.memory_every = 0"


class Memory:
    """The copies of one run. `newest` is the one that a run may go on from, if there is any."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self._root = settings, Path(settings.run.memory)
        self._every = settings.train.memory_every
        self._rank, world = rank_and_world()
        self._place: Path | None = None
        self.hosts: list[tuple[int, ...]] = [tuple(range(world))]
        """Ranks that share a folder."""
        self.newest: Copy | None = None
        with contextlib.suppress(*() if self._every else (ValueError,)):
            self._open()
            self.newest = self._look() if self._place else None

    def folder_of(self, copy: Copy) -> Path:
        """Its folder on this host, with all but tensors. Raises ValueError, on every rank."""
        assert self._place is not None
        folder, holder = self._place / name_of(copy.step), min(copy.there[METADATA])
        try:
            metadata = together(lambda: (folder / METADATA).read_bytes() if self._rank == holder else b"")[holder]
            together(lambda: self._first and _write_small(folder, copy.meta, metadata))
        except OSError as error:
            raise ValueError(self._problem("run.memory", f"no place for a copy: {error}", _FIX)) from None
        return folder

    def fetch(self, copy: Copy, folder: Path, groups: Groups) -> None:
        """Have those files with tensors in it that its ranks read. Raises OSError or ValueError, on every rank."""
        read = together(lambda: _files_read(folder, groups))
        files, sent = json.loads(copy.meta)["files"], list[Sent]()
        for host in self.hosts:
            names = {name for rank in host for name in read[rank] if not copy.there[name] & set(host)}
            for name, target in zip(sorted(names), itertools.cycle(host), strict=False):
                sent.append(Sent(name, min(copy.there[name]), target, files[name]))
        send_files(sent, folder)

    def start(self, groups: Groups, keep: int | None = None) -> list[str]:
        """Delete all copies but that of `keep` steps, and make room for those to come, if there are to be any.

        Returns a remark on them. Raises ValueError if the memory of a host cannot have them.
        """
        if keep is None:
            self.begin_anew()
        else:
            self._drop(keep)
        if not self._every:
            return []
        most = self._require_room(groups)
        if len(self.hosts) == 1:
            others = "; there is no other host to have them too"
        else:
            others = f", of its ranks and of those of the host before, on {len(self.hosts)} hosts"
        return [f"copies in memory take up to {shown(most)} of {self._root}{others}"]

    def copy(self, moment: Moment, groups: Groups) -> Saving:
        """Make a copy of the state, while training goes on. What is returned raises SaveFailed, on every rank."""
        assert self._place is not None
        folder = WholeFolder(self._place / name_of(moment.step))
        writer = CheckpointWriter(folder, publishes=False, apart=True)
        return background.save_behind(
            folder.final,
            state_of(groups),
            lambda copied, group: self._write(moment, copied, writer, group),
            timeout=self.settings.train.hang_timeout,
            name="memory",
        )

    def begin_anew(self) -> None:
        """Delete all copies, and find none again that another host may have: see Note: [Whose copies they are].

        Raises ValueError, on every rank, if it cannot write beside its checkpoints or into the memory of a host.
        """
        self.end()
        if not self._every:
            return
        try:
            by_first(lambda: self._identity.write_text(secrets.token_hex()))
        except OSError as error:
            reason, fix = f"its copies cannot have a new name: {error}", "make the run's folder writable"
            raise ValueError(self._problem("train.memory_every", reason, fix)) from None
        self._open()

    def end(self) -> None:
        """Leave nothing."""
        if self._rank == 0:
            with contextlib.suppress(OSError):
                self._identity.unlink(missing_ok=True)
        if self._place and self._first:
            shutil.rmtree(self._place, ignore_errors=True)
        self._place = None

    def _drop(self, keep: int) -> None:
        """Delete all copies, but that of `keep` steps."""
        if self._place and self._first:
            for path in self._place.iterdir():
                if not path.is_dir():
                    path.unlink(missing_ok=True)  # the mark of a run that was killed while it began
                elif path.name != name_of(keep):
                    shutil.rmtree(path, ignore_errors=True)

    def _write(
        self,
        moment: Moment,
        copied: Mapping[str, FlatTensor],
        writer: CheckpointWriter,
        group: dist.ProcessGroup | None,
    ) -> Path:
        folder = writer.folder
        with in_time(self.settings, f"copy the state of step {moment.step} to the memory of hosts"):
            try:
                run_dcp("", dcp.save, copied, storage_writer=writer, process_group=group)
                sums = everyone(writer.sums, group)
                # Of rank 0 on all hosts: paths may differ between them.
                meta = of_rank(json.dumps(meta_of(self.settings, moment, sums), indent=1), 0, group)
                metadata = together(lambda: _metadata_in(folder.temporary), group)[0]
                together(lambda: self._first and _write_small(folder.temporary, meta, metadata), group)
                send_files(self._to_next_host(sums), folder.temporary, group)
                together(lambda: self._first and folder.publish(), group)
                together(lambda: self._drop(moment.step), group)
            except (OSError, ValueError) as error:
                writer.give_up()
                reason = f"the copy of step {moment.step} cannot be made: {error}; {shown(free(self._root))} are free"
                raise SaveFailed(self._problem("run.memory", reason, _FIX)) from None
        return folder.final

    def _to_next_host(self, sums: Sequence[Mapping[str, list[int]]]) -> list[Sent]:
        """The files with tensors of every rank, which a rank of the next host gets."""
        found = list[Sent]()
        for host, after in zip(self.hosts, [*self.hosts[1:], self.hosts[0]], strict=True):
            if host != after:
                for rank, target in zip(host, itertools.cycle(after), strict=False):
                    files = ((name, entry) for name, entry in sums[rank].items() if name != METADATA)
                    found += [Sent(name, rank, target, entry) for name, entry in files]
        return found

    @property
    def _identity(self) -> Path:
        return checkpoints_of(self.settings) / IDENTITY

    @property
    def _host(self) -> tuple[int, ...]:
        return next(host for host in self.hosts if self._rank in host)

    @property
    def _first(self) -> bool:
        """Whether this rank does what one rank of each host does."""
        return self._host[0] == self._rank

    def _open(self) -> None:
        """Find this run's folder in the memory of each host, and the ranks that share one. Raises ValueError."""
        name = of_rank(_name_of_run(self._identity) if self._rank == 0 else "")
        if not name:
            return
        place, token = self._root / f"{COPIES}{name}", of_rank(f"here-{time.time_ns()}-")
        mark = place / f"{token}{self._rank}"
        try:
            together(lambda: _mark(place, mark))
            seen = together(lambda: sorted(int(path.name.removeprefix(token)) for path in place.glob(f"{token}*")))
            together(mark.unlink)
        except (OSError, ValueError) as error:
            fix = "a folder in the memory of every host that you can write to, or train.memory_every = 0"
            raise ValueError(self._problem("run.memory", f"no place for copies: {error}", fix)) from None
        self._place, self.hosts = place, sorted({tuple(ranks) for ranks in seen})

    def _look(self) -> Copy | None:
        """The newest copy of which every file is on some host."""
        assert self._place is not None
        here = dict[tuple[int, int], tuple[int, list[str]]]()
        texts = dict[tuple[int, int], str]()
        for path in self._place.glob(STEPS):
            step, text, count, names = self._whole_in(path)
            if text:
                key = step, zlib.crc32(text.encode())
                here[key], texts[key] = (count, names), text
        ranks = everyone(here)
        for key in sorted({key for found in ranks for key in found}, reverse=True):
            there = dict[str, set[int]]()
            for rank, found in enumerate(ranks):
                for name in found.get(key, (0, ()))[1]:
                    there.setdefault(name, set()).add(rank)
            having = [rank for rank, found in enumerate(ranks) if key in found]
            if len(there) == ranks[having[0]][key][0]:
                text = of_rank(texts.get(key, ""), having[0])
                return Copy(key[0], text, {name: frozenset(ranks) for name, ranks in there.items()})
        return None

    def _whole_in(self, path: Path) -> tuple[int, str, int, list[str]]:
        """Step, `meta.json`, number of files, and those that are whole, of which the ranks of a host look at a part."""
        try:
            text = (path / META).read_text()
            meta = json.loads(text)
            if not path.suffix and is_complete(meta) and is_sealed(meta) and meta["format"] == FORMAT:
                files = {name: entry for name, entry in meta["files"].items() if (path / name).is_file()}
                mine = sorted(files)[self._host.index(self._rank) :: len(self._host)]
                whole = [name for name in mine if not damage_of_file(path / name, files[name])]
                return meta["step"], text, len(meta["files"]), whole
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not whole
            pass
        return 0, "", 0, []

    def _require_room(self, groups: Groups) -> int:
        """Bytes that copies will take on the fullest host. Raises ValueError, on every rank, where one has not enough.

        Two of them are there at a time, for the one before goes when the next one is whole. Beside them a rank has its
        snapshot, and one of a checkpoint that is written meanwhile.
        """
        assert self._place is not None
        state = state_of(groups)
        behind = 2 if self.settings.train.save_every and self.settings.train.save_behind else 1
        snapshots = behind * copied_bytes(state)
        size = sum(shard.flat.nbytes for shard in state.values())
        there = sum(file.stat().st_size for file in self._place.rglob("*") if file.is_file())
        ranks = everyone((size, snapshots, there, free(self._root), available_memory(), platform.node()))
        most = 0
        for before, host in zip([self.hosts[-1], *self.hosts[:-1]], self.hosts, strict=True):
            sizes = sum(ranks[rank][0] for rank in {*before, *host})
            _, _, there, room, available, name = ranks[host[0]]
            snapshots = sum(ranks[rank][1] for rank in host)
            most, more = max(most, 2 * sizes), 2 * sizes - there
            if more > room:
                reason = f"copies take {shown(more)} of {self._root} on {name}, where {shown(room)} are free"
                raise ValueError(self._problem("train.memory_every", reason, _FIX))
            if more + snapshots > available:
                reason = f"copies and snapshots take {shown(more + snapshots)} of the memory of {name}, of which "
                reason += f"{shown(available)} are available"
                raise ValueError(self._problem("train.memory_every", reason, "train.memory_every = 0"))
        return most

    def _problem(self, name: str, reason: str, fix: str) -> str:
        return problem(name, leaf(self.settings, name), self.settings.origins, reason, fix)


def _name_of_run(identity: Path) -> str:
    """See Note: [Whose copies they are]; empty if the run never made any."""
    try:
        text = identity.read_text()
    except (OSError, ValueError):
        return ""
    return hashlib.sha256(f"{text} {identity.resolve()}".encode()).hexdigest()[:16]


def _mark(place: Path, mark: Path) -> None:
    """Leave a mark in a folder that is this user's alone. Raises OSError."""
    place.mkdir(mode=0o700, exist_ok=True)
    found = place.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{place} belongs to somebody else")
    mark.touch()


def _metadata_in(folder: Path) -> bytes:
    """DCP's metadata, on rank 0."""
    return (folder / METADATA).read_bytes() if rank_and_world()[0] == 0 else b""


def _write_small(folder: Path, meta: str, metadata: bytes) -> None:
    """Put into a folder what is the same on every host. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METADATA).write_bytes(metadata)
    (folder / META).write_text(meta)


def _files_read(folder: Path, groups: Groups) -> set[str]:
    """Names of the files from which this rank's part of the state is read."""
    metadata = HarmlessReader(folder).read_metadata()
    plan = create_default_local_load_plan(state_of(groups), metadata)
    return {metadata.storage_data[item.storage_index].relative_path for item in plan.items}
