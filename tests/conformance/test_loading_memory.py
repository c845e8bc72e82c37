"""Loading a sharded checkpoint takes little more memory than the model: each tensor goes straight to its place."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from glm_runtime.synthetic import make_checkpoint
from glm_runtime.synthetic_config import model_fields, token_fields
from glm_runtime.weight_scheme import WeightScheme
from tests.glm_checkpoints import TINY

MIB = 1 << 20
ALLOWED_EXTRA_MIB = 64
"""The largest tensor as it is stored and in fp32, the headers and what the allocator keeps."""

LOAD = """
import dataclasses, json, resource, sys, torch
from pathlib import Path
from glm_runtime.config import GlmConfig
from glm_runtime.parallel.layout import ParallelLayout
from glm_runtime.parallel.weight_cut import cut_weights
from glm_runtime.weights import load_weights
torch.set_num_threads(1)
directory = Path(sys.argv[1])
config = GlmConfig.from_checkpoint(directory)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
cut = cut_weights(ParallelLayout(tp_size=4, is_expert_parallel=True), 1, range(6, 12)) if sys.argv[3] == "rank" else None
weights = load_weights(directory, config, torch.bfloat16, is_packed=sys.argv[2] == "packed", cut=cut)
def num_bytes(part):
    if isinstance(part, torch.Tensor):
        return part.nbytes
    if isinstance(part, tuple):
        return sum(map(num_bytes, part))
    return sum(num_bytes(getattr(part, field.name)) for field in dataclasses.fields(part)) if dataclasses.is_dataclass(part) else 0
print(json.dumps({"grown_bytes": peak() - before, "weight_bytes": num_bytes(weights)}))
"""


def measure(directory: Path, scheme: WeightScheme, operands: str, part: str) -> dict[str, int]:
    """grown_bytes, weight_bytes of a process that loads the model or a rank's part of it."""
    fields = model_fields("medium", token_fields(TINY), {"vocab_size": 4096, "num_hidden_layers": 6, "n_routed_experts": 24})
    make_checkpoint(directory, fields, scheme, seed=0, tokenizer_dir=TINY, max_shard_bytes=40_000_000)
    assert len(list(directory.glob("*.safetensors"))) >= 4
    done = subprocess.run([sys.executable, "-c", LOAD, str(directory), operands, part], capture_output=True, text=True, check=True)
    measured: dict[str, int] = json.loads(done.stdout)
    return measured


@pytest.mark.parametrize(
    ("scheme", "operands"), [(WeightScheme.BF16, "packed"), (WeightScheme.NVFP4, "packed"), (WeightScheme.NVFP4, "plain")]
)
def test_the_peak_is_close_to_the_models_size(tmp_path: Path, scheme: WeightScheme, operands: str) -> None:
    measured = measure(tmp_path, scheme, operands, "whole")
    assert measured["weight_bytes"] > 250 * MIB
    assert measured["grown_bytes"] < measured["weight_bytes"] + ALLOWED_EXTRA_MIB * MIB


@pytest.mark.parametrize("scheme", [WeightScheme.BF16, WeightScheme.FP8])
def test_a_rank_of_four_takes_memory_for_its_part(tmp_path: Path, scheme: WeightScheme) -> None:
    measured = measure(tmp_path, scheme, "packed", "rank")
    assert 50 * MIB < measured["weight_bytes"] < 120 * MIB
    assert measured["grown_bytes"] < measured["weight_bytes"] + ALLOWED_EXTRA_MIB * MIB
