"""What it costs to tell another rank of a decode step: the plan as bytes, and the way through a real connection into another process."""

import multiprocessing
import random
import statistics
import time
from dataclasses import dataclass

from glm_runtime.engine.plan_codec import PlanDecoder, PlanEncoder
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan
from kv_transfer.config import WireConfig
from kv_transfer.identity import BlockId, SequenceId, new_incarnation
from kv_transfer.link_proof import Party, Role
from kv_transfer.messages import PartyKind, SamplingParameters
from kv_transfer.rank_link import RankListener, dial_rank

HOST = "127.0.0.1"
SECRET = b"of this benchmark"
TIMEOUT_S = 60.0
NUM_SEQUENCES = 32
NUM_DRAFTS = 5
CONTEXT_TOKENS = 100_000
BLOCK_SIZE_TOKENS = 64
POOL_BLOCKS = 200_000
TOKENS_A_STEP = 3
"""Tokens by which a sequence grows, so that about every second step one of the 32 tables does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCosts:
    """Medians over steps, in seconds and bytes. first: of the step in which every table is new. told: until the other process has
    decoded the plan and has answered with an empty frame, encoding included.
    """

    encode_s: float
    decode_s: float
    num_bytes: float
    first_s: float
    first_bytes: float
    told_s: float


class Sequences:
    """32 sequences of 100,000 tokens that grow by some tokens a step, 5 drafts each."""

    def __init__(self) -> None:
        rng = random.Random(0)
        num_blocks = CONTEXT_TOKENS // BLOCK_SIZE_TOKENS + 1
        self._tables = [[BlockId(rng.randrange(POOL_BLOCKS)) for _ in range(num_blocks)] for _ in range(NUM_SEQUENCES)]
        self._starts = [CONTEXT_TOKENS - 11 * number for number in range(NUM_SEQUENCES)]
        self._parameters = [SamplingParameters(max_tokens=4000, seed=number, stop_token_ids=(1, 2, 3)) for number in range(NUM_SEQUENCES)]
        self._rng = rng
        self._number = 0

    def next_plan(self) -> StepPlan:
        """The next step."""
        self._number += 1
        return StepPlan(step_number=self._number, slices=tuple(self._slice(number) for number in range(NUM_SEQUENCES)))

    def _slice(self, number: int) -> SequenceSlice:
        self._starts[number] += TOKENS_A_STEP
        table = self._tables[number]
        if self._starts[number] + NUM_DRAFTS >= BLOCK_SIZE_TOKENS * len(table):
            table.append(BlockId(self._rng.randrange(POOL_BLOCKS)))
        return SequenceSlice(
            sequence_id=SequenceId(f"cmpl-{number:024x}-0#1"),
            tokens=tuple(self._rng.randrange(150_000) for _ in range(1 + NUM_DRAFTS)),
            start=self._starts[number],
            block_table=table,
            sampling=self._parameters[number],
            token_index=TOKENS_A_STEP * self._number,
            num_drafts=NUM_DRAFTS,
            num_next_drafts=NUM_DRAFTS,
        )


def measure_plans(num_steps: int) -> PlanCosts:
    """Encode and decode here, then tell a process on this machine of as many steps."""
    sequences, encoder, decoder = Sequences(), PlanEncoder(), PlanDecoder()
    encoding, decoding, sizes = [], [], []
    for _ in range(1 + num_steps):
        plan = sequences.next_plan()
        started_s = time.perf_counter()
        frame = encoder.encode(plan)
        encoded_s = time.perf_counter()
        decoder.decode(frame)
        decoding.append(time.perf_counter() - encoded_s)
        encoding.append(encoded_s - started_s)
        sizes.append(len(frame))
    return PlanCosts(
        encode_s=statistics.median(encoding[1:]),
        decode_s=statistics.median(decoding[1:]),
        num_bytes=statistics.median(sizes[1:]),
        first_s=encoding[0] + decoding[0],
        first_bytes=sizes[0],
        told_s=statistics.median(_tell(num_steps)[1:]),
    )


def _tell(num_steps: int) -> list[float]:
    listener, wire = RankListener(HOST), WireConfig()
    other = multiprocessing.get_context("spawn").Process(target=_follow, args=(listener.port, 1 + num_steps), daemon=True)
    other.start()
    link = listener.accept(TIMEOUT_S, wire)
    link.prove(SECRET, _party(0), Role.LISTENER, wire, TIMEOUT_S)
    sequences, encoder, times = Sequences(), PlanEncoder(), []
    for _ in range(1 + num_steps):
        plan = sequences.next_plan()
        started_s = time.perf_counter()
        link.send(encoder.encode(plan))
        link.receive(TIMEOUT_S)
        times.append(time.perf_counter() - started_s)
    other.join()
    for end in (link, listener):
        end.close()
    return times


def _follow(port: int, num_plans: int) -> None:
    link, _ = dial_rank(SECRET, _party(1), HOST, port, WireConfig(), TIMEOUT_S)
    decoder = PlanDecoder()
    for _ in range(num_plans):
        decoder.decode(link.receive(TIMEOUT_S))
        link.send(b"")
    link.close()


def _party(rank: int) -> Party:
    return Party(PartyKind.DECODE, f"rank {rank}", new_incarnation())
