"""How much memory a host has for a run, which in a container is less."""

from __future__ import annotations

import os

import pytest

from hocket.environment import memory

HOST = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V1 = ["5:cpu,cpuacct:/docker/7", "4:memory:/docker/7", "0::/"]


@pytest.mark.parametrize(
    ("lines", "limits", "found"),
    [
        (["0::/"], {}, HOST),
        (["0::/"], {"memory.max": "max"}, HOST),
        (["0::/"], {"memory.max": 1000}, 1000),
        (["0::/a/b"], {"a/memory.max": 900, "a/b/memory.max": "max"}, 900),
        (["0::/a/b"], {"a/memory.max": "max", "a/b/memory.max": 800}, 800),
        (V1, {"memory/memory.limit_in_bytes": 9223372036854771712}, HOST),
        (V1, {"memory/memory.limit_in_bytes": 700}, 700),  # inside of the container
        (V1, {"memory/docker/7/memory.limit_in_bytes": 600}, 600),
        (["4:cpu:/docker/7"], {"memory/docker/7/memory.limit_in_bytes": 600}, HOST),
        ([], {}, HOST),
    ],
)
def test_memory_is_what_the_container_may_use(tmp_path, lines, limits, found):
    """Of a system in which this process is in such groups, with limits by file."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("\n".join(lines))
    for name, limit in limits.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{limit}\n")
    assert memory(tmp_path) == found
