"""The MTP layer's input rows: order of the halves, the zero at position 0, rounding, and all implementations alike."""

import pytest
import torch

from glm_runtime.ops.embed_eh_norm import EhNorms, embed_eh_norm
from tests.unit.glm_runtime.ops.pools import NATIVE, relative_rms

IMPLS = ("reference", NATIVE)
CASES = [
    # id, rows, width, vocabulary, position of the first row
    ("one-row", 1, 16, 3, 5),
    ("position-0", 3, 48, 7, 0),
    ("odd-width", 5, 83, 11, 62),
    ("wide", 2, 6144, 5, 1),
    ("many", 40, 160, 50, 0),
    ("empty", 0, 32, 4, 0),
]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "width", "vocabulary", "start"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_halves_are_norms_of_the_next_embedding_and_of_the_hidden_state(
    rows: int, width: int, vocabulary: int, start: int, dtype: torch.dtype, impl: str
) -> None:
    generator = torch.Generator().manual_seed(width)
    embedding = torch.randn(vocabulary, width, generator=generator).bfloat16() * 0.1
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    norms = EhNorms(torch.rand(width, generator=generator).to(dtype), torch.rand(width, generator=generator).to(dtype), 1e-5)
    tokens = torch.randint(vocabulary, (rows,), generator=generator)
    positions = torch.arange(rows) + start
    halves = embed_eh_norm(tokens, positions, hidden, embedding, norms, impl=impl)
    assert halves.shape == (rows, 2 * width)
    assert halves.dtype is dtype
    for row in range(rows):
        left, right = halves[row].double().split(width)
        embedded = embedding[tokens[row]].double() if positions[row] else torch.zeros(width, dtype=torch.float64)
        assert_norm_of(left, embedded, norms.embedding, dtype)
        assert_norm_of(right, hidden[row].double(), norms.hidden, dtype)


def assert_norm_of(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> None:
    expected = x / (x.square().mean() + 1e-5).sqrt() * weight.double()
    if not x.any():
        assert not actual.any(), "the norm of a zero row is exactly zero"
    elif dtype is torch.float32:
        assert relative_rms(actual, expected) < 3e-7
    else:
        assert relative_rms(actual, expected) < 3e-3


@pytest.mark.parametrize("impl", IMPLS)
def test_a_row_does_not_see_the_others(impl: str) -> None:
    hidden, embedding = torch.randn(37, 83), torch.randn(9, 83)
    norms = EhNorms(torch.rand(83), torch.rand(83), 1e-5)
    tokens, positions = torch.randint(9, (37,)), torch.arange(37)
    together = embed_eh_norm(tokens, positions, hidden, embedding, norms, impl=impl)
    alone = [
        embed_eh_norm(tokens[row : row + 1], positions[row : row + 1], hidden[row : row + 1], embedding, norms, impl=impl)
        for row in range(37)
    ]
    if impl == "native":
        assert torch.equal(together, torch.cat(alone))
    else:
        assert relative_rms(together, torch.cat(alone)) < 1e-6


@pytest.mark.parametrize("impl", IMPLS)
def test_refuses_what_does_not_fit(impl: str) -> None:
    norms = EhNorms(torch.ones(8), torch.ones(8), 1e-5)
    fit = (torch.tensor([1]), torch.tensor([3]), torch.zeros(1, 8), torch.zeros(4, 8))
    for number, bad, says in [
        (0, torch.tensor([4]), r"tokens lie in \[4, 4\]"),
        (0, torch.tensor([-1]), r"tokens lie in \[-1, -1\]"),
        (0, torch.tensor([1], dtype=torch.int32), "tokens are torch.int32"),
        (1, torch.tensor([3, 4]), "positions has shape"),
        (3, torch.zeros(4, 9), "embedding has shape"),
    ]:
        arguments = [bad if at == number else argument for at, argument in enumerate(fit)]
        with pytest.raises(ValueError, match=f"embed_eh_norm: {says}"):
            embed_eh_norm(*arguments, norms, impl=impl)
