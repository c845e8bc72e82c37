"""What a rank's number means, who meets whom, and which layouts are refused: every legal layout of up to eight ranks."""

import dataclasses
import itertools

import pytest

from glm_runtime.config import GlmConfig
from glm_runtime.parallel.context import one_rank
from glm_runtime.parallel.layout import GroupKind, ParallelLayout, check_layout, parts_of
from kv_transfer.errors import ConfigError
from tests.glm_checkpoints import TINY

SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
LAYOUTS = [
    ParallelLayout(tp_size=tp, pcp_size=pcp, dp_size=dp, dcp_size=dcp)
    for tp, pcp, dp, dcp in itertools.product(SIZES, repeat=4)
    if tp * pcp * dp <= 8 and tp % dcp == 0
]
EIGHT = ParallelLayout(tp_size=4, dp_size=2, dcp_size=2, is_expert_parallel=True)


def groups(layout: ParallelLayout, kind: GroupKind) -> list[tuple[int, ...]]:
    return [layout.members(kind, rank) for rank in range(layout.num_ranks)]


def names(layout: ParallelLayout) -> str:
    return layout.describe()


@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
class TestGroups:
    def test_each_kind_cuts_the_ranks_into_equal_groups_that_all_members_agree_on(self, layout: ParallelLayout) -> None:
        sizes = {
            GroupKind.WORLD: layout.num_ranks,
            GroupKind.TENSOR: layout.tp_size,
            GroupKind.DECODE_CONTEXT: layout.dcp_size,
            GroupKind.PREFILL_CONTEXT: layout.pcp_size,
            GroupKind.DATA: layout.dp_size,
        }
        for kind, size in sizes.items():
            for rank, members in enumerate(groups(layout, kind)):
                assert rank in members
                assert len(members) == size
                assert list(members) == sorted(members)
                assert all(layout.members(kind, other) == members for other in members)

    def test_members_are_those_of_the_formula(self, layout: ParallelLayout) -> None:
        """rank = (data * pcp + prefill) * tp + tensor, written out as nested loops instead of arithmetic on ranks."""
        numbers = {
            place: rank
            for rank, place in enumerate(itertools.product(range(layout.dp_size), range(layout.pcp_size), range(layout.tp_size)))
        }
        for (data, prefill, tensor), rank in numbers.items():
            assert layout.place(rank) == (data, prefill, tensor, tensor % layout.dcp_size)
            first = tensor - tensor % layout.dcp_size
            decode = tuple(numbers[data, prefill, first + other] for other in range(layout.dcp_size))
            assert layout.members(GroupKind.TENSOR, rank) == tuple(numbers[data, prefill, other] for other in range(layout.tp_size))
            assert layout.members(GroupKind.DECODE_CONTEXT, rank) == decode
            assert layout.members(GroupKind.PREFILL_CONTEXT, rank) == tuple(numbers[data, o, tensor] for o in range(layout.pcp_size))
            assert layout.members(GroupKind.DATA, rank) == tuple(numbers[o, prefill, tensor] for o in range(layout.dp_size))


def test_groups_of_eight_ranks_written_out() -> None:
    assert sorted(set(groups(EIGHT, GroupKind.TENSOR))) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert sorted(set(groups(EIGHT, GroupKind.DECODE_CONTEXT))) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert sorted(set(groups(EIGHT, GroupKind.DATA))) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    prefill = ParallelLayout(tp_size=2, pcp_size=4)
    assert sorted(set(groups(prefill, GroupKind.PREFILL_CONTEXT))) == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_a_rank_that_is_not_there_has_no_place() -> None:
    for rank in (-1, 8):
        with pytest.raises(ValueError, match=f"rank {rank} is not of 8"):
            EIGHT.place(rank)


def test_experts_are_spread_over_all_ranks_or_none() -> None:
    assert EIGHT.ep_size == 8
    assert dataclasses.replace(EIGHT, is_expert_parallel=False).ep_size == 1
    assert EIGHT.num_worker_ranks == 4
    assert EIGHT.shards_rows
    assert ParallelLayout(pcp_size=2).shards_rows
    assert not ParallelLayout(tp_size=8).shards_rows


def test_a_layout_has_a_short_name() -> None:
    assert ParallelLayout().describe() == "one rank"
    assert ParallelLayout(pcp_size=2).describe() == "pcp2"
    assert ParallelLayout(tp_size=4, dcp_size=4, is_expert_parallel=True).describe() == "tp4 dcp4 ep"


def test_one_rank_leads_and_is_alone_in_every_group() -> None:
    context = one_rank()
    assert context.leads
    assert {kind: group.size for kind, group in context.groups.items()} == dict.fromkeys(GroupKind, 1)
    assert context.place == (0, 0, 0, 0)


class TestRefusals:
    config = GlmConfig.from_checkpoint(TINY)

    @pytest.mark.parametrize(
        ("layout", "path", "says"),
        [
            (ParallelLayout(tp_size=0), "tp_size", "is 0; expected at least 1"),
            (ParallelLayout(dp_size=-1), "dp_size", "is -1; expected at least 1"),
            (ParallelLayout(pcp_size=2, tp_size=2, dcp_size=2), "pcp_size", "is 2 with dcp_size 2"),
            (ParallelLayout(tp_size=2, dcp_size=4), "dcp_size", "is 4; it must divide tp_size, 2"),
            (ParallelLayout(dp_size=2), "dp_size", "is 2 without is_expert_parallel"),
            (ParallelLayout(dcp_combine="ring"), "dcp_combine", "is 'ring'; expected 'a2a' or 'ag_rs'"),  # type: ignore[arg-type]
        ],
    )
    def test_what_cannot_run_is_refused_by_field_and_numbers(self, layout: ParallelLayout, path: str, says: str) -> None:
        with pytest.raises(ConfigError) as caught:
            check_layout(layout, self.config, "decode.parallel")
        assert caught.value.path == f"decode.parallel.{path}"
        assert says in str(caught.value)

    @pytest.mark.parametrize("name", ["num_attention_heads", "vocab_size", "intermediate_size", "moe_intermediate_size"])
    def test_what_is_cut_over_tensor_ranks_must_be_divisible(self, name: str) -> None:
        odd = dataclasses.replace(self.config, **{name: 2 * getattr(self.config, name) + 1})
        with pytest.raises(ConfigError, match=f"tp_size is 2, which does not divide the model's {name}, {getattr(odd, name)}"):
            check_layout(ParallelLayout(tp_size=2), odd)
        check_layout(ParallelLayout(pcp_size=2), odd)

    def test_experts_must_be_divisible_over_all_ranks(self) -> None:
        odd = dataclasses.replace(self.config, n_routed_experts=6)
        with pytest.raises(ConfigError, match="ep_size is 4, which does not divide the model's n_routed_experts, 6"):
            check_layout(ParallelLayout(pcp_size=4, is_expert_parallel=True), odd)
        check_layout(ParallelLayout(pcp_size=4), odd)

    def test_the_shipped_model_can_be_cut_into_up_to_four(self) -> None:
        for size in (1, 2, 4):
            check_layout(ParallelLayout(tp_size=size, dcp_size=size, is_expert_parallel=True), self.config)


def test_parts_are_equal_and_in_order() -> None:
    assert list(parts_of(12, 3)) == [slice(0, 4), slice(4, 8), slice(8, 12)]
    with pytest.raises(ValueError, match="12 cannot be cut into 5 equal parts"):
        parts_of(12, 5)
