"""Where ranks meet, and what to say if they can't."""

from __future__ import annotations

from hocket.environment import Worker, find_port
from hocket.resolve import Settings


def free_port() -> int:
    """A free port of this host. Raises ValueError if there is none."""
    port = find_port()
    if not port:
        raise ValueError("there is no free port on this host (20000 to 31999); fix: end what listens there")
    return port


def port_in_use(worker: Worker) -> str:
    """The message of rank 0, which cannot listen where the ranks are to meet."""
    fixes = {
        "MASTER_PORT": "name another: --master-port of torchrun, or the variable, on all hosts the same",
        "SLURM_JOB_ID": "name a free one with MASTER_PORT, on all hosts the same",
    }
    if worker.port_from not in fixes:
        return f"port {worker.port} was free, and another process has taken it since; fix: start again"
    return f"{_port(worker)}: another process listens on that port; fix: {fixes[worker.port_from]}"


def nobody_met(settings: Settings, worker: Worker) -> str:
    """The message of a rank that did not find the others."""
    at = {"": "this host", "MASTER_ADDR": f"MASTER_ADDR = {worker.address} (environment)"}
    address = at.get(worker.address_from, f"{worker.address} (the first of {worker.address_from})")
    return (
        f"{address}, {_port(worker)}: rank {worker.rank} of {worker.world} did not meet the others within "
        f"{settings.train.hang_timeout:g} s; fix: start all of them, with an address that all can reach"
    )


def _port(worker: Worker) -> str:
    """A port, under the name of what said so."""
    if worker.port_from == "MASTER_PORT":
        return f"MASTER_PORT = {worker.port} (environment)"
    return f"port {worker.port} (from {worker.port_from})" if worker.port_from else f"port {worker.port}"
