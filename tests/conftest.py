"""What all tests share: hypothesis's fixed profile, the one running cluster of the session and the one pool of ranks."""

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from tests.running_cluster import RunningCluster, start_cluster

if TYPE_CHECKING:
    from tests.rank_pool import RankPool
    from tests.reference import Reference

SHARED_CLUSTER_CONFIG = """
[runtime]
max_step_tokens = 512
"""
"""Smaller steps than the default, so that prompts of the tests take several chunks."""

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where `make test-layouts` keeps its result."""
    parser.addoption("--layouts-report", type=Path, metavar="FILE", help="write what tests/conformance/test_all_layouts.py compared")


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[RunningCluster]:
    """One prefill and one decode worker through the command line; started once, torn down and checked at the end."""
    running = start_cluster(config=SHARED_CLUSTER_CONFIG)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def cluster(shared_cluster: RunningCluster) -> Iterator[RunningCluster]:
    """The shared cluster, with all its workers serving; afterwards nothing may be held any more."""
    shared_cluster.wait_until_serving()
    yield shared_cluster
    shared_cluster.wait_until_quiescent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of all logs of the shared cluster with a test that failed on it."""
    report = yield
    running = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and running is not None:
        report.sections.append(("logs of the cluster", running.log_tails()))
    return report


RANK_CLUSTER_CONFIG = """
[prefill.parallel]
pcp_size = 2
[decode.parallel]
tp_size = 2
dcp_size = 2
[runtime]
max_step_tokens = 512
cache_bytes = 67108864
"""


@pytest.fixture(scope="session")
def rank_cluster() -> Iterator[RunningCluster]:
    """A prefill worker whose two ranks share rows, and a decode worker whose two ranks share heads and caches; started once."""
    running = start_cluster(config=RANK_CLUSTER_CONFIG)
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def ranks(rank_cluster: RunningCluster) -> Iterator[RunningCluster]:
    """The cluster of several ranks a worker, all serving; afterwards nothing may be held."""
    rank_cluster.wait_until_serving()
    yield rank_cluster
    rank_cluster.wait_until_quiescent()


@pytest.fixture(scope="session")
def reference() -> "Reference":
    """The shipped checkpoint in this process. Torch is imported here and not before: most tests need none."""
    from tests.reference import Reference

    return Reference()


@pytest.fixture(scope="session")
def rank_pool() -> Iterator["RankPool"]:
    """Processes that act as ranks. Imported, and started one by one, when a test needs them."""
    from tests.rank_pool import RankPool

    pool = RankPool()
    try:
        yield pool
    finally:
        pool.close()
