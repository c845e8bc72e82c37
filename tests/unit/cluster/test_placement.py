"""Pools become one placement group per worker."""

from cluster.placement import Pool, count_cpus, plan_groups


def test_every_worker_gets_its_own_group_in_the_order_of_the_pools() -> None:
    plans = plan_groups([Pool(role="prefill", num_workers=2), Pool(role="decode", num_workers=1)])
    assert [(plan.worker_id, plan.role) for plan in plans] == [("prefill-0", "prefill"), ("prefill-1", "prefill"), ("decode-0", "decode")]
    assert all(plan.bundles == ({"CPU": 1.0},) for plan in plans)


def test_ranks_of_one_worker_share_a_node() -> None:
    (plan,) = plan_groups([Pool(role="decode", num_workers=1, num_ranks=4, cpus_per_rank=2.0)])
    assert plan.strategy == "STRICT_PACK"
    assert plan.bundles == ({"CPU": 2.0},) * 4


def test_local_ray_must_offer_what_all_groups_reserve() -> None:
    assert count_cpus(plan_groups([Pool(role="prefill", num_workers=2), Pool(role="decode", num_workers=3, cpus_per_rank=0.5)])) == 3.5
    assert count_cpus([]) == 0
