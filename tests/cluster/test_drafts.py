"""What a user sees of drafts: the same tokens, several to an event, and counts by position."""

import httpx
import pytest

from tests.prompts import make_prompt
from tests.reference import Reference
from tests.running_cluster import RunningCluster, wait_until

pytestmark = pytest.mark.cluster


def accepted(cluster: RunningCluster) -> int:
    return sum(sum(worker["accepted"]) for worker in cluster.status()["workers"] if worker["role"] == "decode")


def test_drafts_that_hold_come_together_and_are_counted(cluster: RunningCluster, reference: Reference) -> None:
    prompt = make_prompt(150, 400)
    before = accepted(cluster)
    events = list(cluster.stream(prompt, 80))
    assert [[token for event in events for token in event]] == reference.greedy([prompt], 80)
    # How many is for the worker to choose, by what drafts cost at the moment; a busy machine draws few.
    assert len(events) < 78, "a step gives several tokens, and they travel together"
    wait_until(lambda: accepted(cluster) >= before + 3, 10.0, lambda: str(cluster.status()))
    metrics = httpx.get(f"{cluster.url}/metrics", timeout=10).text
    assert 'glm_worker_drafted_tokens{position="1"' in metrics
    assert 'glm_worker_accepted_tokens{position="1"' in metrics
