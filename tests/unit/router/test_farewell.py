"""CANCEL is repeated until somebody answers, or nobody can."""

from kv_transfer.identity import Incarnation, RequestId, TransferId, WorkerId
from kv_transfer.messages import Cancel
from router.effects import Post
from router.farewell import Farewells
from router.policy import WorkerRef

WORKER = WorkerRef(WorkerId("d"), Incarnation(1))
TRANSFER = TransferId(RequestId("r"), 1, Incarnation(2), Incarnation(1))
SAID = [Post(WORKER, Cancel(TRANSFER, "done"))]


def make() -> Farewells:
    farewells = Farewells(repeat_s=1.0, max_repeat_s=4.0, grace_s=5.0)
    assert farewells.begin(WORKER, TRANSFER, "done", 0.0) == SAID
    return farewells


def test_it_is_said_again_ever_more_slowly_until_it_is_answered() -> None:
    farewells = make()
    said_at = [second for second in range(1, 20) if farewells.tick(float(second))]
    assert said_at == [1, 3, 7, 11, 15, 19]
    farewells.answered(WORKER, TRANSFER)
    farewells.answered(WORKER, TRANSFER)
    assert (farewells.tick(100.0), farewells.num_open) == ([], 0)


def test_a_link_that_comes_back_hears_it_again() -> None:
    farewells = make()
    farewells.link_down(WORKER, 1.0)
    assert farewells.tick(2.0) == []
    assert farewells.link_up(WORKER) == SAID
    assert farewells.num_open == 1


def test_a_link_that_stays_away_has_settled_it() -> None:
    farewells = make()
    farewells.link_down(WORKER, 1.0)
    farewells.tick(6.0)
    assert farewells.num_open == 0
    assert farewells.link_up(WORKER) == []


def test_another_start_of_the_worker_has_settled_it() -> None:
    farewells = make()
    farewells.worker_gone(WORKER)
    assert (farewells.num_open, farewells.tick(9.0)) == (0, [])
