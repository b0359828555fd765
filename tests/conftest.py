"""Fixtures of every test: nothing may stay behind, and each test has its own name."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_cuda import FakeCuda

from support import MARK_NAME, enter_own_ipc_namespace, leaves_nothing
from tokenpipe import cuda


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


@pytest.fixture(scope="session")
def _own_ipc_namespace() -> str:
    """Moves this process into a System V namespace of its own; "" or why that cannot be."""
    return enter_own_ipc_namespace()


@pytest.fixture
def queue_limits(_own_ipc_namespace: str) -> Iterator[Callable[[int, int], None]]:
    """Sets kernel.msgmax and kernel.msgmnb, in a namespace that nothing else of the machine is in;
    they start as large as the largest message needs, and go back to the kernel's own defaults."""
    if _own_ipc_namespace:
        pytest.skip(_own_ipc_namespace)

    def set_limits(msgmax: int, msgmnb: int) -> None:
        for name, value in (("msgmax", msgmax), ("msgmnb", msgmnb)):
            Path(f"/proc/sys/kernel/{name}").write_text(str(value))

    set_limits(1 << 20, 1 << 24)
    yield set_limits
    set_limits(8192, 16384)


@pytest.fixture
def unique_name() -> str:
    """A name for a pipeline that no other test or run has."""
    return "t" + secrets.token_hex(8)


@pytest.fixture(scope="session")
def built_fake(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda.build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture
def fake(
    built_fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[FakeCuda]:
    image = tmp_path / "kernels"
    image.write_bytes(b"the fake driver looks at no kernel")
    monkeypatch.setenv("TOKENPIPE_CUDA_LIBRARY", built_fake.library)
    monkeypatch.setattr(cuda, "KERNELS", image)
    built_fake.reset()
    yield built_fake
    built_fake.reset()
    assert built_fake.held_things == 0, "something of the device was not released"
