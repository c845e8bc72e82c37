"""Ranks of a worker as processes of their own, each with a pool and a NIXL transport that a `LinkedRank` drives over a socket.

The link is a pair of connected sockets of this machine, so nobody need prove anything. Beside it a pipe carries what a test asks of the
rank's memory. A rank serves its transport on a thread, as in a worker; it ends with its link or its pipe.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import socket
from multiprocessing.connection import Connection
from typing import Any

from kv_transfer.config import TransportConfig
from kv_transfer.errors import PeerLost, TransferTimeout
from kv_transfer.geometry import rank_incarnation, rank_peer
from kv_transfer.identity import BlockId, Incarnation, PeerId, peer_id
from kv_transfer.pool_memory import PoolMemory
from kv_transfer.rank_transfers import RankTransfers
from kv_transfer.transports.ranks import LinkedRank

ANSWER_S = 60.0


class SocketFrames:
    """A `FrameLink` over a connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: bytes) -> None:
        try:
            self._socket.sendall(len(frame).to_bytes(4, "little") + frame)
        except OSError as error:
            raise PeerLost(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> bytes:
        if not self._readable.poll(None if timeout_s is None else 1000 * timeout_s):
            raise TransferTimeout(f"nothing came within {timeout_s} s")
        return self._exactly(int.from_bytes(self._exactly(4), "little"))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, num_bytes: int) -> bytes:
        received = b""
        while len(received) < num_bytes:
            try:
                part = self._socket.recv(num_bytes - len(received))
            except OSError as error:
                raise PeerLost(str(error)) from error
            if not part:
                raise PeerLost("the other end has closed")
            received += part
        return received


def frame_pair() -> tuple[SocketFrames, SocketFrames]:
    """Two ends of one link in this process."""
    ours, theirs = socket.socketpair()
    return SocketFrames(ours), SocketFrames(theirs)


class RankServer:
    """What a rank's process does: the pipe's commands are its public methods."""

    def __init__(
        self, connected: socket.socket, party: str, incarnation: Incarnation, rank: int, pool: tuple[int, int], options: Any
    ) -> None:
        from kv_transfer.transports.nixl import NixlTransport

        self.memory = PoolMemory(*pool)
        self.memory.write_probe(rank_incarnation(incarnation, rank))
        self.faults: list[str] = []
        config = TransportConfig(ucx_options=options)
        on_fault = lambda error: self.faults.append(type(error).__name__)  # noqa: E731
        self.transport = NixlTransport(rank_peer(peer_id(party, incarnation), rank), self.memory, config)
        self.transfers = RankTransfers(self.transport, self.memory, SocketFrames(connected), config.poll_interval_s, on_fault)

    def write(self, block_id: int, content: bytes) -> None:
        self.memory.block(BlockId(block_id))[:] = content

    def fill(self, block_id: int, value: int) -> None:
        self.write(block_id, bytes([value]) * self.memory.block_bytes)

    def read(self, block_id: int) -> bytes:
        return bytes(self.memory.block(BlockId(block_id)))

    def destroy_agent(self, peer: PeerId) -> None:
        """As a fault: on the thread of the pipe, while nothing is asked of the transport."""
        self.transport.destroy_peer(peer)

    def ended(self) -> list[str]:
        assert self.transfers.join(ANSWER_S), "the rank goes on serving"
        return self.faults


def run_rank(pipe: Connection, *arguments: Any) -> None:
    """Carries out the pipe's commands until it closes."""
    server = RankServer(*arguments)
    while True:
        try:
            method, given = pipe.recv()
        except EOFError:
            return
        pipe.send(getattr(server, method)(*given))


class RankProcess:
    """One rank of worker `party` in a process of its own; `rank` is its number. num_blocks, block_bytes: of its pool."""

    def __init__(
        self,
        party: str,
        incarnation: Incarnation,
        rank: int,
        *,
        num_blocks: int,
        block_bytes: int,
        options: tuple[tuple[str, str], ...] = (),
        timeout_s: float = ANSWER_S,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, their_pipe = context.Pipe()
        ours, theirs = socket.socketpair()
        arguments = (their_pipe, theirs, party, incarnation, rank, (num_blocks, block_bytes), options)
        self._process = context.Process(target=run_rank, args=arguments, daemon=True)
        self._process.start()
        their_pipe.close()
        theirs.close()
        self._rank = rank
        self._link = SocketFrames(ours)
        self._timeout_s = timeout_s
        self._linked: LinkedRank | None = None

    @property
    def transport(self) -> LinkedRank:
        """The rank's transport, for a `GroupTransport`; waits for the process to have started."""
        if self._linked is None:
            self._linked = LinkedRank(self._rank, self._link, self._timeout_s)
        return self._linked

    def write(self, block_id: int, content: bytes) -> None:
        self._ask("write", block_id, content)

    def fill(self, block_id: int, value: int) -> None:
        self._ask("fill", block_id, value)

    def read(self, block_id: int) -> bytes:
        content: bytes = self._ask("read", block_id)
        return content

    def destroy_agent(self, peer: PeerId) -> None:
        self._ask("destroy_agent", peer)

    def ended(self) -> list[str]:
        """Waits for the end of the thread that serves the transport; what it called a fault."""
        faults: list[str] = self._ask("ended")
        return faults

    def hang_up(self) -> None:
        """End the link, as the end of rank 0 does."""
        self._link.close()

    def kill(self) -> None:
        """SIGKILL, and wait for the kernel to have taken the process away."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(10)
        self._pipe.close()

    def stop(self) -> None:
        if self._process.is_alive():
            self.kill()
        self._link.close()

    def _ask(self, method: str, *arguments: object) -> Any:
        self._pipe.send((method, arguments))
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"rank {self._rank} did not answer {method}")
        return self._pipe.recv()
