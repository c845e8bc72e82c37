"""The seam between the shell of a worker and what it is: what each asks of the other. Both sides run on the control loop."""

from typing import Any, Protocol

from glm_runtime.engine.loop import StepWorker
from kv_transfer.identity import PeerId, WorkerId
from kv_transfer.link import Party
from kv_transfer.messages import Message, PairState, WorkerAddress, WorkerLoad, WorkerTable


class Outside(Protocol):
    """What a role asks of its shell."""

    def send(self, peer: PeerId, message: Message) -> None:
        """Post a message; without a connection it is lost. Never blocks."""

    def keep(self, address: WorkerAddress) -> None:
        """Stay connected to this start of another worker."""

    def forget(self, worker_id: WorkerId) -> None:
        """Stop dialling another worker."""

    def wake(self) -> None:
        """There may be a step to run."""

    def report(self) -> None:
        """The worker's row has changed in more than its load."""

    def drain(self) -> None:
        """Something is wrong that only another start of the worker mends: take no new request, end those here, be QUIET."""

    def fault(self, error: BaseException) -> None:
        """Something is wrong that the worker must not survive."""


class WorkerRole(StepWorker[Any, Any], Protocol):
    """A prefill or a decode worker: the four verbs, and what happens between them."""

    def receive(self, party: Party, message: Message, now_s: float) -> None:
        """A message of any kind but PING and DRAIN."""

    def peer_up(self, party: Party) -> None:
        """The first connection of this start of a party."""

    def peer_lost(self, party: Party, now_s: float) -> None:
        """That start has died or cannot be reached."""

    def table_changed(self, table: WorkerTable) -> None:
        """The directory has pushed its table."""

    def tick(self, now_s: float) -> None:
        """Look at the timers."""

    def start_draining(self) -> None:
        """Take no new request from now on."""

    def give_up_all(self, message: str, now_s: float) -> None:
        """Fail every request as retryable elsewhere."""

    def load(self) -> WorkerLoad:
        """What the worker says about itself."""

    def pair_states(self) -> tuple[PairState, ...]:
        """The worker's view of its peers."""

    @property
    def num_live(self) -> int:
        """Requests that have not ended here."""

    async def close(self) -> None:
        """Close what the role has opened itself."""
