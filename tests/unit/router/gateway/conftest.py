"""The shipped checkpoint's tokenizer, loaded once."""

from pathlib import Path

import pytest

from router.gateway.tokenizer import TextTokenizer

TINY = Path(__file__).parent.parent.parent.parent.parent / "glm_runtime" / "tiny"


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(TINY)
