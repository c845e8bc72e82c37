"""The file that the supervisor writes is read back whole, and a typo in it is not a default."""

from pathlib import Path

import pytest

from kv_transfer.errors import ConfigError
from router.config import GatewayConfig, GatewayProcessConfig, RouterConfig, dump_process_config, load_process_config

CONFIG = GatewayProcessConfig(gateway=GatewayConfig(port=1234, reasoning_fields=("reasoning_content", "reasoning")), router=RouterConfig())


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    path.write_bytes(dump_process_config(CONFIG))
    assert load_process_config(path) == CONFIG


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"gateway": {"prot": 1}, "router": {}}', "gateway:prot: unknown key"),
        ('{"gateway": {}, "router": {}, "x": 1}', ":x: unknown key"),
        ('{"gateway": {"port": "x"}, "router": {}}', "port"),
        ('{"gateway": {}}', "router"),
        ("{", "truncated"),
    ],
)
def test_a_mistake_names_file_and_field(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "gateway.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_process_config(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_file_is_a_mistake_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load_process_config(tmp_path / "none.json")
