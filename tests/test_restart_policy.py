"""Restart policy: a start is tried once, a replacement three times, and the first error of a role
that dies is told wherever its reader looks: stderr of `serve`, /health, the owner's exception."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from test_supervision import SERVE, files_of, get, request, serve

import tokenpipe as tp
from support import wait_until

MARKER = "X-marker"
ROLES = ("reader", "decoder-1")
Patch = Callable[[str, str], Path]


@pytest.fixture
def in_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Patch:
    """Runs code in one role's interpreter before it does anything, and notes each start of it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def patch(role: str, code: str) -> Path:
        starts = tmp_path / "starts"
        starts.touch()
        (tmp_path / "sitecustomize.py").write_text(
            "import os, signal, sys\n"
            f"if {role!r} in sys.orig_argv:\n"
            f"    with open({str(starts)!r}, 'a') as f: f.write('start\\n')\n"
            f"    {code}\n"
        )
        return starts

    return patch


def run_serve(name: str) -> subprocess.CompletedProcess[str]:
    """Runs a `serve` that is to end by itself."""
    command = [*SERVE, "--name", name, "--num-decoders=2"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def num_starts(starts: Path) -> int:
    return len(starts.read_text().splitlines())


def raising_turn(trigger: Path) -> str:
    """The role's loop raises while the file is there: every role's loop asks for its lifeline."""
    return (
        "import tokenpipe.lifeline as module; is_cut = module.Lifeline.is_cut\n"
        "    def look(self):\n"
        f"        if os.path.exists({str(trigger)!r}): raise ValueError({MARKER!r})\n"
        "        return is_cut(self)\n"
        "    module.Lifeline.is_cut = look"
    )


def raising_start(role: str) -> str:
    kind = role.partition("-")[0]
    return (
        f"import tokenpipe.{kind} as module\n"
        f"    def run(*arguments): raise ValueError({MARKER!r})\n"
        "    module.run = run"
    )


@pytest.mark.parametrize("role", ROLES)
def test_the_error_of_a_start_is_told_by_serve_and_by_the_owner(
    unique_name: str, role: str, in_role: Patch
) -> None:
    """B36: the last lines hold the cause and the role; B35: exit code 6, tried once."""
    starts = in_role(role, raising_start(role))
    ended = run_serve(unique_name)
    assert ended.returncode == tp.ExitCode.BOOT_FAILED == 6
    assert ended.stdout == ""
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"tokenpipe serve: start {role} (pid ")
    assert f"ended with exit code 1: ValueError: {MARKER} before its first heartbeat" in last
    assert num_starts(starts) == 1
    with pytest.raises(tp.ChildBootError, match=f"start {role} .*ValueError: {MARKER}") as raised:
        tp.Pipeline(tp.PipelineConfig(name=unique_name, num_decoders=2))
    assert raised.value.role == role
    assert num_starts(starts) == 2
    assert files_of(unique_name) == []


@pytest.mark.parametrize("role", [pytest.param("reader", marks=pytest.mark.full), "decoder-1"])
@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("os._exit(3)", "ended with exit code 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "ended with exit code 0"),
    ],
    ids=["exit", "SIGKILL", "SIGTERM"],
)
def test_a_role_that_ends_in_the_middle_of_its_start_fails_the_start_once(
    unique_name: str, role: str, end: str, how: str, in_role: Patch
) -> None:
    """B35: role, pid and how it ended; the others, which were half way up, are gone too."""
    # It has attached and holds its lock: the last moment before the first heartbeat.
    starts = in_role(
        role,
        f"import tokenpipe._native as module\n    module.announce_role = lambda *a: {end}",
    )
    ended = run_serve(unique_name)
    assert ended.returncode == tp.ExitCode.BOOT_FAILED
    assert f"{how} before its first heartbeat" in ended.stderr.splitlines()[-1]
    assert num_starts(starts) == 1
    assert files_of(unique_name) == []


@pytest.mark.parametrize(
    "place",
    ["module.Segment.create_or_adopt", "module.Coordinator._set_state"],
    ids=["at once", "with its segments"],
)
def test_a_coordinator_that_is_killed_in_the_middle_of_the_start_is_not_tried_again(
    unique_name: str, place: str, in_role: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B35: before anything is made, and with its segments and its endpoint there."""
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    in_role("serve", f"import tokenpipe.coordinator as module; {place} = lambda *a: {kill}")
    config = tp.PipelineConfig(name=unique_name, num_decoders=2, orphan_grace_s=0.1)
    with pytest.raises(tp.PipelineStartError, match="the coordinator was killed by SIGKILL"):
        tp.Pipeline(config)
    monkeypatch.delenv("PYTHONPATH")
    with tp.Pipeline(config) as pipe:  # what is left of it, roles included, does not block the next
        assert pipe.health()["state"] == "idle"


def test_a_stop_in_the_middle_of_the_start_ends_it_in_order(
    unique_name: str, in_role: Patch
) -> None:
    starts = in_role("reader", "signal.pause()")
    process = subprocess.Popen(
        [*SERVE, "--name", unique_name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: num_starts(starts) == 1)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate()
    assert (process.returncode, output) == (0, ""), errors
    assert files_of(unique_name) == []


@pytest.mark.parametrize("role", ["reader", pytest.param("decoder-1", marks=pytest.mark.full)])
def test_the_error_of_a_running_role_is_told_while_it_is_replaced_and_when_it_is_not(
    unique_name: str, role: str, in_role: Patch, tmp_path: Path
) -> None:
    """B36, B42: in /health while degraded; then in the failure, its exit code and its last line."""
    trigger = tmp_path / "raise"
    in_role(role, raising_turn(trigger))
    flags = ("--max-restarts=3", "--restart-backoff-s=0.3")
    with (
        serve(unique_name, *flags) as (process, ready),
        tp.Pipeline.attach(unique_name) as pipe,
    ):
        pipe.submit(request("a"))
        url = ready["health_url"]
        first = ready["pids"][role]
        trigger.touch()
        code, body = wait_until(lambda: (a := get(url))[1]["state"] == "degraded" and a)
        trigger.unlink()
        assert (code, body["role"]) == (503, role)
        assert f"ended with exit code 1: ValueError: {MARKER}" in body["reason"]
        wait_until(lambda: get(url) == (200, get(url)[1]) and pipe.pids[role] != first)
        trigger.touch()  # for good
        body = wait_until(lambda: (a := pipe.health())["state"] == "failed" and a, timeout_s=60)
        assert body["role"] == role
        why = rf"{role} \(pid \d+\) ended with exit code 1: ValueError: {MARKER}; 3 restarts"
        [final] = [o for batch in pipe.batches(timeout_s=30) for o in batch if o.finished]
        assert final.finish_reason == "error"
        with pytest.raises(tp.PipelineGoneError, match=why):
            pipe.submit(request("b"))
        _, errors = process.communicate(timeout=60)
        assert process.returncode == tp.ExitCode.ROLE_LOST
        last = errors.splitlines()[-1]
        assert role in last
        assert MARKER in last


def test_a_replacement_that_does_not_come_up_is_tried_three_times(
    unique_name: str, in_role: Patch, tmp_path: Path
) -> None:
    """B35, B42: a start that fails is not retried for ever, also long before the budget is
    spent."""
    broken = tmp_path / "broken"
    starts = in_role("decoder-1", f"if os.path.exists({str(broken)!r}): sys.exit('{MARKER}')")
    with serve(unique_name, "--restart-backoff-s=0") as (process, ready):
        broken.touch()
        os.kill(ready["pids"]["decoder-1"], signal.SIGKILL)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == tp.ExitCode.BOOT_FAILED
    assert num_starts(starts) == 1 + 3
    assert "start decoder-1" in errors.splitlines()[-1]
    assert MARKER in errors
    assert files_of(unique_name) == []


def test_an_unforeseen_error_of_the_coordinators_start_reaches_the_owner(
    unique_name: str, in_role: Patch
) -> None:
    """B36: the coordinator's own error is not lost in a log either."""
    in_role(
        "serve",
        "import tokenpipe.health as module\n"
        f"    def refuse(*arguments): raise ValueError({MARKER!r})\n"
        "    module.Exporter = refuse",
    )
    with pytest.raises(tp.PipelineStartError, match=f"ValueError: {MARKER}"):
        tp.Pipeline(tp.PipelineConfig(name=unique_name))
    assert files_of(unique_name) == []
