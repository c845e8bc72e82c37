"""The decode engine: the four verbs over the sequences of one worker.

Knows: how a plan becomes a step and what follows from its result. Does not know messages or timers (`receiver.py`).
Between `decide` and `publish` any sequence may be dropped; its blocks stay held by STEP, and what was drawn for it is thrown away.
"""

from collections.abc import Iterable, Sequence

from decode_worker.config import DecodeConfig
from decode_worker.receiver import Receiver
from decode_worker.scheduler import DecodeLimits, DecodePlan, DecodeView, PreemptedSequence, decide
from decode_worker.sequences import DecodeSequence, DecodeSequences, Phase
from decode_worker.token_outbox import TokenOutbox
from glm_runtime.engine.chunk_plan import PrefillDemand
from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.step_holders import StepHolders
from glm_runtime.engine.step_meter import StepMeter
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from kv_transfer.block_pool import CACHE, HolderKind
from kv_transfer.identity import BlockId, SequenceId


class DecodeEngine:
    """Four verbs; `run` is called on the engine thread, everything else on the control loop."""

    def __init__(
        self,
        model: LoadedModel,
        sequences: DecodeSequences,
        holders: StepHolders,
        receiver: Receiver,
        outbox: TokenOutbox,
        config: DecodeConfig,
    ) -> None:
        self.meter = StepMeter()
        self.num_preemptions = 0
        self._model = model
        self._sequences = sequences
        self._holders = holders
        self._receiver = receiver
        self._outbox = outbox
        self._limits = DecodeLimits(
            max_step_tokens=model.max_step_tokens,
            max_chunk_tokens=config.max_chunk_tokens,
            block_size_tokens=model.layout.block_size_tokens,
        )
        self._in_step: dict[SequenceId, DecodeSequence] = {}

    def take_commands(self, now_s: float) -> None:
        """Nothing waits here: messages change the sequences as they arrive, which STEP holders make safe."""

    def decide(self, now_s: float) -> StepPlan | None:
        """Preempt, grow and resume as planned, then lay out the step; None when there is nothing to compute."""
        plan = decide(self._view(), self._limits)
        self._make_room(plan, now_s)
        if plan.resume and not plan.rows and not plan.chunks:
            plan = decide(self._view(), self._limits)  # what has come back may be all there is to compute
        slices = tuple(self._slices(plan))
        if not slices:
            return None
        self._holders.launch(self._in_step)
        return StepPlan(step_number=self.meter.start(now_s), slices=slices)

    def run(self, plan: StepPlan) -> StepResult:
        """One forward on the engine thread."""
        return self._model.runner.run(plan)

    def publish(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Cache the full blocks, hand out the tokens, finish whoever has the last one."""
        num_prefill_tokens = plan.num_tokens - sum(len(piece.tokens) == 1 for piece in plan.slices)
        self.meter.end(num_prefill_tokens, now_s)
        in_step, self._in_step = self._in_step, {}
        self._holders.land()
        for piece in plan.slices:
            sequence = in_step[piece.sequence_id]
            if self._sequences.of_id(piece.sequence_id) is sequence:
                self._take(sequence, piece, result, now_s)
        self._outbox.flush()

    # -- decide --------------------------------------------------------------------------------------------------------

    def _view(self) -> DecodeView:
        size = self._limits.block_size_tokens
        running = self._sequences.in_phase(Phase.RUNNING)
        free_slots = tuple([len(sequence.block_table) * size - sequence.num_stored_tokens for sequence in running])
        num_available = self._model.pool.num_unpromised
        num_full = free_slots.count(0)
        return DecodeView(
            running=tuple([sequence.sequence_id for sequence in running]),
            free_slots=free_slots,
            credit_blocks=tuple([self._receiver.credit_blocks(sequence) for sequence in running]) if num_full else (),
            freed_blocks=tuple([self._freed_blocks(sequence) for sequence in running]) if num_full > num_available else (),
            filling=tuple([_demand_of(sequence) for sequence in self._sequences.in_phase(Phase.FILLING)]),
            preempted=tuple([self._preempted(sequence) for sequence in self._sequences.in_phase(Phase.PREEMPTED)]),
            num_available_blocks=num_available,
        )

    def _freed_blocks(self, sequence: DecodeSequence) -> int:
        """Blocks that nobody else uses, and what is promised to the sequence and not taken."""
        return sum(map(self._is_exclusive, sequence.block_table)) + self._receiver.credit_blocks(sequence)

    def _is_exclusive(self, block_id: BlockId) -> bool:
        """Held by one request: its REQUEST and its STEP at most, and perhaps the cache."""
        holders = self._model.pool.holders(block_id)
        return sum(holder.kind is HolderKind.REQUEST for holder in holders) == 1 and len(holders - {CACHE}) <= 2

    def _preempted(self, sequence: DecodeSequence) -> PreemptedSequence:
        num_blocks = -(-sequence.num_tokens // self._limits.block_size_tokens)
        return PreemptedSequence(sequence_id=sequence.sequence_id, num_new_blocks=num_blocks)

    def _make_room(self, plan: DecodePlan, now_s: float) -> None:
        for sequence in self._known(plan.preempt):
            self.num_preemptions += 1
            self._receiver.preempt(sequence, now_s)
        for sequence in self._known(plan.grow):
            self._receiver.grow(sequence)
        for sequence in self._known(plan.resume):
            self._receiver.resume(sequence, now_s)

    def _known(self, sequence_ids: Iterable[SequenceId]) -> list[DecodeSequence]:
        return [sequence for sequence_id in sequence_ids if (sequence := self._sequences.of_id(sequence_id)) is not None]

    def _slices(self, plan: DecodePlan) -> Iterable[SequenceSlice]:
        for sequence in self._known(plan.rows):
            yield self._slice(sequence, sequence.num_stored_tokens, sequence.num_tokens, (sequence.last_token,))
        for chunk in plan.chunks:
            for sequence in self._known((chunk.sequence_id,)):
                yield self._slice(sequence, chunk.start, chunk.end, sequence.token_ids(chunk.start, chunk.end))

    def _slice(self, sequence: DecodeSequence, start: int, end: int, tokens: Sequence[int]) -> SequenceSlice:
        self._in_step[sequence.sequence_id] = sequence
        if sequence.num_covered_blocks < len(sequence.block_table):
            self._holders.cover(sequence.sequence_id, sequence.uncovered_blocks())
        return SequenceSlice(
            sequence_id=sequence.sequence_id,
            tokens=tokens,
            start=start,
            block_table=sequence.block_table,
            sampling=sequence.sampling if end == sequence.num_tokens else None,
            token_index=sequence.next_index,
        )

    # -- publish -------------------------------------------------------------------------------------------------------

    def _take(self, sequence: DecodeSequence, piece: SequenceSlice, result: StepResult, now_s: float) -> None:
        sequence.num_stored_tokens = piece.end
        self._cache_blocks(sequence)
        if piece.sampling is None:
            return
        if sequence.phase is Phase.FILLING:
            self._receiver.filled(sequence, now_s)
        index = sequence.next_index
        (token,) = result.samples[piece.sequence_id]
        sequence.append(token)
        self._outbox.add(sequence, index, (token,))
        if sequence.finish is not None:
            self._receiver.finish(sequence, now_s)
        elif sequence.phase is Phase.FILLING:
            self._receiver.run(sequence, now_s)

    def _cache_blocks(self, sequence: DecodeSequence) -> None:
        """Full blocks of the answer are found like those of a prompt: the next turn of a conversation begins with them."""
        layout = self._model.layout
        if sequence.num_stored_tokens // layout.block_size_tokens <= sequence.num_published_blocks:
            return
        keys = sequence.keys_of_stored(layout.block_size_tokens, layout.looks_one_token_ahead)
        for index in range(sequence.num_published_blocks, len(keys)):
            self._model.pool.publish(sequence.block_table[index], keys[index])
        sequence.num_published_blocks = len(keys)


def _demand_of(sequence: DecodeSequence) -> PrefillDemand:
    return PrefillDemand(sequence_id=sequence.sequence_id, num_computed_tokens=sequence.num_stored_tokens, num_tokens=sequence.num_tokens)
