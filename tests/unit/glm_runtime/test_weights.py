"""Loading: which checkpoint tensors become which operand, block-FP8, progress."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm_runtime.config import GlmConfig
from glm_runtime.native.build import are_kernels_expected
from glm_runtime.numerics import weight_dtype
from glm_runtime.runtime_config import KernelsChoice, NumericsChoice, RuntimeConfig
from glm_runtime.weight_memory import expected_weight_bytes
from glm_runtime.weights import ModelWeights, MoeWeights, gemm_shapes, load_weights
from kv_transfer.errors import ConfigError
from tests.glm_checkpoints import TINY, write_checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def weights(directory: Path) -> ModelWeights:
    return load_weights(directory, GlmConfig.from_checkpoint(directory), torch.float32)


def test_fused_and_stacked_operands(directory: Path, weights: ModelWeights) -> None:
    raw = load_file(directory / "model.safetensors")
    config = GlmConfig.from_checkpoint(directory)
    layer = weights.layers[6]
    prefix = "model.layers.6."
    attention = prefix + "self_attn."
    q_a, kv_a = raw[attention + "q_a_proj.weight"], raw[attention + "kv_a_proj_with_mqa.weight"]
    assert torch.equal(layer.attention.projections, torch.cat((q_a, kv_a)))
    assert layer.indexer is not None
    wk, heads = raw[attention + "indexer.wk.weight"], raw[attention + "indexer.weights_proj.weight"]
    assert torch.equal(layer.indexer.key_and_weights, torch.cat((wk, heads)))
    assert isinstance(layer.mlp, MoeWeights)
    for expert in range(config.n_routed_experts):
        gate = raw[f"{prefix}mlp.experts.{expert}.gate_proj.weight"]
        up = raw[f"{prefix}mlp.experts.{expert}.up_proj.weight"]
        assert torch.equal(layer.mlp.experts.gate_up[expert], torch.cat((gate, up)))
        assert torch.equal(layer.mlp.experts.down[expert], raw[f"{prefix}mlp.experts.{expert}.down_proj.weight"])
    assert weights.layers[3].indexer is None


def test_kv_b_is_split_by_head_into_key_and_value_parts(directory: Path, weights: ModelWeights) -> None:
    raw = load_file(directory / "model.safetensors")["model.layers.0.self_attn.kv_b_proj.weight"]
    latent = torch.randn(64)
    by_head = (raw @ latent).view(4, 24 + 20)
    attention = weights.layers[0].attention
    assert torch.allclose(torch.einsum("hnc,c->hn", attention.key_up, latent), by_head[:, :24], atol=1e-5)
    assert torch.allclose(torch.einsum("c,hcv->hv", latent, attention.value_up), by_head[:, 24:], atol=1e-5)


def test_what_stays_fp32_in_a_bf16_runtime() -> None:
    weights = load_weights(TINY, GlmConfig.from_checkpoint(TINY), torch.bfloat16)
    mlp = weights.layers[3].mlp
    assert isinstance(mlp, MoeWeights)
    assert mlp.router.dtype == mlp.bias.dtype == weights.final_norm.dtype == torch.float32
    assert mlp.experts.gate_up.dtype == weights.embedding.dtype == torch.bfloat16


def test_progress_ends_at_all_bytes_without_the_mtp_layer(directory: Path) -> None:
    reports: list[tuple[int, int]] = []
    load_weights(directory, GlmConfig.from_checkpoint(directory), torch.float32, lambda read, total: reports.append((read, total)))
    assert [read for read, _ in reports] == sorted(read for read, _ in reports)
    assert reports[-1][0] == reports[-1][1]
    mtp = sum(t.nbytes for name, t in load_file(directory / "model.safetensors").items() if ".layers.7." in name)
    assert reports[-1][1] == sum(t.nbytes for t in load_file(directory / "model.safetensors").values()) - mtp


def test_loading_checks_first(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, change=lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ConfigError, match=r"lm_head\.weight is missing"):
        load_weights(tmp_path, GlmConfig.from_checkpoint(tmp_path), torch.float32)


def test_gemm_shapes_name_every_product(weights: ModelWeights) -> None:
    shapes = gemm_shapes(weights)
    assert {(96, 193), (96, 120), (40, 160), (80, 96), (96, 48), (40, 512), (24, 64), (64, 20)} <= shapes


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("numerics", ["deterministic", "fast"])
def test_the_loaded_size_is_known_before_loading(numerics: NumericsChoice, kernels: KernelsChoice) -> None:
    """Up to what is fp32 in every mode (norms, router, biases) and what fills the last panels of a packed operand."""
    if kernels == "native" and not are_kernels_expected(kernels):
        pytest.skip("no compiler or no AVX-512: nothing would be packed")
    config = GlmConfig.from_checkpoint(TINY)
    weights = load_weights(TINY, config, weight_dtype(numerics, config), is_packed=kernels == "native", with_mtp=True)
    expected = expected_weight_bytes(config, RuntimeConfig(checkpoint=TINY, numerics=numerics, kernels=kernels))
    assert num_bytes(weights) == pytest.approx(expected, rel=0.015)


def num_bytes(part: object) -> int:
    if isinstance(part, torch.Tensor):
        return part.nbytes
    if isinstance(part, tuple):
        return sum(map(num_bytes, part))
    if not dataclasses.is_dataclass(part):
        return 0
    return sum(num_bytes(getattr(part, field.name)) for field in dataclasses.fields(part))
