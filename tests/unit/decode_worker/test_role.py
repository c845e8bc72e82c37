"""The decode role's own decisions, with a real transfer thread over the loopback."""

import asyncio
from typing import Any

from decode_worker.config import DecodeConfig
from decode_worker.role import DecodeRole
from glm_runtime.engine.worker_config import WorkerNetwork
from kv_transfer.block_pool import Holder, HolderKind
from kv_transfer.transports.loopback import LoopbackFabric, LoopbackTransport
from tests.fakes.toy_model import make_toy_model
from tests.unit.decode_worker.test_pairs import SINK, Side


def test_a_worker_whose_blocks_are_quarantined_drains_once_to_start_again() -> None:
    async def script() -> None:
        fabric = LoopbackFabric()
        outside = Side(SINK, fabric)
        model = make_toy_model(num_blocks=10, max_step_tokens=16, incarnation=SINK.incarnation)
        transport = LoopbackTransport(fabric, SINK.peer_id, model.memory)
        role: Any = DecodeRole(model, outside, SINK, DecodeConfig(), WorkerNetwork(), transport)
        role.tick(0.0)
        assert outside.drains == 0
        model.pool.allocate(1, Holder(HolderKind.QUARANTINE, "p0@1"))
        role.tick(0.1)
        role.tick(0.2)
        assert outside.drains == 1
        await role.close()
        await outside.transfers.close()

    asyncio.run(script())
