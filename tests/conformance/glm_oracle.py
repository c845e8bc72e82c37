"""transformers' GlmMoeDsaForCausalLM in fp32 as the authority, with a record of every discrete choice it made and how close it was.

Its two latent norms are built without the config's eps; they are patched to it here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import GlmMoeDsaForCausalLM
from transformers.utils import logging as transformers_logging

from tests.conformance.tolerances import CHOICE_GAP

_TOPKS = (torch.topk, torch.Tensor.topk)


@dataclass(kw_only=True)
class OracleRun:
    """One prompt: logits [S, vocabulary]; by layer the chosen tokens [S, K], chosen experts [S, k], and which rows were close."""

    logits: Tensor
    lists: dict[int, Tensor] = field(default_factory=dict)
    close_lists: dict[int, Tensor] = field(default_factory=dict)
    experts: dict[int, Tensor] = field(default_factory=dict)
    close_experts: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_close_rows(self) -> int:
        """Rows with at least one choice that was close."""
        flags = [*self.close_lists.values(), *self.close_experts.values()]
        return int(torch.stack(flags).any(0).sum())


class Oracle:
    """Loads a checkpoint directory once; runs prompts one at a time, without cache and without padding.

    has_exact_angles: replace its rotary angles, which it forms in fp32, by ones formed in fp64. On the shipped checkpoint their
    error alone moves logits by 1e-5 to 1e-4 of the largest, more with longer contexts (measured), beyond the tolerance.
    """

    def __init__(self, directory: Path, *, has_exact_angles: bool = False) -> None:
        transformers_logging.set_verbosity_error()  # it reports the MTP layer's tensors as unexpected
        transformers_logging.disable_progress_bar()
        self.model = GlmMoeDsaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
        for layer in self.model.model.layers:
            layer.self_attn.q_a_layernorm.variance_epsilon = self.model.config.rms_norm_eps
            layer.self_attn.kv_a_layernorm.variance_epsilon = self.model.config.rms_norm_eps
        if has_exact_angles:
            self.model.model.rotary_emb = _ExactRotary(self.model.config.rope_parameters["rope_theta"], self.model.config.qk_rope_head_dim)

    def run(self, tokens: Sequence[int]) -> OracleRun:
        """Logits of every row, with the choices on the way."""
        with torch.no_grad(), _recording(self.model) as record:
            logits = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        run = OracleRun(logits=logits)
        for layer, calls in record.index_calls.items():
            ((scores, chosen),) = calls
            run.lists[layer], run.close_lists[layer] = _list_choice(scores[0], chosen[0])
        for layer, calls in record.router_calls.items():
            _, (group_scores, groups), (biased, chosen) = calls
            run.experts[layer] = chosen.sort(dim=-1).values
            run.close_experts[layer] = _is_close(biased, chosen.shape[1]) | _is_close(group_scores, groups.shape[1])
        return run


class _ExactRotary(torch.nn.Module):
    """cos and sin as transformers lays them out, [1, S, R] with the angles twice, from fp64 angles."""

    def __init__(self, theta: float, rope_dim: int) -> None:
        super().__init__()
        self.frequencies = theta ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _list_choice(scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen tokens of rows that see more than K, ascending, else -1; and which of those choices were close."""
    visible = torch.arange(1, scores.shape[0] + 1)
    needs_choice = visible > chosen.shape[1]
    lists = torch.where(needs_choice[:, None], chosen.long().sort(dim=-1).values, -1)
    # Its causal mask is a large negative number, not -inf.
    masked = scores.masked_fill(torch.arange(scores.shape[1]) >= visible[:, None], float("-inf"))
    return lists, _is_close(masked, chosen.shape[1]) & needs_choice


def _is_close(scores: Tensor, k: int) -> Tensor:
    """Whether the k-th and the next score of each row are nearer than the tolerance."""
    if scores.shape[1] <= k:
        return torch.zeros(scores.shape[0], dtype=torch.bool)
    ranked = scores.sort(dim=-1, descending=True).values
    largest = torch.where(scores.isfinite(), scores, 0.0).abs().amax(-1)
    return ranked[:, k - 1] - ranked[:, k] < CHOICE_GAP * largest.clamp_min(1.0)


class _TopkRecord(TorchFunctionMode):
    """Notes scores and result of each top-k, under the module that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.index_calls: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.router_calls: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.current: list[tuple[Tensor, Tensor]] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _TOPKS and self.current is not None:
            self.current.append((args[0].detach().clone(), result[1].detach().clone()))
        return result


@contextmanager
def _recording(model: Any) -> Iterator[_TopkRecord]:
    record = _TopkRecord()
    handles = []
    for number, layer in enumerate(model.model.layers):
        if layer.self_attn.indexer is not None:
            handles += _watch(record, layer.self_attn.indexer, record.index_calls, number)
        if hasattr(layer.mlp, "gate"):
            handles += _watch(record, layer.mlp.gate, record.router_calls, number)
    try:
        with record:
            yield record
    finally:
        for handle in handles:
            handle.remove()


def _watch(record: _TopkRecord, module: Any, calls: dict[int, list[tuple[Tensor, Tensor]]], layer: int) -> list[Any]:
    def enter(*_: Any) -> None:
        record.current = calls.setdefault(layer, [])

    def leave(*_: Any) -> None:
        record.current = None

    return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
