"""The decode engine: the four verbs over the sequences of one worker.

Knows: how a plan becomes a step and what follows from its result. Does not know messages or timers (`receiver.py`).
Between `decide` and `publish` any sequence may be dropped; its blocks stay held by STEP, and what was drawn for it is thrown away.
"""

from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import sub

from decode_worker.batch import DecodeBatch, StepBatch
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
from kv_transfer.block_pool import CACHE, EXCHANGE, HolderKind
from kv_transfer.identity import BlockId, PeerId, SequenceId
from kv_transfer.messages import TokenDelta

STEPS_AHEAD = 8
"""Who needs a block within so many steps takes it together with others, while there are plenty."""
STEPS_BETWEEN_CACHING = 4
"""Of the blocks that answers fill: another request finds them as many steps later at most."""


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
        self._looks_one_token_ahead = model.layout.looks_one_token_ahead
        self._limits = DecodeLimits(
            max_step_tokens=model.max_step_tokens,
            max_chunk_tokens=config.max_chunk_tokens,
            block_size_tokens=model.layout.block_size_tokens,
            ahead_tokens=min(STEPS_AHEAD * (model.max_drafts + 1), model.layout.block_size_tokens // 2),
        )
        self._batch = DecodeBatch()
        self._in_step = StepBatch()
        self._is_uncovered = False
        self._max_rows = model.max_drafts + 1
        self._num_prefill_tokens = 0
        self._num_decode_rows = 0
        self._published_s: float | None = None
        self._publish_s = 0.0

    def take_commands(self, now_s: float) -> None:
        """Nothing waits here: messages change the sequences as they arrive, which STEP holders make safe."""

    def decide(self, now_s: float) -> StepPlan | None:
        """Preempt, grow and resume as planned, then lay out the step; None when there is nothing to compute."""
        if self._published_s is not None:  # the loop comes here as soon as it has published
            self._publish_s, self._published_s = now_s - self._published_s, None
        plan = self._plan(now_s)
        if plan.resume and not plan.rows and not plan.chunks:  # what has come back may be all there is to compute
            plan = self._plan(now_s)
        step = self._step_of(plan)
        chunks = [(chunk, sequence) for chunk in plan.chunks for sequence in self._known((chunk.sequence_id,))]
        step.chunks = [sequence for _, sequence in chunks]
        slices = self._rows(step)
        slices += [self._chunk(sequence, chunk) for chunk, sequence in chunks]
        self._num_decode_rows = len(plan.rows) + sum(plan.row_drafts) if not chunks else 0
        self._num_prefill_tokens = sum([chunk.num_tokens for chunk, _ in chunks if chunk.num_tokens > 1])
        copies = self._holders.launch_copies()
        if not slices and not copies:
            return None
        self._in_step = step
        self._holders.launch((*step.row_ids, *[sequence.sequence_id for sequence in step.chunks]))
        return StepPlan(step_number=self.meter.start(now_s), slices=tuple(slices), stop_rule=self.drafts.stop_rule, copies=copies)

    def run(self, plan: StepPlan) -> StepResult:
        """One forward on the engine thread."""
        return self._model.runner.run(plan)

    def publish(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Cache the full blocks, hand out the tokens, finish whoever has the last one."""
        # To publish takes time of a step, too: what the last one took is known by now.
        self._published_s = now_s
        self.drafts.take(plan, result, self.meter.end(self._num_prefill_tokens, now_s) + self._publish_s, self._num_decode_rows)
        step, self._in_step = self._in_step, StepBatch()
        self._holders.land()
        self._take_rows(plan.step_number, step, result, now_s)
        for sequence, piece in zip(step.chunks, plan.slices[len(step.rows) :], strict=True):
            if not sequence.is_dropped:
                self._take_chunk(sequence, piece, result, now_s)
        self._outbox.flush()

    # -- decide --------------------------------------------------------------------------------------------------------

    def _plan(self, now_s: float) -> DecodePlan:
        """Decide, and give and take blocks as decided."""
        batch = self._batch
        batch.refresh(self._sequences)
        is_roomy = batch.num_roomy_steps > 0
        plan = decide(self._view(batch, is_roomy), self._limits)
        if plan.preempt or plan.grow or plan.resume:
            self._make_room(plan, now_s)
        if is_roomy:
            batch.num_roomy_steps -= 1
        else:
            batch.look_ahead(self._limits.block_size_tokens, self._max_rows)
            self._is_uncovered = True
        return plan

    def _view(self, batch: DecodeBatch, is_roomy: bool) -> DecodeView:
        running, pool = batch.sequences, self._model.pool
        num_available = pool.unpromised_by_home()
        self.drafts.choose(len(running))
        num_drafts = self._num_drafts(running, self.drafts.num_drafts) if self.drafts.num_drafts else ()
        free_slots = batch.free_slots(self._limits.block_size_tokens) if not is_roomy else ()
        return DecodeView(
            running=batch.ids,
            free_slots=free_slots,
            credit_blocks=self._credit_blocks(running, free_slots, num_drafts) if not is_roomy else (),
            freed_blocks=tuple(map(self._freed_blocks, running)) if free_slots.count(0) > min(num_available) else (),
            filling=tuple(map(_demand_of, self._sequences.drawable(Phase.FILLING))),
            preempted=tuple(map(self._preempted, self._sequences.in_phase(Phase.PREEMPTED))),
            num_available_blocks=num_available,
            num_drafts=num_drafts,
            next_homes=tuple([len(sequence.block_table) % pool.num_homes for sequence in running]) if pool.num_homes > 1 else (),
        )

    def _credit_blocks(self, running: Sequence[DecodeSequence], free_slots: Sequence[int], num_drafts: Sequence[int]) -> tuple[int, ...]:
        """Of the sequences that lack a slot for one of their rows; nobody asks for the others'. Empty where none does."""
        spare_slots = list(map(sub, free_slots, num_drafts)) if num_drafts else free_slots
        if min(spare_slots, default=1) > 0:
            return ()
        credit = [0] * len(running)
        for place in [place for place, spare in enumerate(spare_slots) if spare <= 0]:
            credit[place] = self._receiver.credit_blocks(running[place])
        return tuple(credit)

    def _num_drafts(self, running: Sequence[DecodeSequence], num_wanted: int) -> tuple[int, ...]:
        """Drafts that each verifies if there is room; nearly always those that it has."""
        num_drafts = tuple(
            [
                len(sequence.drafts)
                if sequence.seed_hidden is None and sequence.end_tokens - sequence.num_tokens > num_wanted
                else choose_num_drafts(
                    num_available=sequence.num_available_drafts, num_wanted=num_wanted, num_left_tokens=sequence.num_left_tokens
                )
                for sequence in running
            ]
        )
        return num_drafts if max(num_drafts, default=0) <= num_wanted else tuple([min(number, num_wanted) for number in num_drafts])

    def _freed_blocks(self, sequence: DecodeSequence) -> tuple[int, ...]:
        """Blocks of each home that nobody else uses, and what is promised to the sequence and not taken."""
        pool, table = self._model.pool, sequence.block_table
        freed = list(pool.by_home(self._receiver.credit_blocks(sequence), len(table)))
        for block_id in filter(self._is_exclusive, table):
            freed[block_id % pool.num_homes] += 1
        return tuple(freed)

    def _is_exclusive(self, block_id: BlockId) -> bool:
        """Held by one request: its REQUEST and its STEP at most, and perhaps the cache."""
        holders = self._model.pool.holders(block_id)
        if EXCHANGE in holders:
            return False  # the next step copies it, whoever has left by then
        return sum(holder.kind is HolderKind.REQUEST for holder in holders) == 1 and len(holders - {CACHE}) <= 2

    def _preempted(self, sequence: DecodeSequence) -> PreemptedSequence:
        num_blocks = -(-sequence.num_tokens // self._limits.block_size_tokens)
        return PreemptedSequence(sequence_id=sequence.sequence_id, num_new_blocks=self._model.pool.by_home(num_blocks))

    def _make_room(self, plan: DecodePlan, now_s: float) -> None:
        for sequence in self._known(plan.preempt):
            self.num_preemptions += 1
            self._cache_blocks(sequence)
            self._receiver.preempt(sequence, now_s)
        for sequence in self._known(plan.grow):
            self._receiver.grow(sequence)
        for sequence in self._known(plan.resume):
            self._receiver.resume(sequence, now_s)

    def _known(self, sequence_ids: Iterable[SequenceId]) -> list[DecodeSequence]:
        return [sequence for sequence_id in sequence_ids if (sequence := self._sequences.of_id(sequence_id)) is not None]

    def _step_of(self, plan: DecodePlan) -> StepBatch:
        """The rows of a plan: nearly always the whole batch."""
        batch = self._batch
        if plan.rows == batch.ids and batch.made_of == self._sequences.num_running_changes:
            return StepBatch(rows=batch.sequences, row_ids=batch.ids, row_drafts=plan.row_drafts)
        rows = [(sequence, drafts) for name, drafts in zip(plan.rows, plan.row_drafts, strict=True) for sequence in self._known((name,))]
        return StepBatch(
            rows=[sequence for sequence, _ in rows],
            row_ids=[sequence.sequence_id for sequence, _ in rows],
            row_drafts=[drafts for _, drafts in rows],
        )

    def _rows(self, step: StepBatch) -> list[SequenceSlice]:
        """Of each row its newest token and drafts of what follows it, or what the step needs to make them first."""
        if self._is_uncovered:  # who has come or grown since
            self._is_uncovered = False
            for sequence in step.rows:
                if sequence.num_covered_blocks < len(sequence.block_table):
                    self._holders.cover(sequence.sequence_id, sequence.uncovered_blocks())
        slices = []
        num_wanted = self.drafts.num_drafts
        for sequence, num_drafts in zip(step.rows, step.row_drafts, strict=True):
            if num_drafts > 0 and sequence.seed_hidden is not None:
                slices.append(self._seeded_row(sequence, num_drafts))
                continue
            num_tokens = sequence.num_tokens
            drafts = sequence.drafts
            slices.append(
                SequenceSlice(
                    sequence_id=sequence.sequence_id,
                    tokens=(sequence.last_token, *(drafts if len(drafts) == num_drafts else drafts[:num_drafts])),
                    start=sequence.num_stored_tokens,
                    block_table=sequence.block_table,
                    sampling=sequence.sampling,
                    token_index=num_tokens + sequence.index_of_first,
                    history=sequence.history,
                    grammar=sequence.grammar,
                    num_drafts=num_drafts,
                    # Drafts for the step after this one, which draws one token at least; nearly always as many as are wanted.
                    num_next_drafts=num_wanted if num_wanted < sequence.end_tokens - num_tokens - 1 else self._num_next_drafts(sequence),
                )
            )
        return slices

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
        return choose_num_drafts(num_available=MOST_DRAFTS, num_wanted=self.drafts.num_drafts, num_left_tokens=sequence.num_left_tokens - 1)

    @property
    def num_roomy_steps(self) -> int:
        """Steps from now on that need not look for blocks, as long as nobody comes or goes."""
        return self._batch.num_roomy_steps

    # -- publish -------------------------------------------------------------------------------------------------------

    def _take_rows(self, step_number: int, step: StepBatch, result: StepResult, now_s: float) -> None:
        """What every row has drawn. Those that go on and ask for tokens alone, nearly all in nearly every step, are taken in right here:
        a call for each would cost more than what it does. `_take_row` does the same for any row.
        """
        runs = list(map(result.samples.__getitem__, step.row_ids))
        running = Phase.RUNNING
        is_unchanged = self._batch.made_of == self._sequences.num_running_changes
        if self.drafts.num_drafts or any(step.row_drafts):
            self.drafts.meter.count_runs(zip(step.row_drafts, map(len, runs), strict=True))
        router: PeerId | None = None
        waiting: list[TokenDelta] = []
        next_drafts = map(result.drafts.get, step.row_ids, repeat(()))
        for sequence, run, drafts in zip(step.rows, runs, next_drafts, strict=True):
            num_tokens = sequence.num_tokens
            num_stored = num_tokens + len(run) - 1
            if (
                not sequence.is_plain
                or (not is_unchanged and (sequence.is_dropped or sequence.phase is not running))
                or num_stored + 1 >= sequence.end_tokens
                or not sequence.stop_ids.isdisjoint(run)
            ):
                if not sequence.is_dropped:
                    self._take_row(sequence, result, now_s)
                continue
            if sequence.router is not router:
                router, waiting = sequence.router, self._outbox.waiting_for(sequence.router)
            index = num_tokens + sequence.index_of_first
            waiting.append(TokenDelta(sequence.transfer, index, run, None, sequence.num_cached_tokens))
            sequence.unpacked += run
            sequence.last_token = run[-1]
            sequence.num_tokens = num_stored + 1
            sequence.num_stored_tokens = num_stored
            sequence.drafts, sequence.seed_hidden = drafts, None
        if step_number % STEPS_BETWEEN_CACHING == 0:
            self._cache_full(step.rows)

    def _cache_full(self, rows: Sequence[DecodeSequence]) -> None:
        """Cache what rows have filled in the last steps. Together, as it then costs half. Who ends or is preempted is cached before;
        of a request that is given up, what it filled since the last time is not.
        """
        size, running = self._limits.block_size_tokens, Phase.RUNNING
        for sequence in rows:
            if sequence.num_stored_tokens // size > sequence.num_published_blocks and sequence.phase is running and not sequence.is_dropped:
                self._cache_blocks(sequence)

    def _take_chunk(self, sequence: DecodeSequence, piece: SequenceSlice, result: StepResult, now_s: float) -> None:
        if sequence.scores is not None:
            _take_scores(sequence, sequence.scores, result)
        if piece.sampling is None:
            sequence.num_stored_tokens = piece.end
            self._cache_blocks(sequence)
            return
        self._receiver.filled(sequence, now_s)
        self._take_row(sequence, result, now_s)
        if sequence.phase is Phase.FILLING and not sequence.is_dropped:
            self._receiver.run(sequence, now_s)

    def _take_row(self, sequence: DecodeSequence, result: StepResult, now_s: float) -> None:
        """What a row and its drafts have drawn."""
        index = sequence.next_index
        run = result.samples[sequence.sequence_id]
        taken = sequence.append_run(run, result.logprobs.get(sequence.sequence_id, ()) if result.logprobs else ())
        if sequence.grammar is not None and not sequence.follow_grammar(taken):
            self._receiver.grammar_broken(sequence, now_s)
            return
        sequence.num_stored_tokens = sequence.num_tokens - 1
        sequence.drafts, sequence.seed_hidden = result.drafts.get(sequence.sequence_id, ()), None
        if sequence.num_stored_tokens // self._limits.block_size_tokens > sequence.num_published_blocks:
            self._cache_blocks(sequence)
        self._outbox.add(sequence, index, taken)
        if sequence.finish is not None:
            self._receiver.finish(sequence, now_s)

    def _cache_blocks(self, sequence: DecodeSequence) -> None:
        """Full blocks of the answer are found like those of a prompt: the next turn of a conversation begins with them."""
        sequence.publish_stored(self._model.pool, self._looks_one_token_ahead)


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
