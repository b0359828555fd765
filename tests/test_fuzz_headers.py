"""Files of our names in /dev/shm that are not what we wrote: attach, start, inspect and clean
refuse in plain words, and delete nothing that is not provably ours and dead."""

from __future__ import annotations

import io
import os
import random
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hostile import odd_value, seeded

import tokenpipe as tp
from support import wait_until
from tokenpipe import _native, cli, layout
from tokenpipe.segment import Segment, core_name, leftovers, source_name, sweep
from tokenpipe.status import status_of

SHM = Path("/dev/shm")
KINDS = ("core", "source")
SIZES = layout.DTYPES["SIZES"]


def small(name: str, **more: Any) -> tp.PipelineConfig:
    return tp.PipelineConfig(
        name=name, max_num_seqs=4, top_logprobs=2, num_decoders=1, ring_slots=2, **more
    )


def path_of(name: str, kind: str) -> Path:
    return SHM / (core_name(name) if kind == "core" else source_name(name))


@contextmanager
def removed_at_the_end(*paths: Path) -> Iterator[None]:
    try:
        yield
    finally:
        for path in paths:
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


def spoil(rng: random.Random, memory: memoryview, kind: str) -> str:
    """Changes one thing of a header; returns what."""
    head = layout.HEADER if kind == "core" else layout.SOURCE
    fields: dict[str, tuple[int, int]] = {
        name: (at, dtype.itemsize) for name, (dtype, at, *_) in (head.fields or {}).items()
    }
    begin = fields["sizes"][0]
    for name, (dtype, at, *_) in (SIZES.fields or {}).items():
        fields[f"sizes.{name}"] = (begin + at, dtype.itemsize)
    choice = rng.randrange(8)
    if choice == 0:
        at, length = rng.randrange(512), rng.randrange(1, 512)
        memory[at : at + length] = rng.randbytes(length)
        return f"{length} bytes at {at}"
    if choice in (1, 2) and kind == "core":
        begin, length = fields["config"]
        text = bytearray(bytes(memory[begin : begin + length]).split(b"\0")[0])
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text))
            piece = rng.choice((b"", b'"', b"}", b"NaN", b"1e999", b"9" * 500, b"\xff", b"null"))
            text[at : at + rng.randrange(4)] = piece
        memory[begin : begin + length] = bytes(text[:length]).ljust(length, b"\0")
        return f"configuration {bytes(text)!r}"
    name = rng.choice(list(fields))
    at, length = fields[name]
    if length in (4, 8):
        old = int.from_bytes(memory[at : at + length], "little")
        limits = (layout.HEADER.itemsize, _native.LAYOUT_VERSION, len(memory), 2, 17)
        value = odd_value(rng, old, limits, 8 * length)
        memory[at : at + length] = value.to_bytes(length, "little")
        return f"{name} {value}"
    memory[at : at + length] = rng.randbytes(length)
    return name


def fuzz(name: str, headers: int) -> None:
    """Each spoilt header is read as nothing else than a segment that works, or refused."""
    refused = 0
    with seeded() as rng, Segment.create(small(name)) as made:
        memories = {
            "core": memoryview(made.core_memory),
            "source": memoryview(made.source_memory),
        }
        good = {kind: bytes(memory[:8192]) for kind, memory in memories.items()}
        for _ in range(headers):
            kind = rng.choice(KINDS)
            what = [spoil(rng, memories[kind], kind) for _ in range(rng.randint(1, 2))]
            try:
                with Segment.attach(name) as segment:
                    assert segment.config.sizes() == made.core.sizes, what
                    status_of(segment)
            except tp.SegmentError as error:
                refused += 1
                said = str(error)
            else:
                said = name
            assert name in said or segment_name_is_spoilt(what), (what, said)
            with redirect_stdout(io.StringIO()):
                assert cli.main(["inspect", name]) in (0, 5), what
            assert all(not found.is_dead for found in leftovers(name)), "it is in use"
            assert sweep(name) == 0
            memories[kind][: len(good[kind])] = good[kind]
        for memory in memories.values():
            memory.release()
        print(f"{headers} spoilt headers, {refused} refused")
        assert headers < 100 or refused > headers // 4


def segment_name_is_spoilt(what: list[str]) -> bool:
    return any("configuration" in one or "bytes" in one or one == "config" for one in what)


def test_a_spoilt_header_is_refused_or_harmless(unique_name: str) -> None:
    fuzz(unique_name, 500)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_twenty_thousand_spoilt_headers(unique_name: str) -> None:
    fuzz(unique_name, 20_000)


# --- whole files


def ours(kind: str) -> bytes:
    return struct.pack("<Q", _native.CORE_MAGIC if kind == "core" else _native.SOURCE_MAGIC)


def make_symlink(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def make_socket(path: Path) -> None:
    os.mknod(path, stat.S_IFSOCK | 0o600)


def sparse(num_bytes: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.touch(0o600)
        os.truncate(path, num_bytes)

    return make


def content(data: bytes) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(data), None)[1]


FOREIGN: dict[str, Callable[[Path], None]] = {
    "a directory": lambda path: path.mkdir(0o700),
    "a fifo": lambda path: os.mkfifo(path, 0o600),
    "a socket": make_socket,
    "a symlink": make_symlink,
    "a symlink to itself": lambda path: path.symlink_to(path),
    "an empty file": content(b""),
    "a short file": content(b"x"),
    "notes": content(b"notes of mine\n" * 1000),
    "zeros": content(bytes(8192)),
    "the magic from its second byte on": content(b"\0" + ours("core") * 1000),
    "a sparse file": sparse(1 << 20),
    "a file that nobody can map": sparse(1 << 60),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", FOREIGN)
def test_a_file_that_is_not_ours_is_named_and_kept(
    kind: str, what: str, unique_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = path_of(unique_name, kind)
    other = path_of(unique_name, "source" if kind == "core" else "core")
    with removed_at_the_end(path):
        FOREIGN[what](path)
        before = os.lstat(path)
        (found,) = leftovers(unique_name)
        assert not found.is_dead
        assert cli.main(["clean", unique_name]) == 0
        told = capsys.readouterr().out
        assert f"kept {path.name}" in told
        assert found.why in told
        assert cli.main(["inspect"]) == 0
        assert f"{path.name}  {found.num_bytes} bytes  kept: {found.why}" in capsys.readouterr().out
        for attach in (Segment.attach, Segment.attach_source):
            with pytest.raises(tp.SegmentError, match=unique_name):
                attach(unique_name)
        assert cli.main(["inspect", unique_name]) == 5
        with pytest.raises(tp.SegmentError, match=unique_name) as caught:
            Segment.create_or_adopt(small(unique_name))
        reasons = (found.why, "not a file of ours", "cannot be mapped")
        assert any(reason in str(caught.value) for reason in reasons)
        now = os.lstat(path)
        assert (now.st_ino, now.st_mtime_ns, now.st_size) == (
            before.st_ino,
            before.st_mtime_ns,
            before.st_size,
        )
        assert not other.exists(), "nothing of the refused start is left"


@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_that_was_cut_is_refused_at_every_length(kind: str, unique_name: str) -> None:
    path = path_of(unique_name, kind)
    with Segment.create(small(unique_name)):
        whole = path.stat().st_size
        for length in (*range(0, 1024, 64), 4095, 4096, 4097, 8192, whole - 4096, whole - 1):
            # What is cut off a mapped file is gone: another one of the same name stands for it.
            os.truncate(path, length)
            with pytest.raises(tp.SegmentError, match=unique_name):
                Segment.attach(unique_name)
            os.truncate(path, whole)
    assert not path.exists()


@pytest.mark.parametrize("kind", KINDS)
def test_what_begins_as_ours_and_nobody_holds_is_removed(kind: str, unique_name: str) -> None:
    path = path_of(unique_name, kind)
    with removed_at_the_end(path):
        path.write_bytes(ours(kind) + b"of any version")
        sweep(unique_name)  # or another start on this machine, which is as well
        assert not path.exists()


def test_names_that_no_pipeline_can_have_are_shown_plainly_and_kept(
    unique_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = [f"{unique_name}\n\x1b[31m", f"{unique_name}\udcff", f"{unique_name} {'x' * 100}"]
    paths = [SHM / f"tokenpipe.{name}.core" for name in odd]
    with removed_at_the_end(*paths):
        for path in paths:
            path.write_bytes(ours("core").ljust(8192, b"\0"))
        for command in ("inspect", "clean"):
            assert cli.main([command]) == 0
            told = capsys.readouterr().out
            assert "\x1b" not in told
            assert told.isascii()
            assert sum(unique_name in line for line in told.splitlines()) == len(odd)
        assert all(path.exists() for path in paths)


@pytest.mark.parametrize(
    "name", ["", "a/b", "../etc/passwd", "\0", "a\0b", "\udcff", "\u00e9", "x" * 5000, "/"]
)
def test_a_name_that_cannot_be_is_refused_by_every_command(name: str) -> None:
    for attach in (Segment.attach, Segment.attach_source, tp.EngineWriter.attach):
        with pytest.raises(tp.SegmentError):
            attach(name, 0)
    assert cli.main(["inspect", name]) == 5
    assert cli.main(["clean", name]) == 0
    if name:
        with pytest.raises(tp.ConfigError):
            small(name)


# --- who may read them


@pytest.mark.parametrize("mask", ["0", "0777"])
def test_what_a_pipeline_opens_is_for_its_owner_alone(mask: str, unique_name: str) -> None:
    """The segments' modes under any umask; one socket, the endpoint's; nothing inherited."""
    reading, writing = os.pipe()
    os.set_inheritable(reading, True)
    code = f"import os, sys; os.umask({mask.replace('0777', '0o777')}); os.execv(sys.executable, "
    code += "[sys.executable, '-m', 'tokenpipe', *sys.argv[1:]])"
    serve = [sys.executable, "-c", code, "serve", "--name", unique_name, "--max-num-seqs=4"]
    process = subprocess.Popen(
        [*serve, "--num-decoders=1"], stdout=subprocess.PIPE, text=True, pass_fds=(reading,)
    )
    try:
        assert process.stdout is not None
        assert '"ready"' in process.stdout.readline()
        for kind in KINDS:
            about = path_of(unique_name, kind).stat()
            assert stat.S_IMODE(about.st_mode) == 0o600
            assert about.st_uid == os.geteuid()
        with Segment.attach(unique_name) as segment:
            roles = status_of(segment)["roles"]
        for role, entry in roles.items():
            opened = opened_by(entry["pid"])
            inherited = f"pipe:[{os.fstat(reading).st_ino}]"
            assert role == "coordinator" or inherited not in opened, f"{role} has inherited a pipe"
            sockets = [one for one in opened if one.startswith("socket:")]
            assert len(sockets) <= (role == "coordinator"), f"{role} has {sockets}"
    finally:
        process.terminate()
        process.communicate(timeout=60)
        os.close(reading)
        os.close(writing)
    assert process.returncode == 0
    wait_until(lambda: not any(path_of(unique_name, kind).exists() for kind in KINDS))


def opened_by(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    return [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)]
