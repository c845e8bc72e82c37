"""Tokens on their way to the gateways: one frame per engine step and gateway.

Knows: how deltas are put together. Does not know when a step ends.
"""

from decode_worker.sequences import DecodeSequence
from glm_runtime.engine.worker_role import Outside
from kv_transfer.identity import PeerId
from kv_transfer.messages import TokenDelta, Tokens


class TokenOutbox:
    """Collects what the sequences emit until `flush` posts it."""

    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._waiting: dict[PeerId, list[TokenDelta]] = {}

    def add(self, sequence: DecodeSequence, first_index: int, tokens: tuple[int, ...]) -> None:
        """The sequence's tokens from output index `first_index` on, up to its last; when it has ended, the delta says so."""
        if sequence.logprobs or first_index == 0:
            delta = TokenDelta(
                sequence.transfer,
                first_index,
                tokens,
                sequence.finish,
                sequence.num_cached_tokens,
                logprobs=sequence.logprobs_from(first_index) if sequence.logprobs else (),
                prompt_logprobs=sequence.prompt_logprobs if first_index == 0 and tokens else (),
            )
        else:
            delta = TokenDelta(sequence.transfer, first_index, tokens, sequence.finish, sequence.num_cached_tokens)
        self.waiting_for(sequence.router).append(delta)

    def waiting_for(self, router: PeerId) -> list[TokenDelta]:
        """What waits for a gateway; whoever adds to it does so before the next `flush`."""
        waiting = self._waiting.get(router)
        if waiting is None:
            waiting = self._waiting[router] = []
        return waiting

    def flush(self) -> None:
        """Post one frame to each gateway that has tokens waiting. Never blocks; a gateway that cannot be reached asks again."""
        waiting, self._waiting = self._waiting, {}
        for router, deltas in waiting.items():
            self._outside.send(router, Tokens(tuple(deltas)))
