"""What a start that takes minutes writes to the log."""

import logging

import pytest

from glm_runtime.engine.loaded_model import WORTH_LOGGING_BYTES, LoggedLoading


def test_a_long_load_logs_every_tenth_once(caplog: pytest.LogCaptureFixture) -> None:
    loading = LoggedLoading()
    with caplog.at_level(logging.INFO):
        for read in range(1001):
            loading.report(read * WORTH_LOGGING_BYTES // 1000, WORTH_LOGGING_BYTES)
    assert [record.getMessage().split()[2] for record in caplog.records] == [f"percent={percent}" for percent in range(10, 101, 10)]


def test_a_short_load_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LoggedLoading().report(1000, 1000)
    assert not caplog.records
