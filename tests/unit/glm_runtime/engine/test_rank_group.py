"""A worker's ranks as threads with real connections and real gloo groups: joining, following, and every way in which it can end."""

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

from glm_runtime.engine.group_messages import Beat, Begin, Failed, Loaded, RankTerms, Refused, Step, Stop, Transfers, decode, encode
from glm_runtime.engine.plan_codec import PlanDecoder
from glm_runtime.engine.rank_follower import follow, join_group, wait_for_begin
from glm_runtime.engine.rank_group import GroupLead, GroupRunner, RankGroupConfig, RankWatch, describe_difference
from glm_runtime.engine.step_plan import SequenceSlice, StepPlan, StepResult
from glm_runtime.engine.step_runner import EMPTY_PLAN
from glm_runtime.parallel.context import ParallelContext
from glm_runtime.parallel.layout import ParallelLayout
from kv_transfer.config import WireConfig
from kv_transfer.errors import AuthenticationFailed, ConfigError, EngineFault, PeerLost, WorkerLost
from kv_transfer.geometry import BlockCopy
from kv_transfer.identity import BlockId, SequenceId, new_incarnation, rank_name
from kv_transfer.link_proof import Party
from kv_transfer.messages import PartyKind, SamplingParameters
from kv_transfer.rank_link import RankLink, dial_rank

SECRET = b"a cluster's secret"
WORKER = "decode-0"
THREE = RankGroupConfig(layout=ParallelLayout(tp_size=3), step_timeout_s=20.0, start_timeout_s=10.0)
WIRE = WireConfig(hello_timeout_s=5.0, ping_interval_s=0.1, silence_timeout_s=1.0)
TERMS = RankTerms(
    weights_version="w",
    layout_fingerprint="f",
    numerics="deterministic",
    kernels="torch",
    num_blocks=10,
    max_step_tokens=16,
    max_model_len_tokens=100,
    max_drafts=0,
    verification="exact",
    num_balance_steps=0,
)


def party(rank: int) -> Party:
    return Party(PartyKind.DECODE, rank_name(WORKER, rank), new_incarnation())


def make_plan(step_number: int, tokens: tuple[int, ...] = (5, 6), num_blocks: int = 2) -> StepPlan:
    piece = SequenceSlice(
        sequence_id=SequenceId("a"),
        tokens=tokens,
        start=step_number,
        block_table=[BlockId(block) for block in range(num_blocks)],
        sampling=SamplingParameters(max_tokens=9, seed=1),
    )
    return StepPlan(step_number=step_number, slices=(piece,))


class SummingRunner:
    """Every rank adds the plan's first token and its own rank's number over the group: a result that needs all of them.

    A plan that begins with token 0 is run without an exchange: where another rank does not come to it, this one shall not hang.
    """

    def __init__(self, context: ParallelContext) -> None:
        self.plans: list[StepPlan] = []
        self._context = context

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        if not plan.slices or plan.slices[0].tokens[0] == 0:
            return StepResult(step_number=plan.step_number, samples={})
        total = self._context.tensor.all_reduce(torch.tensor([float(plan.slices[0].tokens[0] + self._context.rank)]))
        return StepResult(step_number=plan.step_number, samples={SequenceId("a"): (int(total),)})


@dataclass
class Follower:
    """A following rank on a thread. terms: what it says that it has loaded. on_step: called before each step."""

    rank: int
    address: tuple[str, int]
    terms: RankTerms = TERMS
    config: RankGroupConfig = THREE
    secret: bytes = SECRET
    on_step: Callable[[StepPlan], None] = lambda plan: None
    beats: bool = True
    link: RankLink | None = None
    runner: SummingRunner | None = None
    error: BaseException | None = None
    thread: threading.Thread = field(default_factory=threading.Thread)
    _beating: threading.Event = field(default_factory=threading.Event)

    def start(self) -> "Follower":
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def join(self) -> BaseException | None:
        self.thread.join(10)
        assert not self.thread.is_alive(), f"rank {self.rank} has not ended"
        return self.error

    def run(self, plan: StepPlan) -> StepResult:
        assert self.runner is not None
        self.on_step(plan)
        return self.runner.run(plan)

    def _run(self) -> None:
        try:
            self.link, _ = dial_rank(self.secret, party(self.rank), *self.address, WIRE, 10)
            context = join_group(self.link, self.rank, self.config, leader_host="127.0.0.1", host="127.0.0.1")
            self.runner = SummingRunner(context)
            self.link.send(encode(Loaded(self.terms)))
            wait_for_begin(self.link, 10)
            threading.Thread(target=self._beat, daemon=True).start()
            follow(self.link, self)
        except BaseException as error:
            self.error = error
        finally:
            self._beating.set()
            if self.link is not None:
                self.link.close()

    def _beat(self) -> None:
        assert self.link is not None
        while self.beats and not self._beating.wait(3 * WIRE.ping_interval_s):
            try:
                self.link.send(encode(Beat()))
            except PeerLost:
                return


class Group:
    """A leading rank, its faults, and the followers that a test starts."""

    def __init__(self) -> None:
        self.faults: queue.SimpleQueue[EngineFault] = queue.SimpleQueue()
        self.lead = GroupLead(SECRET, party(0), "127.0.0.1", THREE, WIRE, self.faults.put)
        self.followers: list[Follower] = []
        self.context: ParallelContext | None = None

    def add(self, rank: int, **given: object) -> Follower:
        follower = dataclasses.replace(Follower(rank, self.lead.address), **given)  # type: ignore[arg-type]
        self.followers.append(follower)
        return follower.start()

    def start(self) -> GroupRunner:
        self.context = self.lead.gather()
        return self.lead.start(SummingRunner(self.context), TERMS)

    def end(self) -> None:
        self.lead.close(has_ended_well=True)
        for follower in self.followers:
            if follower.link is not None:
                follower.link.close()
            follower.join()


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.end()


def answer(result: StepResult) -> int:
    return result.samples[SequenceId("a")][0]


def test_all_ranks_run_every_plan_and_end_when_the_leading_one_does(group: Group) -> None:
    first, second = group.add(1), group.add(2)
    runner = group.start()
    plans = [make_plan(1), make_plan(2, (7,), 5), make_plan(3, (8,), 3)]
    assert [answer(runner.run(plan)) for plan in plans] == [3 * 5 + 3, 3 * 7 + 3, 3 * 8 + 3]
    assert set(group.lead.pids) == {1, 2}
    group.lead.close(has_ended_well=True)
    assert [first.join(), second.join()] == [None, None]
    assert first.runner is not None
    assert second.runner is not None
    assert first.runner.plans == second.runner.plans == plans
    assert group.faults.empty()


def test_an_empty_plan_is_nobody_elses_business(group: Group) -> None:
    group.add(1), group.add(2)
    group.start()
    recorded = []

    class Recording:
        def run(self, plan: StepPlan) -> StepResult:
            recorded.append(plan)
            return StepResult(step_number=0, samples={})

    links = {0: None}  # would fail if it were used
    runner = GroupRunner(WORKER, Recording(), links, group.lead._watch)  # type: ignore[arg-type]
    runner.run(StepPlan(step_number=4, slices=()))
    assert len(recorded) == 1


def test_a_plan_of_copies_alone_is_everybodys(group: Group) -> None:
    followers = [group.add(1), group.add(2)]
    runner = group.start()
    plan = StepPlan(step_number=4, slices=(), copies=(BlockCopy(BlockId(3), 1),))
    runner.run(plan)
    group.lead.close(has_ended_well=True)
    for follower in followers:
        assert follower.join() is None
        assert follower.runner is not None
        assert follower.runner.plans == [plan]


def connect_transfers(group: Group, rank: int, says: int) -> RankLink:
    """As a follower does after Begin."""
    link, _ = dial_rank(SECRET, party(rank), "127.0.0.1", group.lead._transfers_listener.port, WIRE, 10.0)
    link.send(encode(Transfers(says)))
    return link


def test_every_rank_connects_its_transfers_and_nobody_elses(group: Group) -> None:
    group.add(1), group.add(2)
    group.start()
    linked: queue.SimpleQueue[tuple[RankLink, ...]] = queue.SimpleQueue()
    linking = threading.Thread(target=lambda: linked.put(group.lead.link_transfers()), daemon=True)
    linking.start()
    links = [connect_transfers(group, rank, says) for rank, says in ((2, 2), (1, 2), (2, 2), (1, 1))]
    accepted = linked.get(timeout=10)
    for link, refused in zip(links, (False, True, True, False), strict=True):
        if refused:
            assert isinstance(message := decode(link.receive(5)), Refused)
            assert "nobody waits for them" in message.reason
        else:
            link.send(b"rank")
    assert [link.receive(5) for link in accepted] == [b"rank", b"rank"]
    for link in (*links, *accepted):
        link.close()
    assert group.faults.empty()


def test_transfers_that_are_not_connected_end_the_worker() -> None:
    group = Group()
    group.lead._config = dataclasses.replace(THREE, start_timeout_s=5.0)
    group.add(1), group.add(2)
    group.start()
    group.lead._config = dataclasses.replace(THREE, start_timeout_s=0.2)
    with pytest.raises(EngineFault, match=r"ranks \[1, 2\] of decode-0 have not connected their transfers"):
        group.lead.link_transfers()
    group.end()


def test_where_other_workers_may_have_rows_an_empty_plan_is_every_rank_s() -> None:
    class Taking:
        def __init__(self) -> None:
            self.frames: list[bytes] = []

        def send(self, frame: bytes) -> None:
            self.frames.append(frame)

    class Idle:
        def run(self, plan: StepPlan) -> StepResult:
            return StepResult(step_number=plan.step_number, samples={}, is_idle=True)

    link, watch = Taking(), RankWatch(WORKER, {}, WireConfig(), lambda fault: None)
    runner = GroupRunner(WORKER, Idle(), {1: link}, watch, joins_others=True)  # type: ignore[dict-item]
    assert runner.run(EMPTY_PLAN).is_idle
    watch.stop()
    assert [PlanDecoder().decode(message.plan) for message in map(decode, link.frames) if isinstance(message, Step)] == [EMPTY_PLAN]


def test_a_rank_that_fails_in_a_step_is_named_with_its_reason(group: Group) -> None:
    def fail(plan: StepPlan) -> None:
        if plan.step_number == 2:
            raise ValueError("planted")

    group.add(1)
    failing = group.add(2, on_step=fail)
    runner = group.start()
    runner.run(make_plan(1))
    runner.run(make_plan(2, (0,)))
    fault = group.faults.get(timeout=5)
    assert fault.fields["rank"] == 2
    assert "rank 2 of decode-0 failed: ValueError: planted" in str(fault)
    assert isinstance(failing.join(), EngineFault)
    with pytest.raises(EngineFault, match="rank 2 of decode-0"):
        runner.run(make_plan(3))


def test_a_failure_of_the_leading_rank_is_its_own(group: Group) -> None:
    group.add(1), group.add(2)
    runner = group.start()

    class Broken:
        def run(self, plan: StepPlan) -> StepResult:
            raise IndexError("planted")

    runner._runner = Broken()
    with pytest.raises(EngineFault, match="rank 0 of decode-0 failed: IndexError: planted") as raised:
        runner.run(make_plan(1, (0,)))
    assert raised.value.fields == {"rank": 0, "step_number": 1}


def test_a_failure_that_another_rank_has_caused_is_put_down_to_it(group: Group) -> None:
    """What a collective says of a lost rank comes a moment before or after the end of that rank's connection."""
    group.add(1)
    victim = group.add(2)
    runner = group.start()

    class Broken:
        def run(self, plan: StepPlan) -> StepResult:
            assert victim.link is not None
            threading.Timer(0.2, victim.link.close).start()
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")

    runner._runner = Broken()
    with pytest.raises(EngineFault, match="rank 2 of decode-0 is gone") as raised:
        runner.run(make_plan(1, (0,)))
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_rank_that_dies_between_steps_is_noticed_at_once(group: Group) -> None:
    victim = group.add(1)
    group.add(2)
    runner = group.start()
    runner.run(make_plan(1))
    assert victim.link is not None
    victim.link.close()
    ended_s = time.monotonic()
    fault = group.faults.get(timeout=5)
    assert time.monotonic() - ended_s < 0.2
    assert "rank 1 of decode-0 is gone" in str(fault)
    with pytest.raises(EngineFault, match="rank 1 of decode-0 is gone"):
        runner.run(make_plan(2))


def test_a_silent_rank_is_given_up(group: Group) -> None:
    group.add(1)
    group.add(2, beats=False)
    group.start()
    started_s = time.monotonic()
    assert "rank 2 of decode-0 has not been heard for" in str(group.faults.get(timeout=5))
    assert WIRE.silence_timeout_s <= time.monotonic() - started_s < 5 * WIRE.silence_timeout_s


def test_beating_ranks_may_wait_for_steps_as_long_as_they_like(group: Group) -> None:
    group.add(1), group.add(2)
    runner = group.start()
    time.sleep(2.5 * WIRE.silence_timeout_s)
    assert group.faults.empty()
    assert answer(runner.run(make_plan(1))) == 18


def test_followers_learn_that_the_leading_rank_is_gone(group: Group) -> None:
    followers = group.add(1), group.add(2)
    group.start()
    for link in group.lead._links.values():
        link.close()
    assert all(isinstance(follower.join(), WorkerLost) for follower in followers)


def test_a_group_without_all_its_ranks_does_not_start() -> None:
    short = dataclasses.replace(THREE, start_timeout_s=0.3)
    lead = GroupLead(SECRET, party(0), "127.0.0.1", short, WIRE, lambda fault: None)
    with pytest.raises(EngineFault, match=r"ranks \[1, 2\] of decode-0 have not joined within 0.3 s"):
        lead.gather()
    lead.close(has_ended_well=False)


def test_closing_ends_the_wait_for_ranks() -> None:
    lead = GroupLead(SECRET, party(0), "127.0.0.1", THREE, WIRE, lambda fault: None)
    threading.Timer(0.1, lambda: lead.close(has_ended_well=False)).start()
    with pytest.raises(PeerLost):
        lead.gather()


def test_a_rank_that_has_loaded_something_else_is_refused_on_both_sides(group: Group) -> None:
    other = dataclasses.replace(TERMS, weights_version="v", num_blocks=9)
    group.add(1)
    stranger = group.add(2, terms=other)
    with pytest.raises(ConfigError, match=r"decode-0: rank 2 has loaded something else than rank 0: weights_version v \(rank 0: w\)"):
        group.start()
    error = stranger.join()
    assert isinstance(error, ConfigError)
    assert "num_blocks 9 (rank 0: 10)" in str(error)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"config": dataclasses.replace(THREE, layout=ParallelLayout(tp_size=3, dcp_combine="ag_rs"))}, "was told the layout"),
        ({"rank": 3}, "this is decode-0 with 3 ranks"),
        ({"rank": 1}, "is here already"),
    ],
    ids=["layout", "number", "twice"],
)
def test_who_is_not_of_the_group_is_refused_and_changes_nothing(group: Group, given: dict[str, object], reason: str) -> None:
    first = group.add(1)
    gathering = threading.Thread(target=group.start, daemon=True)
    gathering.start()
    _wait_for(lambda: 1 in group.lead.pids)
    stranger = group.add(**{"rank": 2, **given})  # type: ignore[arg-type]
    error = stranger.join()
    assert isinstance(error, ConfigError)
    assert reason in str(error)
    group.add(2)
    gathering.join(10)
    assert first.error is None
    assert group.lead._watch is not None


def test_who_does_not_know_the_secret_does_not_join(group: Group) -> None:
    gathering = threading.Thread(target=group.start, daemon=True)
    gathering.start()
    assert isinstance(group.add(1, secret=b"another").join(), PeerLost | AuthenticationFailed)
    group.add(1), group.add(2)
    gathering.join(10)
    assert group.lead._watch is not None


def test_a_rank_that_could_not_load_says_why(group: Group) -> None:
    group.add(2)
    link, _ = _dial_in_background(group)
    with pytest.raises(EngineFault, match="rank 1 of decode-0 could not load: ConfigError: no such file"):
        group.start()
    link.get(timeout=5).close()


def _dial_in_background(group: Group) -> tuple["queue.SimpleQueue[RankLink]", threading.Thread]:
    """Rank 1 joins, and fails where it should load."""
    links: queue.SimpleQueue[RankLink] = queue.SimpleQueue()

    def run() -> None:
        link, _ = dial_rank(SECRET, party(1), *group.lead.address, WIRE, 10)
        join_group(link, 1, THREE, leader_host="127.0.0.1", host="127.0.0.1")
        link.send(encode(Failed("ConfigError: no such file")))
        links.put(link)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return links, thread


def test_terms_are_compared_field_by_field() -> None:
    assert describe_difference(1, TERMS, TERMS) is None
    for item in dataclasses.fields(RankTerms):
        found = dataclasses.replace(TERMS, **{item.name: "other"})  # type: ignore[arg-type]
        assert item.name in (describe_difference(1, found, TERMS) or "")


@pytest.mark.parametrize("message", [Begin(7), Stop(), Loaded(TERMS), Failed("why")])
def test_messages_survive_the_wire(message: Begin) -> None:
    assert decode(encode(message)) == message


def _wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
