"""Tokens wait for a slow client without holding anybody up."""

import asyncio

from kv_transfer.errors import WorkerLost
from kv_transfer.messages import FinishReason, TokenLogprobs
from router.output import Output, Wakeup


def test_tokens_coalesce_until_they_are_taken() -> None:
    output = Output(Wakeup())
    output.put((1, 2), None)
    output.put((3,), FinishReason.STOP)
    assert output.take() == [1, 2, 3]
    assert output.take() == []
    assert (output.finish, output.error) == (FinishReason.STOP, None)


def test_log_probabilities_come_with_their_tokens() -> None:
    output = Output(Wakeup())
    told = [TokenLogprobs(-float(number), 1) for number in range(3)]
    output.put((1, 2), None, told[:2])
    output.put((3,), None, told[2:])
    assert (output.take(), output.take_logprobs(), output.take_logprobs()) == ([1, 2, 3], tuple(told), ())


def test_a_wakeup_is_not_lost_and_does_not_repeat() -> None:
    async def scene() -> None:
        wakeup = Wakeup()
        output = Output(wakeup)
        output.put((1,), None)
        output.put((2,), None)
        await asyncio.wait_for(wakeup.wait(), 1.0)
        waiting = asyncio.ensure_future(wakeup.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        output.end(WorkerLost("gone"))
        await asyncio.wait_for(waiting, 1.0)

    asyncio.run(scene())


def test_a_cancelled_waiter_leaves_the_wakeup_usable() -> None:
    async def scene() -> None:
        wakeup = Wakeup()
        waiting = asyncio.ensure_future(wakeup.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        wakeup.set()
        await asyncio.wait_for(wakeup.wait(), 1.0)

    asyncio.run(scene())
