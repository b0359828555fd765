"""Fixtures of every test: nothing may stay behind, and each test has its own name."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from support import MARK_NAME, leaves_nothing


@pytest.fixture(scope="session", autouse=True)
def _run_leaves_nothing() -> Iterator[None]:
    """Marks every process that this run starts, so that an orphan is found too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK_NAME, secrets.token_hex(8))
        with leaves_nothing("the test run"):
            yield


@pytest.fixture(autouse=True)
def _test_leaves_nothing(
    _run_leaves_nothing: None, request: pytest.FixtureRequest
) -> Iterator[None]:
    # Set up before the test's own fixtures, so it looks after they have been torn down.
    with leaves_nothing(request.node.nodeid):
        yield


@pytest.fixture
def unique_name() -> str:
    """A name for a pipeline that no other test or run has."""
    return "t" + secrets.token_hex(8)
