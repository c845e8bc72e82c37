"""The prefill engine: the four verbs over the sequences of one worker.

Knows: how a plan becomes a step and what follows from its result. Does not know messages or timers (`sender.py`).
Between `decide` and `publish` any sequence may be dropped; its blocks stay held by STEP, and what it computed is still cached.
"""

from glm_runtime.engine.chunk_plan import Chunk
from glm_runtime.engine.loaded_model import LoadedModel
from glm_runtime.engine.step_holders import StepHolders
from glm_runtime.engine.step_meter import StepMeter
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from glm_runtime.sampling.history import open_history
from kv_transfer.identity import SequenceId
from prefill_worker.config import PrefillConfig
from prefill_worker.scheduler import PrefillLimits, PrefillView, decide
from prefill_worker.sender import Sender
from prefill_worker.sequences import PrefillSequence, PrefillSequences


class PrefillEngine:
    """Four verbs; `run` is called on the engine thread, everything else on the control loop."""

    def __init__(
        self, model: LoadedModel, sequences: PrefillSequences, holders: StepHolders, sender: Sender, config: PrefillConfig
    ) -> None:
        self.meter = StepMeter()
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._model = model
        self._sequences = sequences
        self._holders = holders
        self._sender = sender
        self._limits = PrefillLimits(
            max_step_tokens=model.max_step_tokens,
            max_computing=config.max_computing,
            block_size_tokens=model.layout.block_size_tokens,
        )
        self._in_step: dict[SequenceId, PrefillSequence] = {}

    def take_commands(self, now_s: float) -> None:
        """Queue what has arrived since the last step."""
        del now_s
        self._sequences.queue_arrived()

    def decide(self, now_s: float) -> StepPlan | None:
        """Admit what fits, then plan chunks; None when nobody can compute now."""
        slices = self._plan_slices(now_s)
        if not slices and self._sequences.unpin_waiting():
            slices = self._plan_slices(now_s)
        if not slices:
            return None
        self._holders.launch(self._in_step)
        return StepPlan(step_number=self.meter.start(now_s), slices=slices)

    def run(self, plan: StepPlan) -> StepResult:
        """One forward on the engine thread."""
        return self._model.runner.run(plan)

    def publish(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Cache the full blocks, seal the chunks, complete whoever has its next token."""
        self.meter.end(plan.num_tokens, now_s)
        in_step, self._in_step = self._in_step, {}
        for piece in plan.slices:
            self._cache_blocks(in_step[piece.sequence_id], piece, result)
        self._holders.land()
        for piece in plan.slices:
            if (sequence := self._sequences.computing(piece.sequence_id)) is not None:
                self._hand_off(sequence, piece, result, now_s)

    # -- decide --------------------------------------------------------------------------------------------------------

    def _plan_slices(self, now_s: float) -> tuple[SequenceSlice, ...]:
        places = self._limits.max_computing - self._sequences.num_computing
        view = PrefillView(
            computing=self._sequences.demands(),
            waiting=self._sequences.candidates(places),
            num_available_blocks=self._model.pool.available_by_home(),
        )
        plan = decide(view, self._limits)
        self._admit(plan.admit, now_s)
        return tuple(self._slice(sequence, chunk) for chunk in plan.chunks if (sequence := self._sequences.computing(chunk.sequence_id)))

    def _admit(self, sequence_ids: tuple[SequenceId, ...], now_s: float) -> None:
        for sequence in self._sequences.admit(sequence_ids):
            self.num_query_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_cached_tokens
            self._holders.cover(sequence.sequence_id, sequence.block_table)
            self._sender.computing(sequence, now_s)

    def _slice(self, sequence: PrefillSequence, chunk: Chunk) -> SequenceSlice:
        assert chunk.start == sequence.num_computed_tokens, f"a chunk starts at {chunk.start}, {sequence.num_computed_tokens} are computed"
        self._in_step[sequence.sequence_id] = sequence
        return SequenceSlice(
            sequence_id=sequence.sequence_id,
            tokens=sequence.token_ids(chunk.start, chunk.end),
            start=chunk.start,
            block_table=sequence.block_table,
            sampling=sequence.sampling if chunk.is_last else None,
            token_index=sequence.first_index,
            history=open_history(sequence.tokens, sequence.num_prompt_tokens, sequence.sampling) if chunk.is_last else None,
            following=_to_score(sequence, chunk),
            num_prompt_logprobs=sequence.scores.num_top if sequence.scores is not None else 0,
            grammar=sequence.grammar,
            keeps_hidden=chunk.is_last and self._model.layout.looks_one_token_ahead,
            next_token=None if chunk.is_last else sequence.token_ids(chunk.end, chunk.end + 1)[0],
        )

    # -- publish -------------------------------------------------------------------------------------------------------

    def _cache_blocks(self, sequence: PrefillSequence, piece: SequenceSlice, result: StepResult) -> None:
        sequence.num_computed_tokens = piece.end
        if piece.sampling is None:
            sequence.publish_computed(self._model.pool)
        else:
            sequence.publish_last(self._model.pool, result.samples[piece.sequence_id][0])

    def _hand_off(self, sequence: PrefillSequence, piece: SequenceSlice, result: StepResult, now_s: float) -> None:
        if sequence.scores is not None:
            sequence.scores.take(result.prompt_logprobs.get(piece.sequence_id, ()))
        if piece.end > sequence.need_from:
            self._sender.sealed(sequence, piece.start, piece.end, now_s)
        if piece.sampling is not None:
            (token,) = result.samples[piece.sequence_id]
            if sequence.grammar is not None and not sequence.grammar.accept((token,)):
                self._sender.grammar_failed(sequence, f"the grammar cannot go on: {sequence.grammar.error}", now_s)
                return
            logprobs = result.logprobs.get(piece.sequence_id, (None,))[0]
            self._sender.completed(sequence, token, now_s, result.hidden_states.get(piece.sequence_id), logprobs)
            self._sequences.complete(sequence)


def _to_score(sequence: PrefillSequence, chunk: Chunk) -> list[int]:
    """The prompt tokens whose log-probabilities the chunk can tell."""
    if sequence.scores is None:
        return []
    positions = sequence.scores.positions(chunk.start, chunk.end)
    return sequence.token_ids(positions.start, positions.stop)
