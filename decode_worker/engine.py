"""The decode engine: the four verbs over the sequences of one worker.

Knows: how a plan becomes a step and what follows from its result. Does not know messages or timers (`receiver.py`).
Between `decide` and `publish` any sequence may be dropped; its blocks stay held by STEP, and what was drawn for it is thrown away.
"""

from collections.abc import Iterable, Sequence
from operator import sub

from decode_worker.config import DecodeConfig
from decode_worker.draft_controller import DraftController
from decode_worker.receiver import Receiver
from decode_worker.scheduler import DecodeLimits, DecodePlan, DecodeView, PreemptedSequence, decide
from decode_worker.sequences import DecodeSequence, DecodeSequences, Phase
from decode_worker.speculative import choose_num_drafts
from decode_worker.token_outbox import TokenOutbox
from glm_runtime.engine.chunk_plan import Chunk, PrefillDemand
from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.prompt_scores import PromptScores
from glm_runtime.engine.step_holders import StepHolders
from glm_runtime.engine.step_meter import StepMeter
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from glm_runtime.runtime_config import MOST_DRAFTS
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
        self.drafts = DraftController(model)
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
        self._num_prefill_tokens = 0
        self._num_decode_rows = 0
        self._outcomes: list[tuple[int, int]] = []
        self._published_s: float | None = None
        self._publish_s = 0.0

    def take_commands(self, now_s: float) -> None:
        """Nothing waits here: messages change the sequences as they arrive, which STEP holders make safe."""

    def decide(self, now_s: float) -> StepPlan | None:
        """Preempt, grow and resume as planned, then lay out the step; None when there is nothing to compute."""
        if self._published_s is not None:  # the loop comes here as soon as it has published
            self._publish_s, self._published_s = now_s - self._published_s, None
        plan = decide(self._view(), self._limits)
        self._make_room(plan, now_s)
        if plan.resume and not plan.rows and not plan.chunks:
            plan = decide(self._view(), self._limits)  # what has come back may be all there is to compute
        slices = tuple(self._slices(plan))
        self._num_decode_rows = len(plan.rows) + sum(plan.row_drafts) if not plan.chunks else 0
        self._num_prefill_tokens = sum([chunk.num_tokens for chunk in plan.chunks if chunk.num_tokens > 1])
        if not slices:
            return None
        self._holders.launch(self._in_step)
        return StepPlan(step_number=self.meter.start(now_s), slices=slices, stop_rule=self.drafts.stop_rule)

    def run(self, plan: StepPlan) -> StepResult:
        """One forward on the engine thread."""
        return self._model.runner.run(plan)

    def publish(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Cache the full blocks, hand out the tokens, finish whoever has the last one."""
        # To publish takes time of a step, too: what the last one took is known by now.
        self._published_s = now_s
        self.drafts.take(plan, result, self.meter.end(self._num_prefill_tokens, now_s) + self._publish_s, self._num_decode_rows)
        in_step, self._in_step = self._in_step, {}
        self._holders.land()
        of_id, running = self._sequences.of_id, Phase.RUNNING
        take_row, take_chunk = self._take_row, self._take_chunk
        for piece, (sequence_id, sequence) in zip(plan.slices, in_step.items(), strict=True):
            if of_id(sequence_id) is sequence:
                take = take_row if sequence.phase is running else take_chunk
                take(sequence, piece, result, now_s)
        self.drafts.meter.count_all(self._outcomes)
        self._outcomes.clear()
        self._outbox.flush()

    # -- decide --------------------------------------------------------------------------------------------------------

    def _view(self) -> DecodeView:
        size = self._limits.block_size_tokens
        running = _drawable(self._sequences.in_phase(Phase.RUNNING))
        free_slots = tuple([len(sequence.block_table) * size - sequence.num_stored_tokens for sequence in running])
        self.drafts.choose(len(running))
        num_drafts = self._num_drafts(running, self.drafts.num_drafts) if self.drafts.num_drafts else ()
        num_available = self._model.pool.num_unpromised
        num_full = free_slots.count(0)
        is_roomy = min(map(sub, free_slots, num_drafts), default=1) > 0 if num_drafts else not num_full
        return DecodeView(
            running=tuple([sequence.sequence_id for sequence in running]),
            free_slots=free_slots,
            credit_blocks=self._credit_blocks(running, free_slots, num_drafts) if not is_roomy else (),
            freed_blocks=tuple([self._freed_blocks(sequence) for sequence in running]) if num_full > num_available else (),
            filling=tuple([_demand_of(sequence) for sequence in _drawable(self._sequences.in_phase(Phase.FILLING))]),
            preempted=tuple([self._preempted(sequence) for sequence in self._sequences.in_phase(Phase.PREEMPTED)]),
            num_available_blocks=num_available,
            num_drafts=num_drafts,
        )

    def _credit_blocks(self, running: Sequence[DecodeSequence], free_slots: Sequence[int], num_drafts: Sequence[int]) -> tuple[int, ...]:
        """Of the sequences that lack a slot for one of their rows; nobody asks for the others'."""
        rows = zip(running, free_slots, num_drafts or (0,) * len(running), strict=True)
        return tuple([self._receiver.credit_blocks(sequence) if free <= drafts else 0 for sequence, free, drafts in rows])

    def _num_drafts(self, running: Sequence[DecodeSequence], num_wanted: int) -> tuple[int, ...]:
        """Drafts that each would verify, blocks and budget aside."""
        return tuple(
            [
                choose_num_drafts(
                    num_available=sequence.num_available_drafts, num_wanted=num_wanted, num_left_tokens=sequence.num_left_tokens
                )
                if sequence.seed_hidden is not None or sequence.num_left_tokens <= num_wanted or len(sequence.drafts) > num_wanted
                else len(sequence.drafts)  # most of them, and in each step
                for sequence in running
            ]
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
        of_id, row, in_step = self._sequences.of_id, self._row, self._in_step
        for sequence_id, num_drafts in zip(plan.rows, plan.row_drafts, strict=True):
            if (sequence := of_id(sequence_id)) is not None:
                in_step[sequence_id] = sequence
                if sequence.num_covered_blocks < len(sequence.block_table):
                    self._holders.cover(sequence_id, sequence.uncovered_blocks())
                yield row(sequence, num_drafts)
        for chunk in plan.chunks:
            for sequence in self._known((chunk.sequence_id,)):
                yield self._chunk(sequence, chunk)

    def _row(self, sequence: DecodeSequence, num_drafts: int) -> SequenceSlice:
        """The newest token and drafts of what follows it, or what the step needs to make them first."""
        if sequence.seed_hidden is not None and num_drafts > 0:
            return self._seeded_row(sequence, num_drafts)
        return SequenceSlice(
            sequence_id=sequence.sequence_id,
            tokens=(sequence.last_token, *sequence.drafts[:num_drafts]),
            start=sequence.num_stored_tokens,
            block_table=sequence.block_table,
            sampling=sequence.sampling,
            token_index=sequence.next_index,
            history=sequence.history,
            grammar=sequence.grammar,
            num_drafts=num_drafts,
            num_next_drafts=self._num_next_drafts(sequence) if self.drafts.num_drafts else 0,
        )

    def _seeded_row(self, sequence: DecodeSequence, num_drafts: int) -> SequenceSlice:
        return SequenceSlice(
            sequence_id=sequence.sequence_id,
            tokens=(sequence.last_token,),
            start=sequence.num_stored_tokens,
            block_table=sequence.block_table,
            sampling=sequence.sampling,
            token_index=sequence.next_index,
            history=sequence.history,
            grammar=sequence.grammar,
            num_next_drafts=self._num_next_drafts(sequence),
            seed_hidden=sequence.seed_hidden,
            num_seed_drafts=num_drafts,
        )

    def _chunk(self, sequence: DecodeSequence, chunk: Chunk) -> SequenceSlice:
        self._in_step[sequence.sequence_id] = sequence
        self._holders.cover(sequence.sequence_id, sequence.uncovered_blocks())
        is_last = chunk.end == sequence.num_tokens
        return SequenceSlice(
            sequence_id=sequence.sequence_id,
            tokens=sequence.token_ids(chunk.start, chunk.end),
            start=chunk.start,
            block_table=sequence.block_table,
            sampling=sequence.sampling if is_last else None,
            token_index=sequence.next_index,
            history=sequence.history if is_last else None,
            following=_to_score(sequence, chunk),
            num_prompt_logprobs=sequence.scores.num_top if sequence.scores is not None else 0,
            grammar=sequence.grammar,
            next_token=None if is_last else sequence.token_ids(chunk.end, chunk.end + 1)[0],
            num_next_drafts=self._num_next_drafts(sequence) if is_last else 0,
        )

    def _num_next_drafts(self, sequence: DecodeSequence) -> int:
        """Drafts for the step after this one, which draws one token at least."""
        num_wanted, num_left = self.drafts.num_drafts, sequence.num_left_tokens - 1
        if num_wanted < num_left:  # nearly always
            return num_wanted
        return choose_num_drafts(num_available=MOST_DRAFTS, num_wanted=num_wanted, num_left_tokens=num_left)

    # -- publish -------------------------------------------------------------------------------------------------------

    def _take_chunk(self, sequence: DecodeSequence, piece: SequenceSlice, result: StepResult, now_s: float) -> None:
        if sequence.scores is not None:
            _take_scores(sequence, sequence.scores, result)
        if piece.sampling is None:
            sequence.num_stored_tokens = piece.end
            self._cache_blocks(sequence)
            return
        self._receiver.filled(sequence, now_s)
        self._take_row(sequence, piece, result, now_s)
        if sequence.phase is Phase.FILLING and self._sequences.of_id(sequence.sequence_id) is sequence:
            self._receiver.run(sequence, now_s)

    def _take_row(self, sequence: DecodeSequence, piece: SequenceSlice, result: StepResult, now_s: float) -> None:
        """What a row and its drafts have drawn. Many times a step, hence in few calls."""
        index = sequence.next_index
        run = result.samples[piece.sequence_id]
        if num_drafted := piece.num_drafts or piece.num_seed_drafts:
            self._outcomes.append((num_drafted, len(run) - 1))
        taken = sequence.append_run(run, result.logprobs.get(piece.sequence_id, ()) if result.logprobs else ())
        if sequence.grammar is not None and not sequence.follow_grammar(taken):
            self._receiver.grammar_broken(sequence, now_s)
            return
        sequence.num_stored_tokens = sequence.num_tokens - 1
        sequence.drafts, sequence.seed_hidden = result.drafts.get(piece.sequence_id, ()), None
        if sequence.num_stored_tokens // self._limits.block_size_tokens > sequence.num_published_blocks:
            self._cache_blocks(sequence)
        self._outbox.add(sequence, index, taken)
        if sequence.finish is not None:
            self._receiver.finish(sequence, now_s)

    def _cache_blocks(self, sequence: DecodeSequence) -> None:
        """Full blocks of the answer are found like those of a prompt: the next turn of a conversation begins with them."""
        layout = self._model.layout
        keys = sequence.keys_of_stored(layout.block_size_tokens, layout.looks_one_token_ahead)
        for index in range(sequence.num_published_blocks, len(keys)):
            self._model.pool.publish(sequence.block_table[index], keys[index])
        sequence.num_published_blocks = len(keys)


def _to_score(sequence: DecodeSequence, chunk: Chunk) -> list[int]:
    """The prompt tokens whose log-probabilities the chunk can tell."""
    if sequence.scores is None:
        return []
    positions = sequence.scores.positions(chunk.start, chunk.end)
    return sequence.token_ids(positions.start, positions.stop)


def _take_scores(sequence: DecodeSequence, scores: PromptScores, result: StepResult) -> None:
    scores.take(result.prompt_logprobs.get(sequence.sequence_id, ()))
    if scores.is_complete:
        sequence.prompt_logprobs, sequence.scores = scores.told, None


def _demand_of(sequence: DecodeSequence) -> PrefillDemand:
    return PrefillDemand(sequence_id=sequence.sequence_id, num_computed_tokens=sequence.num_stored_tokens, num_tokens=sequence.num_tokens)


def _drawable(sequences: list[DecodeSequence]) -> list[DecodeSequence]:
    """Those whose grammar is not awaited."""
    return [sequence for sequence in sequences if not sequence.awaits_grammar]
