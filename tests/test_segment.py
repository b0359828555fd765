"""Shared memory: who may create, attach and remove it, and what is refused instead of misread."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import stat
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

import tokenpipe as tp
from tokenpipe import _native, layout
from tokenpipe.config import PipelineConfig
from tokenpipe.errors import AdoptionError, ExitCode
from tokenpipe.segment import (
    LOCK_CLIENT,
    LOCK_COORDINATOR,
    LOCK_DECODER,
    LOCK_READER,
    LOCK_WRITER,
    Mapping,
    Segment,
    core_name,
    leftovers,
    source_name,
    start_time,
    sweep,
)

SHM = Path("/dev/shm")
KINDS = ("core", "source")
PROLOGUE = """
import sys
from tokenpipe import _native, segment as module
from tokenpipe.config import PipelineConfig
from tokenpipe.segment import *
import tokenpipe as tp
name = sys.argv[1]
def say(*words):
    print(*words, flush=True)
def hear():
    return sys.stdin.readline().strip()
def config():
    return PipelineConfig(name=name, max_num_seqs=4, top_logprobs=2, num_decoders=1, ring_slots=2)
"""


def small(name: str, **more: Any) -> PipelineConfig:
    return PipelineConfig(
        **{
            "name": name,
            "max_num_seqs": 4,
            "top_logprobs": 2,
            "num_decoders": 1,
            "ring_slots": 2,
            **more,
        }
    )


def file_of(name: str, kind: str) -> Path:
    return SHM / (core_name(name) if kind == "core" else source_name(name))


def files_of(name: str) -> set[str]:
    return {kind for kind in KINDS if os.path.lexists(file_of(name, kind))}


@contextlib.contextmanager
def removed_at_the_end(*paths: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


class Other:
    """Another process that runs a few lines. What it writes to stderr fails the test."""

    def __init__(self, name: str, code: str) -> None:
        command = [sys.executable, "-c", PROLOGUE + textwrap.dedent(code), name]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def hear(self) -> str:
        """The next line that it says; empty when it has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def tell(self, text: str = "go on") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> str:
        """Lets it end by itself; returns what it said since."""
        said, errors = self._process.communicate(timeout=60)
        assert (self._process.returncode, errors) == (0, "")
        return said.strip()

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


def creator(name: str) -> Other:
    """A process that has created the segment and holds it until it is told to close or killed."""
    other = Other(
        name,
        """
        with Segment.create(config()) as segment:
            say("created")
            hear()
        """,
    )
    assert other.hear() == "created"
    return other


# --- create, attach, lock, close


def test_what_the_creator_writes_the_attacher_reads(unique_name: str) -> None:
    config = small(unique_name, num_blocks=3)
    with Segment.create(config) as owner:
        assert owner.config == config
        attached = Segment.attach(unique_name)
        assert attached.config == config
        assert attached.core.sizes == attached.source.sizes == config.sizes()
        _native.Book(owner.core, owner.source).set_health_port(4711)
        header = np.frombuffer(attached.core_memory, layout.HEADER, 1)[0]
        assert int(header["health_port"]) == 4711
        assert int(header["owner_pid"]) == os.getpid()
        assert int(header["owner_start"]) == start_time(os.getpid())
        attached.close()
        assert files_of(unique_name) == {"core", "source"}, "only its creator removes it"
    assert files_of(unique_name) == set()


def test_an_engine_maps_the_source_alone(unique_name: str) -> None:
    with Segment.create(small(unique_name)):
        engine = Segment.attach_source(unique_name)
        assert len(engine.source_memory) == small(unique_name).plan()["source_bytes"]
        for part in ("core", "core_memory", "config"):
            with pytest.raises(AssertionError):
                getattr(engine, part)
        engine.close()


def test_both_files_are_for_their_owner_alone(unique_name: str) -> None:
    mask = os.umask(0)  # the mode must not hang on the user's mask
    try:
        with Segment.create(small(unique_name)):
            for kind in KINDS:
                about = file_of(unique_name, kind).lstat()
                assert stat.S_ISREG(about.st_mode)
                assert stat.S_IMODE(about.st_mode) == 0o600
                assert about.st_uid == os.geteuid()
    finally:
        os.umask(mask)


def test_every_page_is_reserved_at_creation(unique_name: str) -> None:
    config = small(unique_name)
    with Segment.create(config):
        for kind in KINDS:
            about = file_of(unique_name, kind).stat()
            assert about.st_size == config.plan()[f"{kind}_bytes"]
            assert about.st_blocks * 512 >= about.st_size


def test_each_party_holds_its_own_lock_while_it_lives(unique_name: str) -> None:
    parties = (LOCK_COORDINATOR, LOCK_READER, LOCK_CLIENT, LOCK_DECODER, LOCK_WRITER)
    with Segment.create(small(unique_name)) as owner:
        for party in parties[1:]:
            attached, second = Segment.attach(unique_name), Segment.attach(unique_name)
            assert not owner.is_locked(party)
            assert attached.lock(party)
            assert owner.is_locked(party)
            assert attached.is_locked(party), "one's own lock counts too"
            others = [p for p in parties[1:] if p != party]
            assert not any(owner.is_locked(p) for p in others)
            assert not second.lock(party)
            second.close()
            assert owner.is_locked(party), "a descriptor that did not take it has been closed"
            attached.close()
            assert not owner.is_locked(party)
        engine = Segment.attach_source(unique_name)
        assert engine.is_locked(LOCK_COORDINATOR)
        engine.close()


def test_has_roles_sees_the_reader_and_every_decoder(unique_name: str) -> None:
    with Segment.create(small(unique_name, num_decoders=3)) as owner:
        for party in (LOCK_READER, LOCK_DECODER, LOCK_DECODER + 2):
            assert not owner.has_roles()
            role = Segment.attach(unique_name)
            assert role.lock(party)
            assert owner.has_roles()
            role.close()


def test_the_kernel_releases_the_lock_of_a_killed_process(unique_name: str) -> None:
    with (
        Segment.create(small(unique_name)) as owner,
        Other(
            unique_name,
            """
        segment = Segment.attach(name)
        say(segment.lock(LOCK_READER))
        hear()
        """,
        ) as reader,
    ):
        assert reader.hear() == "True"
        assert owner.is_locked(LOCK_READER)
        reader.kill()
        assert not owner.is_locked(LOCK_READER)


# --- a name that is taken


def test_a_name_of_a_live_run_is_refused_with_its_pid(unique_name: str) -> None:
    with creator(unique_name) as other:
        with pytest.raises(tp.SegmentExistsError, match=str(other.pid)) as caught:
            Segment.create(small(unique_name))
        error = caught.value
        assert (error.name, error.owner_pid) == (unique_name, other.pid)
        assert error.exit_code == ExitCode.NAME_TAKEN
        assert Segment.attach(unique_name).config.name == unique_name, "it goes on unharmed"
        other.tell()
        other.end()
    assert files_of(unique_name) == set()


def test_another_name_is_another_pipeline(unique_name: str) -> None:
    with Segment.create(small(unique_name)), Segment.create(small(unique_name + ".b")):
        assert files_of(unique_name) == files_of(unique_name + ".b") == {"core", "source"}


# --- what a killed creator left


def test_what_a_killed_creator_left_is_removed_at_the_next_create(unique_name: str) -> None:
    with creator(unique_name) as other:
        other.kill()
    assert files_of(unique_name) == {"core", "source"}
    with pytest.raises(tp.SegmentMissingError):
        Segment.attach(unique_name)
    with Segment.create(small(unique_name, max_num_seqs=9)):
        assert Segment.attach(unique_name).config.max_num_seqs == 9
    assert files_of(unique_name) == set()


def test_sweep_removes_what_is_dead_and_nothing_else(unique_name: str) -> None:
    alive, foreign = unique_name + ".alive", SHM / f"tokenpipe.{unique_name}.notes"
    unrelated = SHM / f"{unique_name}.core"
    with (
        removed_at_the_end(foreign, unrelated),
        creator(unique_name) as dead,
        Segment.create(small(alive)),
    ):
        foreign.write_bytes(b"not ours")
        unrelated.write_bytes(b"not ours")
        dead.kill()
        reported: list[str] = []
        removed = sweep(report=lambda found: reported.append(found.file_name))
        assert removed >= 2, "other runs of this machine may have left something too"
        assert files_of(unique_name) == set()
        assert files_of(alive) == {"core", "source"}
        assert foreign.exists()
        assert unrelated.exists()
        ours = {n for n in reported if unique_name in n}
        assert ours == {f"tokenpipe.{n}.{k}" for n in (unique_name, alive) for k in KINDS}
        assert sweep(unique_name) == 0, "a second sweep finds nothing"


def test_a_segment_lives_while_any_party_of_it_does(unique_name: str) -> None:
    with creator(unique_name) as other:
        role = Segment.attach(unique_name)
        assert role.lock(LOCK_READER)
        other.kill()
        found = {left.file_name: left for left in leftovers(unique_name)}
        assert not found[core_name(unique_name)].is_dead
        assert found[core_name(unique_name)].why == "in use"
        assert not found[source_name(unique_name)].is_dead
        sweep(unique_name)
        assert "core" in files_of(unique_name)
        role.close()
        sweep(unique_name)
        assert files_of(unique_name) == set()


def test_a_source_lives_while_its_core_does(unique_name: str) -> None:
    with creator(unique_name) as other:
        role = Segment.attach(unique_name)
        assert role.lock(LOCK_DECODER), "a decoder holds the core alone"
        other.kill()
        found = {left.file_name: left for left in leftovers(unique_name)}
        source = found[source_name(unique_name)]
        assert (source.is_dead, source.why) == (False, "its core segment is in use")
        assert sweep(unique_name) == 0
        role.close()
        assert sweep(unique_name) == 2


# --- a coordinator's successor


@pytest.mark.parametrize("party", [LOCK_READER, LOCK_CLIENT, LOCK_DECODER])
def test_a_successor_takes_over_what_a_live_party_holds(party: int, unique_name: str) -> None:
    with creator(unique_name) as dead:
        held = Segment.attach(unique_name)
        assert held.lock(party)
        dead.kill()
    free = {"health_host": "::1", "health_port": 4711, "log_level": "debug"}
    with Segment.create_or_adopt(small(unique_name, **free)) as heir:
        assert heir.is_adopted
        assert heir.config == small(unique_name), "the segment's own word stays"
        assert heir.is_locked(LOCK_COORDINATOR)
        for head, memory in (
            (layout.HEADER, held.core_memory),
            (layout.SOURCE, held.source_memory),
        ):
            found = np.frombuffer(memory, head, 1)[0]
            assert int(found["owner_pid"]) == os.getpid(), "the same memory, with its new owner"
            assert int(found["owner_start"]) == start_time(os.getpid())
        Segment.attach(unique_name).close()
        with pytest.raises(tp.SegmentExistsError, match=str(os.getpid())):
            Segment.create_or_adopt(small(unique_name))
        held.close()
    assert files_of(unique_name) == set(), "the heir removes it as its creator would have"


def test_a_successor_with_another_configuration_is_refused_and_harms_nothing(
    unique_name: str,
) -> None:
    with creator(unique_name) as dead:
        held = Segment.attach(unique_name)
        assert held.lock(LOCK_CLIENT)
        dead.kill()
    gc.collect()  # of the tests before
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(AdoptionError, match="max_num_seqs, orphan_grace_s") as caught:
        Segment.create_or_adopt(small(unique_name, max_num_seqs=9, orphan_grace_s=1.0))
    assert caught.value.fields == ["max_num_seqs", "orphan_grace_s"]
    assert caught.value.exit_code == ExitCode.NAME_TAKEN
    del caught  # its traceback holds the mappings
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before
    assert not held.is_locked(LOCK_COORDINATOR)
    with Segment.create_or_adopt(small(unique_name)) as heir:
        assert heir.is_adopted
        held.close()


def test_where_nobody_is_left_there_is_nothing_to_take_over(unique_name: str) -> None:
    with creator(unique_name) as dead:
        dead.kill()
    with Segment.create_or_adopt(small(unique_name, max_num_seqs=9)) as made:
        assert not made.is_adopted
        assert Segment.attach(unique_name).config.max_num_seqs == 9
    assert files_of(unique_name) == set()


def test_a_live_coordinator_is_not_taken_over(unique_name: str) -> None:
    with creator(unique_name) as other:
        with pytest.raises(tp.SegmentExistsError) as caught:
            Segment.create_or_adopt(small(unique_name))
        assert caught.value.owner_pid == other.pid
        Segment.attach(unique_name).close()
        other.tell()
        other.end()


# --- what is in the making


CREATOR_IN_THE_MAKING = """
real = _native.format_core
def format_core(*args):
    say("between")
    hear()
    real(*args)
_native.format_core = format_core
with Segment.create(config()):
    say("ready")
    hear()
"""


# The core has its name by then, the source not yet.
CREATOR_BETWEEN_THE_NAMES = """
real = Mapping.publish
def publish(self):
    if self.file_name.endswith(".source"):
        say("between")
        hear()
    real(self)
Mapping.publish = publish
with Segment.create(config()):
    say("ready")
    hear()
"""


def test_a_file_that_nobody_holds_is_dead_whatever_its_age(unique_name: str) -> None:
    path = file_of(unique_name, "core")
    with removed_at_the_end(path):
        # No creator of ours: its file has no name before its lock.
        path.write_bytes(struct.pack("<Q", _native.CORE_MAGIC).ljust(8192, b"\0"))
        (found,) = leftovers(unique_name)
        assert (found.is_dead, found.why) == (True, "no process holds it")
        assert found.num_bytes == 8192
        assert sweep(unique_name) == 1
        assert files_of(unique_name) == set()


def test_a_segment_in_the_making_has_no_name(unique_name: str) -> None:
    with Other(unique_name, CREATOR_IN_THE_MAKING) as maker:
        assert maker.hear() == "between"
        assert files_of(unique_name) == set(), "a name is always that of a complete segment"
        assert sweep(unique_name) == 0
        maker.tell()
        assert maker.hear() == "ready"
        Segment.attach(unique_name).close()
        maker.tell()
        maker.end()


def test_a_sweep_leaves_what_a_live_creator_is_making(unique_name: str) -> None:
    with Other(unique_name, CREATOR_BETWEEN_THE_NAMES) as maker:
        assert maker.hear() == "between"
        assert files_of(unique_name) == {"core"}
        os.utime(file_of(unique_name, "core"), (0, 0))  # also when making it takes long
        (found,) = leftovers(unique_name)
        assert (found.is_dead, found.why) == (False, "in use")
        assert sweep(unique_name) == 0
        with pytest.raises(tp.SegmentExistsError) as caught:
            Segment.create(small(unique_name))
        assert caught.value.owner_pid == maker.pid
        with pytest.raises(tp.SegmentMissingError):
            Segment.attach(unique_name)
        maker.tell()
        assert maker.hear() == "ready"
        Segment.attach(unique_name).close()
        maker.tell()
        maker.end()


@pytest.mark.parametrize(
    ("code", "left"), [(CREATOR_IN_THE_MAKING, set()), (CREATOR_BETWEEN_THE_NAMES, {"core"})]
)
def test_a_creator_killed_before_it_was_ready_does_not_block_the_name(
    code: str, left: set[str], unique_name: str
) -> None:
    with (
        removed_at_the_end(*(file_of(unique_name, kind) for kind in KINDS)),
        Other(unique_name, code) as maker,
    ):
        assert maker.hear() == "between"
        maker.kill()
        assert files_of(unique_name) == left
        with Segment.create(small(unique_name)):
            Segment.attach(unique_name).close()
        assert files_of(unique_name) == set()


def test_of_two_creators_over_a_dead_run_one_wins_and_keeps_its_files(
    unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with creator(unique_name) as dead:
        dead.kill()
    config, rivals = small(unique_name), list[Segment]()
    remove = posix_ipc.unlink_shared_memory

    def remove_after_a_rival(file_name: str) -> None:
        """The rival's whole create() falls between our look and our unlink."""
        if unique_name in file_name:
            monkeypatch.setattr(posix_ipc, "unlink_shared_memory", remove)
            with contextlib.suppress(tp.SegmentError):
                rivals.append(Segment.create(config))
        remove(file_name)

    monkeypatch.setattr(posix_ipc, "unlink_shared_memory", remove_after_a_rival)
    winners: list[Segment] = []
    with contextlib.suppress(tp.SegmentExistsError):
        winners.append(Segment.create(config))
    winners += rivals
    try:
        assert len(winners) == 1, "two runs of one name at once"
        assert files_of(unique_name) == {"core", "source"}, "a live run has lost its files"
        Segment.attach(unique_name).close()
    finally:
        for winner in winners:
            winner.close()
    assert files_of(unique_name) == set()


def test_many_creators_at_once_leave_one(unique_name: str) -> None:
    with contextlib.ExitStack() as stack:
        others = [
            stack.enter_context(
                Other(
                    unique_name,
                    """
                    say("here")
                    hear()
                    try:
                        with Segment.create(config()):
                            say("won")
                            hear()
                    except tp.SegmentExistsError as e:
                        say("lost", e.owner_pid)
                    """,
                )
            )
            for _ in range(4)
        ]
        assert {other.hear() for other in others} == {"here"}
        for other in others:
            other.tell()
        said = {other.pid: other.hear() for other in others}
        assert sorted(text.split()[0] for text in said.values()) == ["lost", "lost", "lost", "won"]
        winner = next(pid for pid, text in said.items() if text == "won")
        assert {int(t.split()[1]) for t in said.values() if t != "won"} == {winner}
        for other in others:
            if other.pid == winner:
                other.tell()
            other.end()


# --- attach waits


def test_attach_without_a_pipeline_says_what_it_has_waited(unique_name: str) -> None:
    for attach in (Segment.attach, Segment.attach_source):
        with pytest.raises(tp.SegmentMissingError, match=r"within 0\.05 s") as caught:
            attach(unique_name, 0.05)
        assert (caught.value.name, caught.value.waited_s) == (unique_name, 0.05)
        assert caught.value.exit_code == ExitCode.NOT_FOUND


def test_attachers_wait_while_the_creator_is_not_ready(unique_name: str) -> None:
    attacher = """
    first = True
    def look_again(seconds, real=module.time.sleep):
        global first
        if first:
            first = False
            say("waits")
        real(seconds)
    module.time.sleep = look_again
    say(Segment.attach(name, 60).config == config())
    """
    engine_code = "say(Segment.attach_source(name, 60).source.sizes == config().sizes())"
    with contextlib.ExitStack() as stack:
        early = stack.enter_context(Other(unique_name, attacher))
        assert early.hear() == "waits", "there is no file yet"
        maker = stack.enter_context(Other(unique_name, CREATOR_IN_THE_MAKING))
        assert maker.hear() == "between"
        late = [stack.enter_context(Other(unique_name, attacher)) for _ in range(2)]
        assert [other.hear() for other in late] == ["waits", "waits"]
        assert len(select_said([early, *late])) == 0, "nobody attaches to a half-made segment"
        maker.tell()
        assert maker.hear() == "ready"
        engine = stack.enter_context(Other(unique_name, engine_code))
        assert [other.hear() for other in (early, *late, engine)] == ["True"] * 4
        for other in (early, *late, engine):
            other.end()
        maker.tell()
        maker.end()


def select_said(others: list[Other]) -> list[int]:
    """The pids of those that have said something which nobody has read yet."""
    import select

    streams = {other._process.stdout.fileno(): other.pid for other in others}  # type: ignore[union-attr]
    readable, _, _ = select.select(list(streams), [], [], 0)
    return [streams[fd] for fd in readable]


# --- what is not ours, or not right


def write(offset: int, data: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return damage


def cut(num_bytes: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, num_bytes)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 4096)


def offset_of(kind: str, field: str) -> int:
    head = layout.HEADER if kind == "core" else layout.SOURCE
    assert head.fields is not None
    return int(head.fields[field][1])


def size_field(kind: str, field: str, value: int) -> Callable[[Path], None]:
    sizes = layout.DTYPES["SIZES"].fields
    assert sizes is not None
    return write(offset_of(kind, "sizes") + sizes[field][1], struct.pack("<I", value))


def config_text(text: bytes) -> Callable[[Path], None]:
    return write(_native.CONFIG_OFFSET, text.ljust(_native.CONFIG_BYTES, b"\0"))


DAMAGES: list[tuple[str, str, Callable[[Path], None], type[tp.SegmentError]]] = [
    (f"{kind}: {what}", kind, damage, error)
    for kind in KINDS
    for what, damage, error in [
        ("an older version", write(8, struct.pack("<Q", 2**40)), tp.LayoutMismatchError),
        ("a wrong magic", write(0, b"\x7fELF\2\1\1\0"), tp.LayoutMismatchError),
        ("garbage", write(0, b"\xa5" * 512), tp.LayoutMismatchError),
        ("all zero", write(0, bytes(4096)), tp.SegmentMissingError),
        ("cut to nothing", cut(0), tp.SegmentMissingError),
        ("cut to a few bytes", cut(100), tp.SegmentMissingError),
        ("cut inside the header", cut(600), tp.LayoutMismatchError),
        ("cut behind the header", cut(4096), tp.LayoutMismatchError),
        ("a page too long", lengthen, tp.LayoutMismatchError),
        ("no rows", size_field(kind, "max_num_seqs", 0), tp.LayoutMismatchError),
        ("too many rows", size_field(kind, "max_num_seqs", 2**32 - 1), tp.LayoutMismatchError),
        ("more rows", size_field(kind, "max_num_seqs", 400), tp.LayoutMismatchError),
        ("a ring of 3 slots", size_field(kind, "ring_slots", 3), tp.LayoutMismatchError),
        ("no decoders", size_field(kind, "num_decoders", 0), tp.LayoutMismatchError),
        ("too many decoders", size_field(kind, "num_decoders", 17), tp.LayoutMismatchError),
        (
            "vectors of no plan",
            size_field(kind, "max_pooling_floats", 2**31),
            tp.LayoutMismatchError,
        ),
        ("huge drafts", size_field(kind, "max_draft_tokens", 2**31), tp.LayoutMismatchError),
    ]
] + [
    (f"core: a configuration of {what}", "core", config_text(text), tp.LayoutMismatchError)
    for what, text in [
        ("nothing", b""),
        ("no JSON", b"{"),
        ("a list", b"[]"),
        ("a number", b"5"),
        ("many brackets", b"[" * (_native.CONFIG_BYTES - 1)),
        ("no text", b"\xff\xfe\xfd"),
        ("an unknown field", b'{"no_such_field": 1}'),
        ("a bad value", b'{"name": "x", "ring_slots": 3}'),
        ("a wrong type", b'{"name": "x", "ring_slots": [2]}'),
        ("other sizes", PipelineConfig(max_num_seqs=64, num_decoders=2).to_json().encode()),
    ]
]


@pytest.mark.parametrize(
    ("kind", "damage", "error"),
    [pytest.param(*entry[1:], id=entry[0]) for entry in DAMAGES],
)
def test_a_damaged_segment_is_refused_by_a_typed_error(
    kind: str, damage: Callable[[Path], None], error: type[tp.SegmentError], unique_name: str
) -> None:
    with Segment.create(small(unique_name)):
        damage(file_of(unique_name, kind))
        with pytest.raises(error) as caught:
            Segment.attach(unique_name)
        assert caught.value.name == unique_name
        assert caught.value.exit_code == ExitCode.NOT_FOUND
        if kind == "source":
            with pytest.raises(error):
                Segment.attach_source(unique_name)
        else:
            Segment.attach_source(unique_name).close()


def test_another_version_is_named_beside_ours(unique_name: str) -> None:
    with Segment.create(small(unique_name)):
        write(8, struct.pack("<Q", 77))(file_of(unique_name, "core"))
        with pytest.raises(tp.LayoutMismatchError, match=r"found layout 77, this build") as caught:
            Segment.attach(unique_name)
        assert caught.value.found == "layout 77"
        assert caught.value.expected == f"layout {_native.LAYOUT_VERSION}"


def test_core_and_source_of_different_runs_are_not_taken_for_one(unique_name: str) -> None:
    other = unique_name + ".b"
    with Segment.create(small(unique_name)), Segment.create(small(other, max_num_seqs=64)):
        source = file_of(unique_name, "source")
        kept = source.with_suffix(".kept")
        with removed_at_the_end(kept):
            source.rename(kept)
            os.link(file_of(other, "source"), source)
            try:
                with pytest.raises(tp.LayoutMismatchError):
                    Segment.attach(unique_name)
            finally:
                source.unlink()
                kept.rename(source)


def test_a_refused_attach_leaves_no_descriptor_open(unique_name: str) -> None:
    with Segment.create(small(unique_name)):
        write(0, b"\x7fELF\2\1\1\0")(file_of(unique_name, "source"))
        before = set(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(tp.LayoutMismatchError):
                Segment.attach(unique_name)
            with pytest.raises(tp.LayoutMismatchError):
                Segment.attach_source(unique_name)
        assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["a file", "nothing"])
def test_a_symlink_of_that_name_is_never_followed(
    kind: str, target: str, unique_name: str, tmp_path: Path
) -> None:
    victim, link = tmp_path / "victim", file_of(unique_name, kind)
    if target == "a file":
        victim.write_bytes(b"precious" * 1024)
    link.symlink_to(victim)
    with removed_at_the_end(link):
        with pytest.raises(tp.SegmentError):
            Segment.create(small(unique_name))
        assert sweep(unique_name) == 0
        assert link.is_symlink(), "it is not ours to remove"
        assert files_of(unique_name) == {kind}, "nothing of ours is left"
        for attach in (Segment.attach, Segment.attach_source):
            with pytest.raises(tp.SegmentError):
                attach(unique_name)
        assert victim.exists() == (target == "a file")
        assert target == "nothing" or victim.read_bytes() == b"precious" * 1024


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["directory", "fifo"])
def test_what_is_no_file_is_never_used(kind: str, what: str, unique_name: str) -> None:
    path = file_of(unique_name, kind)
    path.mkdir(0o700) if what == "directory" else os.mkfifo(path, 0o600)
    with removed_at_the_end(path):
        with pytest.raises(tp.SegmentError):
            Segment.create(small(unique_name))
        for attach in (Segment.attach, Segment.attach_source):
            with pytest.raises(tp.SegmentError):
                attach(unique_name)
        assert sweep(unique_name) == 0
        assert files_of(unique_name) == {kind}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_user_is_never_used(kind: str, unique_name: str) -> None:
    with Segment.create(small(unique_name)) as owner:
        path = file_of(unique_name, kind)
        os.chown(path, 12345, -1)
        with pytest.raises(tp.SegmentError, match="belongs to uid 12345"):
            Segment.attach(unique_name)
        owner.close()
    path.write_bytes(b"theirs" * 1000)
    os.chown(path, 12345, -1)
    with removed_at_the_end(path):
        found = next(leftovers(unique_name))
        assert (found.is_dead, found.why) == (False, "belongs to uid 12345")
        assert sweep(unique_name) == 0
        with pytest.raises(tp.SegmentError):
            Segment.create(small(unique_name))
        assert path.read_bytes() == b"theirs" * 1000
        assert files_of(unique_name) == {kind}


# --- space


def too_large(name: str) -> PipelineConfig:
    about = os.statvfs(SHM)
    total = about.f_blocks * about.f_frsize
    if total == 0:
        pytest.skip("/dev/shm has no limit here")
    config = small(name, max_num_seqs=4096, top_logprobs=100)
    slots = 2
    while slots * config.plan()["slot_bytes"] <= total and slots < 65536:
        slots *= 2
    config = small(name, max_num_seqs=4096, top_logprobs=100, ring_slots=slots)
    if config.plan()["core_bytes"] <= total:
        pytest.skip("no configuration is larger than this /dev/shm")
    return config


def test_a_ring_larger_than_dev_shm_is_refused_with_the_numbers(unique_name: str) -> None:
    config = too_large(unique_name)
    with pytest.raises(tp.SegmentSpaceError, match="--ring-slots") as caught:
        Segment.create(config)
    error, about = caught.value, os.statvfs(SHM)
    assert error.needed_bytes == config.plan()["core_bytes"]
    assert 0 < error.free_bytes <= about.f_blocks * about.f_frsize < error.needed_bytes
    assert f"{error.needed_bytes} bytes are needed" in str(error)
    assert f"{error.free_bytes} are free" in str(error)
    assert error.exit_code == ExitCode.NO_SPACE
    assert files_of(unique_name) == set()
    with Segment.create(small(unique_name)):
        pass  # the next one works


def own_dev_shm(num_bytes: int) -> list[str]:
    """The command that runs another one with a /dev/shm of its own."""
    script = f'mount -t tmpfs -o size={num_bytes} none /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


def can_unshare() -> bool:
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    return subprocess.run([*own_dev_shm(65536), "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="no mount namespaces here")
@pytest.mark.parametrize("fitting", ["nothing", "core"])
def test_a_small_dev_shm_fails_at_the_start_and_not_later(fitting: str, unique_name: str) -> None:
    plan = small(unique_name).plan()
    size = plan["core_bytes"] // 2 if fitting == "nothing" else plan["core_bytes"] + 4096
    code = """
    import os
    try:
        Segment.create(config())
    except tp.SegmentSpaceError as e:
        say(e.needed_bytes, e.free_bytes, os.listdir("/dev/shm"))
    """
    command = [*own_dev_shm(size), sys.executable, "-c", PROLOGUE + textwrap.dedent(code)]
    told = subprocess.run([*command, unique_name], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")
    needed = plan["core_bytes"] if fitting == "nothing" else plan["source_bytes"]
    free = -(-size // 4096) * 4096 if fitting == "nothing" else 4096
    assert told.stdout.split() == [str(needed), str(free), "[]"]


def test_another_error_of_the_system_leaves_nothing(
    unique_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_luck(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EIO, "broken")

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_luck)
        with pytest.raises(OSError, match="broken"):
            Segment.create(small(unique_name))
    assert files_of(unique_name) == set()
    assert set(os.listdir("/proc/self/fd")) == before


# --- nobody else removes it


def test_no_process_that_ends_takes_a_live_segment_with_it(unique_name: str) -> None:
    """Python's own shared_memory does, through its resource tracker, and says so on stderr."""
    with Segment.create(small(unique_name)) as owner:
        code = "Segment.attach(name); say('attached'); hear()"
        with Other(unique_name, code) as ends, Other(unique_name, code) as dies:
            assert ends.hear() == dies.hear() == "attached"
            ends.tell()
            assert ends.end() == ""
            dies.kill()
            assert dies._process.stderr is not None
            assert dies._process.stderr.read() == ""
        assert files_of(unique_name) == {"core", "source"}
        assert len(owner.core_memory) == file_of(unique_name, "core").stat().st_size


def test_a_creator_that_ends_says_nothing_on_stderr(unique_name: str) -> None:
    with creator(unique_name) as other:
        other.tell()
        assert other.end() == "", "end() also looks at stderr"
    assert files_of(unique_name) == set()


def test_a_creator_that_is_told_to_stop_by_an_exception_removes_its_files(
    unique_name: str,
) -> None:
    with pytest.raises(ZeroDivisionError), Segment.create(small(unique_name)):
        _ = 1 / 0
    assert files_of(unique_name) == set()


def test_closing_twice_is_harmless_also_when_the_name_has_a_new_owner(unique_name: str) -> None:
    first = Segment.create(small(unique_name))
    first.close()
    with Segment.create(small(unique_name)):
        first.close()
        assert files_of(unique_name) == {"core", "source"}


def test_memory_stays_readable_while_a_view_of_it_lives(unique_name: str) -> None:
    segment = Segment.create(small(unique_name))
    header = np.frombuffer(segment.core_memory, layout.HEADER, 1)[0]
    segment.close()
    assert int(header["magic"]) == _native.CORE_MAGIC


def test_a_process_that_has_ended_has_no_start_time(unique_name: str) -> None:
    with Other(unique_name, "say('here'); hear()") as other:
        assert other.hear() == "here"
        begun = start_time(other.pid)
        assert begun is not None
        assert begun >= (start_time(os.getpid()) or 0)
        other.kill()
    assert start_time(other.pid) != begun


def test_a_mapping_without_its_file_still_reads_its_words(unique_name: str) -> None:
    with Segment.create(small(unique_name)):
        mapping = Mapping.open(core_name(unique_name))
        assert mapping.word(0) == _native.CORE_MAGIC
        mapping.close()
        mapping.close()
        assert mapping.word(8) == _native.LAYOUT_VERSION
