"""`python -m router.gateway --config FILE`: one gateway process."""

import argparse
import asyncio
import gc
import json
import logging
import logging.config
import sys
from pathlib import Path

import uvloop

from kv_transfer.errors import ConfigError
from router.config import GatewayProcessConfig, load_process_config
from router.gateway.app import Gateway
from router.gateway.server import GatewayServer

logger = logging.getLogger(__name__)


def main() -> int:
    """Run until SIGTERM or SIGINT. Returns the exit code: 2 for a mistake in the configuration."""
    parser = argparse.ArgumentParser(prog="python -m router.gateway", description="The OpenAI-compatible gateway of a GLM cluster.")
    parser.add_argument("--config", type=Path, required=True, help="JSON written by the supervisor: {gateway: {...}, router: {...}}")
    try:
        config = load_process_config(parser.parse_args().config)
        secret = _read_secret(Path(config.gateway.secret_file))
        _set_up_logging(config.gateway.logging_config_file)
        asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_serve(config, secret))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve(config: GatewayProcessConfig, secret: bytes) -> None:
    gateway = Gateway(config, secret)
    logger.info("gateway configured config=%s", config)
    gc.collect()
    gc.freeze()  # vocabulary and template live as long as the process: no later collection need look at them
    await GatewayServer(gateway).serve()


def _read_secret(path: Path) -> bytes:
    try:
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", path=f"{path}:secret_file") from None
    if not secret:
        raise ConfigError("is empty", path=f"{path}:secret_file")
    return secret


def _set_up_logging(config_file: str) -> None:
    if not config_file:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        return
    try:
        logging.config.dictConfig(json.loads(Path(config_file).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot set logging up: {error}", path=config_file) from None


if __name__ == "__main__":
    sys.exit(main())
