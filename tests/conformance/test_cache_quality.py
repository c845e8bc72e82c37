"""What packed cache formats cost on real text: a slice of the held-out set against an fp32 cache. All of it: benchmarks/perplexity.py.

Divergence is the sensitive measure: this model hardly misses what a wrong scale of a sixteenth of a row takes away.
"""

import pytest
from torch import Tensor

from benchmarks.perplexity import Text, change_percent, divergence, load_runtime, negative_log_likelihood, predict, read_texts
from tests.conformance.tolerances import CACHE_DIVERGENCE, PERPLEXITY_CHANGE_PERCENT
from tests.glm_checkpoints import CACHE_CHOICES

EVERY = 20
"""A twentieth of the texts, some of each kind."""


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    return read_texts(EVERY)


@pytest.fixture(scope="module")
def base(texts: list[Text]) -> list[Tensor]:
    return predict(load_runtime(CACHE_CHOICES["fp32"]), texts)


def test_the_slice_has_every_kind_and_a_model_that_learned(texts: list[Text], base: list[Tensor]) -> None:
    assert {text.kind for text in texts} == {"chat", "tool", "long"}
    assert negative_log_likelihood(texts, base) < 0.5


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla", "nvfp4_ds_mla+mxfp4"])
def test_predictions_change_little(texts: list[Text], base: list[Tensor], name: str) -> None:
    predictions = predict(load_runtime(CACHE_CHOICES[name]), texts)
    main_format = name.split("+")[0]
    change = change_percent(negative_log_likelihood(texts, predictions), negative_log_likelihood(texts, base))
    assert abs(change) < PERPLEXITY_CHANGE_PERCENT[main_format], f"{name} changes perplexity by {change:+.3f} %"
    moved = divergence(base, predictions)
    assert moved < CACHE_DIVERGENCE[main_format], f"{name} diverges by {moved:.2e} nats a token"
