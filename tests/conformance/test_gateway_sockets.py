"""Accepted HTTP sockets do not wait for delayed ACKs, and the gateway imports nothing heavy."""

import asyncio
import socket
import subprocess
import sys
import threading

import uvloop

from router.config import GatewayConfig, GatewayProcessConfig, RouterConfig
from router.gateway.app import Gateway
from router.gateway.server import GatewayServer
from tests.fakes.gateway_process import TINY, wait_for


def test_tcp_nodelay_is_set_on_accepted_sockets() -> None:
    """sglang-router 0.3.2 and Dynamo 1.6.1 miss it: +43 ms to the first token with common clients."""
    config = GatewayProcessConfig(gateway=GatewayConfig(tokenizer_dir=str(TINY), directory_port=1), router=RouterConfig())
    listener = socket.create_server(("127.0.0.1", 0))
    started = threading.Event()
    servers: list[GatewayServer] = []

    async def serve() -> None:
        servers.append(GatewayServer(Gateway(config, b"secret")))
        started.set()
        await servers[0].serve(sockets=[listener])

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        thread = threading.Thread(target=lambda: runner.run(serve()))
        thread.start()
        started.wait(10)
        with socket.create_connection(listener.getsockname()):
            wait_for(lambda: servers[0].server_state.connections)
            (connection,) = servers[0].server_state.connections
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        servers[0].should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def test_nothing_heavy_is_imported() -> None:
    program = "import sys, router.gateway.app, router.gateway.server, router.gateway.__main__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "ray", "nixl", "numpy", "triton", "transformers", "glm_runtime", "prefill_worker", "decode_worker", "cluster"}
    assert not {name.split(".")[0] for name in loaded} & heavy
