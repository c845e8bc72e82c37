"""vLLM's V1 scheduler behind the commands of `benchmarks/engine/engine_process.py`. Run with the directory that vLLM lies in.

Steady decode as the other side has it: the same contexts, blocks and shares of drafts that hold. Timed are `schedule`,
`update_from_output` and, with drafts, `update_draft_token_ids`; the model's output is made before the clock runs.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCK_SIZE_TOKENS = 64
CONTEXT_TOKENS = 8192
MAX_TOKENS = 2048
NUM_DRAFTS = 5
HELD_SHARES = (0.84, 0.79, 0.74, 0.69, 0.82)
STOP_IDS = [154_820, 154_827, 154_829]
WARM_UP_STEPS = 20
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 154_880, "torch_dtype": "bfloat16",
    "max_position_embeddings": 1 << 17,
}  # fmt: skip
"""Any model: the scheduler asks it for its longest sequence only."""


class SchedulerSteps:
    """Makes a scheduler, brings its requests to the decode phase, and times steps."""

    def __init__(self) -> None:
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

        init_none_hash(sha256)
        self._model_dir = tempfile.TemporaryDirectory(prefix="vllm-model-")
        self._hasher = get_request_block_hasher(BLOCK_SIZE_TOKENS, sha256)

    def steps(self, num_requests: int, has_drafts: bool, num_steps: int) -> list[float]:
        """Seconds of each step."""
        scheduler = self._scheduler(num_requests, has_drafts)
        rng = random.Random(0)
        for request in self._requests(num_requests, rng):
            scheduler.add_request(request)
        while scheduler.waiting or any(request.num_computed_tokens < request.num_prompt_tokens for request in scheduler.running):
            self._step(scheduler, rng, has_drafts)
        seconds = [self._step(scheduler, rng, has_drafts) for _ in range(WARM_UP_STEPS + num_steps)]
        assert len(scheduler.running) == num_requests, "the requests must not end while they are measured"
        return seconds[WARM_UP_STEPS:]

    def _step(self, scheduler: Any, rng: random.Random, has_drafts: bool) -> float:
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        started_s = time.thread_time()
        planned = scheduler.schedule()
        scheduled_s = time.thread_time()
        names = list(planned.num_scheduled_tokens)
        sampled = [_run(scheduler.requests[name], planned.scheduled_spec_decode_tokens.get(name, []), rng) for name in names]
        output = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: index for index, name in enumerate(names)}, sampled_token_ids=sampled
        )
        drafts = DraftTokenIds(names, [_tokens(NUM_DRAFTS, rng) for _ in names])
        landed_s = time.thread_time()
        scheduler.update_from_output(planned, output)
        if has_drafts:
            scheduler.update_draft_token_ids(drafts)
        return time.thread_time() - landed_s + scheduled_s - started_s

    def _requests(self, num_requests: int, rng: random.Random) -> list[Any]:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        return [
            Request(
                request_id=f"chatcmpl-{number:032x}",
                prompt_token_ids=_tokens(CONTEXT_TOKENS - rng.randrange(BLOCK_SIZE_TOKENS), rng),
                sampling_params=SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, top_p=0.95, stop_token_ids=STOP_IDS),
                pooling_params=None,
                block_hasher=self._hasher,
            )
            for number in range(num_requests)
        ]

    def _scheduler(self, num_requests: int, has_drafts: bool) -> Any:
        import torch
        from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        directory = Path(self._model_dir.name)
        (directory / "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(model=str(directory), skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_model_len=1 << 16)
        cache = CacheConfig(block_size=BLOCK_SIZE_TOKENS, enable_prefix_caching=True)
        num_blocks = num_requests * (-(-(CONTEXT_TOKENS + MAX_TOKENS) // BLOCK_SIZE_TOKENS) + 2)
        cache.num_gpu_blocks = num_blocks
        config = VllmConfig(
            model_config=model,
            cache_config=cache,
            device_config=DeviceConfig(device="cpu"),
            scheduler_config=SchedulerConfig(
                max_num_seqs=num_requests,
                max_num_batched_tokens=1 << 16,
                max_model_len=1 << 16,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
            speculative_config=SpeculativeConfig(method="ngram", num_speculative_tokens=NUM_DRAFTS) if has_drafts else None,
        )
        spec = FullAttentionSpec(block_size=BLOCK_SIZE_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
        return Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE_TOKENS,
            log_stats=True,
        )


def _run(request: Any, drafts: Sequence[int], rng: random.Random) -> list[int]:
    """What a step draws for a request: nothing while its prompt is not computed."""
    if request.num_computed_tokens < request.num_prompt_tokens:
        return []
    held = []
    for draft, share in zip(drafts, HELD_SHARES, strict=False):
        if rng.random() >= share:
            break
        held.append(draft)
    return [*held, *_tokens(1, rng)]


def _tokens(count: int, rng: random.Random) -> list[int]:
    return [rng.randrange(100_000) for _ in range(count)]


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    os.environ["PYTHONPATH"] = sys.argv[1]  # vLLM inspects models in a process of its own
    sys.path.append(str(Path(__file__).parents[2]))
    from benchmarks.engine.command_loop import serve

    serve(SchedulerSteps, lambda engine, _command, numbers: engine.steps(numbers[0], bool(numbers[1]), numbers[2]))  # type: ignore[arg-type, attr-defined]
