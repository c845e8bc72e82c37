"""Makes a rank's groups over gloo (CPU) or NCCL (CUDA, not run anywhere yet): the only module that knows these libraries.

Groups are objects of their own, not torch's global default group: a process may be a rank of several replicas, as in tests. Ranks find
each other through a TCPStore that the replica's rank 0 serves on a port of the system's choice.
"""

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

from torch import Tensor
from torch import distributed as torch_distributed

from glm_runtime.parallel.collectives import Collectives, CommunicationMeter, Exchange
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.layout import GroupKind, ParallelLayout

Backend = Literal["gloo", "nccl"]
Store = Any
"""torch.distributed.Store, which torch does not export by name."""

distributed: Any = torch_distributed


class ProcessGroupExchange:
    """`Exchange` by a process group of torch. all_gather on gloo is an all-to-all: its ring takes several times as long on few bytes."""

    def __init__(self, group: Any, size: int, *, gathers_directly: bool) -> None:
        self._group = group
        self._size = size
        self._gathers_directly = gathers_directly

    def all_to_all(self, received: Tensor, sent: Tensor, received_sizes: Sequence[int], sent_sizes: Sequence[int]) -> None:
        """See `Exchange`."""
        self._group.alltoall_base(received, sent, list(received_sizes), list(sent_sizes)).wait()

    def all_gather(self, received: Tensor, sent: Tensor) -> None:
        """See `Exchange`."""
        if self._gathers_directly:
            self._group._allgather_base(received, sent).wait()
        else:
            self._group.alltoall_base(received, sent.repeat(self._size), [], []).wait()

    def broadcast(self, buffer: Tensor, root: int) -> None:
        """See `Exchange`."""
        options = distributed.BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([buffer], options).wait()


def serve_store(host: str, num_ranks: int, timeout_s: float) -> Store:
    """The meeting place of a replica, on its rank 0; `store.port` is what the others must be told. Does not wait for them.

    It listens on `host` alone: left to itself, a TCPStore listens on every address of the machine, and it asks nobody for a proof.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return distributed.TCPStore(
        host,
        port,
        num_ranks,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, num_ranks: int, timeout_s: float) -> Store:
    """The meeting place as another rank sees it."""
    return distributed.TCPStore(host, port, num_ranks, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def within(store: Store, prefix: str) -> Store:
    """The same meeting place for what else `prefix` names: several replicas may share one."""
    return distributed.PrefixStore(prefix, store)


def make_context(
    layout: ParallelLayout, rank: int, store: Store | None, timeout_s: float, backend: Backend = "gloo", *, host: str = "127.0.0.1"
) -> ParallelContext:
    """Meet the other ranks and make every group of this one. timeout_s: of one exchange; a rank that is late for it ends all.

    store: None for a replica of one rank. host: this rank's own address, where others reach it (gloo). Blocks until all ranks are here.
    """
    meter = CommunicationMeter()
    made: dict[tuple[int, ...], Exchange] = {}
    groups = {}
    for kind in GroupKind:
        members = layout.members(kind, rank)
        own = members.index(rank)
        if len(members) > 1 and members not in made:
            assert store is not None, "ranks of a replica need a place to meet"
            made[members] = _make_exchange(members, own, store, timeout_s, backend, host)
        groups[kind] = Collectives(kind, own, len(members), made.get(members), meter)
    return ParallelContext(layout=layout, rank=rank, groups=groups, meter=meter)


def _make_exchange(members: tuple[int, ...], own: int, store: Store, timeout_s: float, backend: Backend, host: str) -> Exchange:
    prefixed = within(store, "ranks " + ",".join(map(str, members)))
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        options = distributed.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [distributed.ProcessGroupGloo.create_device(hostname=host)]
        gloo = distributed.ProcessGroupGloo(prefixed, own, len(members), options)
        return ProcessGroupExchange(gloo, len(members), gathers_directly=False)
    nccl = distributed.ProcessGroupNCCL(prefixed, own, len(members))
    return ProcessGroupExchange(nccl, len(members), gathers_directly=True)
