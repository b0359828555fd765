"""POSIX shared memory: create, attach, validate, lock, unlink, sweep.

A pipeline has two segments, "tokenpipe.NAME.core" and "tokenpipe.NAME.source"; an engine's writer
maps the second one only. Every party holds a lock on its own byte of the file while it lives: the
kernel releases it at death, whatever killed the process, in any pid namespace.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import resource
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import TracebackType

import posix_ipc

from tokenpipe import _native, forks
from tokenpipe.config import NAME_PATTERN, PipelineConfig
from tokenpipe.errors import (
    AdoptionError,
    ConfigError,
    LayoutMismatchError,
    LimitError,
    SegmentError,
    SegmentExistsError,
    SegmentMemoryError,
    SegmentMissingError,
    SegmentSpaceError,
    SocketTakenError,
)
from tokenpipe.limits import memory_limit
from tokenpipe.socket_file import remove_stale

FOLDER = "/dev/shm"
PREFIX = "tokenpipe."
_OUR_FILE = re.compile(rf"{re.escape(PREFIX)}{NAME_PATTERN}\.(core|source)")
_IN_USE = "in use"
_NO_NAME = "no pipeline can have this name"

LOCK_COORDINATOR, LOCK_READER, LOCK_CLIENT, LOCK_WRITER, LOCK_DECODER = 0, 1, 2, 3, 16
_LOCKS_OF_A_SOURCE = (LOCK_COORDINATOR, LOCK_READER, LOCK_WRITER)
_ALL_LOCKS = (0, 4096)
_SWEEP_LOCK = 4096

# Open file description locks (Linux 3.15): not lost when another descriptor of the file is closed,
# as classic record locks are.
_F_OFD_GETLK, _F_OFD_SETLK = 36, 37
_FREE_CHOICE = ("health_host", "health_port", "log_level")
"""Settings that a coordinator which takes over may choose anew."""


def core_name(name: str) -> str:
    """Returns the file name of a pipeline's core segment."""
    return f"{PREFIX}{name}.core"


def source_name(name: str) -> str:
    """Returns the file name of a pipeline's source segment."""
    return f"{PREFIX}{name}.source"


@dataclass(frozen=True)
class Identity:
    """Who a process is, also after its pid has been given to another one."""

    pid: int
    start: int
    """Start time in clock ticks since boot."""
    pid_namespace: int
    boot_id: str

    @classmethod
    def own(cls) -> Identity:
        """Returns the identity of this process."""
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot_id = f.read().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino & 0xFFFFFFFF
        return cls(os.getpid(), start_time(os.getpid()) or 0, namespace, boot_id)


def ipc_namespace() -> int:
    """Returns which System V namespace this process is in (the low 32 bits of its inode)."""
    return os.stat("/proc/self/ns/ipc").st_ino & 0xFFFFFFFF


def _stat(pid: int) -> list[bytes] | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            # The command name, in brackets, may hold anything; the fields behind it are plain.
            return f.read().rpartition(b")")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> int | None:
    """Returns when the process started (clock ticks since boot), None when there is none."""
    fields = _stat(pid)
    return int(fields[19]) if fields is not None and len(fields) > 19 else None


def is_running(pid: int, start: int) -> bool:
    """Returns whether the process that began at `start` runs: a zombie has ended."""
    fields = _stat(pid)
    if fields is None or len(fields) <= 19:
        return False
    return int(fields[19]) == start and fields[0] not in (b"Z", b"X")


class Mapping:
    """One shared-memory file, mapped. Closing it releases the locks that were taken through it."""

    def __init__(self, file_name: str, fd: int) -> None:
        """Takes over the descriptor. Raises SegmentError when it cannot be mapped."""
        self.file_name = file_name
        self._held: set[int] = set()
        try:
            self.memory = _mapped(file_name, fd)
            # Opened again for the locks: mmap keeps a copy of the other one, also in a fork.
            with forks.guard:
                self.fd = forks.mark(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        finally:
            os.close(fd)

    @classmethod
    def create(cls, file_name: str, num_bytes: int) -> Mapping:
        """Creates the memory, owner only, with all its pages reserved and the coordinator's lock.

        It has no name until publish(): a creator that is killed before leaves nothing, and a name
        is always that of a complete segment whose creator lived. Raises SegmentSpaceError when the
        pages do not fit: without reserving them a process would die of SIGBUS at its first touch,
        much later (field report B13).
        """
        fd = os.open(FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as e:
            os.close(fd)
            if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            free = os.statvfs(FOLDER)
            raise SegmentSpaceError(file_name, num_bytes, free.f_bavail * free.f_frsize) from None
        mapping = cls(file_name, fd)
        mapping.lock(LOCK_COORDINATOR)
        return mapping

    def publish(self) -> None:
        """Gives a created file its name. Raises FileExistsError when the name is taken."""
        folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            path = os.path.join(FOLDER, self.file_name)
            os.link(str(self.fd), path, src_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)

    @classmethod
    def open(cls, file_name: str) -> Mapping:
        """Opens an existing file of ours. Raises FileNotFoundError while there is none or while it
        has no size yet, SegmentError when it belongs to somebody else."""
        if not _OUR_FILE.fullmatch(file_name):  # nor does posix_ipc survive every name
            raise SegmentError(file_name, f"open {file_name!r}: {_NO_NAME}")
        try:
            shared = posix_ipc.SharedMemory("/" + file_name)
        except posix_ipc.ExistentialError:
            raise FileNotFoundError(file_name) from None
        except (posix_ipc.PermissionsError, OSError, ValueError) as e:
            # A symlink, a directory, a file of somebody else.
            raise SegmentError(file_name, f'open "{file_name}": not a file of ours ({e})') from None
        about = os.fstat(shared.fd)
        is_ours, is_file = about.st_uid == os.geteuid(), stat.S_ISREG(about.st_mode)
        if not (is_ours and is_file):
            os.close(shared.fd)
            why = (
                f"belongs to uid {about.st_uid}, not to us" if is_file else "is not a regular file"
            )
            raise SegmentError(file_name, f'open "{file_name}": it {why}')
        if about.st_size < 512:
            os.close(shared.fd)
            raise FileNotFoundError(file_name)
        return cls(file_name, shared.fd)

    @property
    def has_its_name(self) -> bool:
        """Whether the name is still this file's: by hand it may be removed, then another run's."""
        try:
            about = os.lstat(os.path.join(FOLDER, self.file_name))
        except FileNotFoundError:
            return False
        return self.fd >= 0 and os.path.samestat(os.fstat(self.fd), about)

    def word(self, offset: int) -> int:
        """Returns the uint64 at `offset`."""
        return int(struct.unpack_from("<Q", self.memory, offset)[0])

    def lock(self, byte: int) -> bool:
        """Takes the lock of one party; False when another process holds it."""
        try:
            _set_lock(self.fd, byte)
        except (BlockingIOError, PermissionError):
            return False
        self._held.add(byte)
        return True

    def is_locked(self, byte: int) -> bool:
        """Returns whether somebody holds the lock of that party, ourselves included."""
        if byte in self._held:
            return True  # asked through the file that holds it, the kernel says "free"
        answer = fcntl.fcntl(self.fd, _F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte, 1))
        return int(struct.unpack_from("h", answer)[0]) != fcntl.F_UNLCK

    def close(self) -> None:
        """Releases the locks and closes the file; the memory stays mapped while a view of it
        lives."""
        self._held.clear()
        forks.close(self.fd)
        self.fd = -1


def _mapped(file_name: str, fd: int) -> mmap.mmap:
    num_bytes = os.fstat(fd).st_size
    try:
        return mmap.mmap(fd, num_bytes)
    except (OSError, ValueError, OverflowError) as e:
        limit_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
        is_out_of_memory = isinstance(e, OSError) and e.errno == errno.ENOMEM
        if is_out_of_memory and limit_bytes != resource.RLIM_INFINITY:
            raise SegmentMemoryError(file_name, num_bytes, limit_bytes) from None
        # A size that no process can map, say.
        text = f'map "{file_name}": its {num_bytes} bytes cannot be mapped ({e})'
        raise SegmentError(file_name, text) from None


def _set_lock(fd: int, byte: int) -> None:
    fcntl.fcntl(fd, _F_OFD_SETLK, _flock(fcntl.F_WRLCK, byte, 1))


def _flock(kind: int, start: int, length: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


def unlink(file_name: str) -> bool:
    """Removes the file; False when it is gone already."""
    try:
        posix_ipc.unlink_shared_memory("/" + file_name)
    except posix_ipc.ExistentialError:
        return False
    return True


class Segment:
    """A pipeline's shared memory as one process holds it: core and source, or the source alone."""

    def __init__(self, name: str, core: Mapping | None, source: Mapping | None) -> None:
        self.name = name
        self._core, self._source = core, source
        self._is_owner = False
        self.is_adopted = False
        """Whether it is a former coordinator's."""
        try:
            self._native_core = None if core is None else _native.Core(core.memory)
            self._native_source = None if source is None else _native.Source(source.memory)
            self._config = None if core is None else _config_of(name, core)
            if core is not None and source is not None:
                self._check_that_they_belong_together()
        except (ValueError, LayoutMismatchError) as e:
            for mapping in (core, source):
                if mapping is not None:
                    mapping.close()
            if isinstance(e, LayoutMismatchError):
                raise
            raise LayoutMismatchError(name, f"layout {_native.LAYOUT_VERSION}", str(e)) from None

    def _check_that_they_belong_together(self) -> None:
        sizes = self.config.sizes()
        if self.core.sizes != sizes or self.source.sizes != sizes:
            raise ValueError("core, source and configuration have different sizes")

    @classmethod
    def create_or_adopt(cls, config: PipelineConfig) -> Segment:
        """Creates both segments, or takes over those of a coordinator that died while its roles or
        its client live. Raises as create(), and AdoptionError (fields)."""
        sweep()
        if os.path.exists(os.path.join(FOLDER, core_name(config.name))):
            adopted = cls._adopt(config)
            if adopted is not None:
                return adopted
        return cls.create(config)

    @classmethod
    def _adopt(cls, config: PipelineConfig) -> Segment | None:
        made: list[Mapping] = []
        try:
            for file_name in (core_name(config.name), source_name(config.name)):
                mapping = Mapping.open(file_name)
                made.append(mapping)
                if mapping.word(8) != _native.LAYOUT_VERSION:
                    raise FileNotFoundError(file_name)
                if not mapping.lock(LOCK_COORDINATOR):
                    raise SegmentExistsError(config.name, _owner_pid(file_name))
            segment = cls(config.name, made[0], made[1])
            fields = segment.config.differences(config, _FREE_CHOICE)
            if fields:
                raise AdoptionError(config.name, fields)
        except FileNotFoundError:
            for mapping in made:
                mapping.close()
            return None
        except BaseException:
            for mapping in made:
                mapping.close()
            raise
        segment._is_owner = segment.is_adopted = True
        pid = os.getpid()
        _native.set_owner(segment.core, segment.source, pid, start_time(pid) or 0)
        return segment

    @classmethod
    def create(cls, config: PipelineConfig) -> Segment:
        """Creates both segments and takes the coordinator's lock.

        Removes what dead runs left, of any name. Raises SegmentExistsError (owner_pid) when a
        live run has the name, SegmentSpaceError when the pages do not fit into /dev/shm, LimitError
        when they do not fit into the memory of our cgroup.
        """
        sweep()
        plan, own = config.plan(), Identity.own()
        needed, limit = plan["core_bytes"] + plan["source_bytes"], memory_limit()
        if limit is not None and needed > limit:
            setting = "the cgroup's memory limit, or lower --ring-slots and --output-slots"
            raise LimitError("bytes of shared memory", needed, limit, setting)
        who = (own.pid, own.pid_namespace, own.start, own.boot_id)
        made: list[Mapping] = []
        published: list[Mapping] = []
        try:
            for file_name, size in (
                (core_name(config.name), plan["core_bytes"]),
                (source_name(config.name), plan["source_bytes"]),
            ):
                made.append(Mapping.create(file_name, size))
            _native.format_source(made[1].memory, config.sizes(), config.source_kind, *who)
            _native.format_core(
                made[0].memory,
                config.sizes(),
                config.options(),
                *who,
                time.time_ns() - time.monotonic_ns(),
                config.to_json(),
            )
            segment = cls(config.name, made[0], made[1])
            for mapping in made:
                try:
                    mapping.publish()
                except FileExistsError:
                    raise _taken(config.name, mapping.file_name) from None
                published.append(mapping)
        except BaseException:
            for mapping in published:
                unlink(mapping.file_name)
            for mapping in made:
                mapping.close()
            raise
        segment._is_owner = True
        return segment

    @classmethod
    def attach(cls, name: str, timeout_s: float = 0.0) -> Segment:
        """Maps both segments of a pipeline, waiting for it to be ready.

        Raises SegmentMissingError (waited_s), LayoutMismatchError (expected, found), SegmentError.
        """
        core = _wait_open(name, core_name(name), timeout_s)
        try:
            source = _wait_open(name, source_name(name), timeout_s)
        except BaseException:
            core.close()
            raise
        return cls(name, core, source)

    @classmethod
    def attach_source(cls, name: str, timeout_s: float = 0.0) -> Segment:
        """Maps the source segment alone, as an engine's writer does. Raises as attach()."""
        return cls(name, None, _wait_open(name, source_name(name), timeout_s))

    @property
    def core(self) -> _native.Core:
        """The core segment as the native classes take it."""
        assert self._native_core is not None
        return self._native_core

    @property
    def source(self) -> _native.Source:
        """The source segment as the native classes take it."""
        assert self._native_source is not None
        return self._native_source

    @property
    def config(self) -> PipelineConfig:
        """The configuration that the coordinator wrote into the core segment."""
        assert self._config is not None
        return self._config

    @property
    def core_memory(self) -> mmap.mmap:
        """The core segment's bytes."""
        assert self._core is not None
        return self._core.memory

    @property
    def source_memory(self) -> mmap.mmap:
        """The source segment's bytes."""
        assert self._source is not None
        return self._source.memory

    @property
    def source_fd(self) -> int:
        """The descriptor of the source segment's file, for the locks of its parties."""
        assert self._source is not None
        return self._source.fd

    def lock(self, byte: int) -> bool:
        """Takes a party's lock: the writer's on the source, the reader's on both, all others on the
        core."""
        mapping = self._source if byte == LOCK_WRITER else self._core
        assert mapping is not None
        if byte == LOCK_READER and self._source is not None and not self._source.lock(byte):
            return False
        return mapping.lock(byte)

    def is_locked(self, byte: int) -> bool:
        """Returns whether the party of that lock lives. Who maps the source alone asks the kernel
        by the core's name for those that lock nothing else."""
        if self._core is None and byte not in _LOCKS_OF_A_SOURCE:
            try:
                return _is_held(core_name(self.name), byte, 1)
            except FileNotFoundError:
                return False  # its creator is gone and has removed it
        mapping = self._source if byte == LOCK_WRITER or self._core is None else self._core
        assert mapping is not None
        return mapping.is_locked(byte)

    def has_roles(self) -> bool:
        """Returns whether the reader or a decoder still holds its lock."""
        sizes = self.source.sizes if self._core is None else self.core.sizes
        return self.is_locked(LOCK_READER) or any(
            self.is_locked(LOCK_DECODER + k) for k in range(sizes["num_decoders"])
        )

    @property
    def has_its_names(self) -> bool:
        """Whether a name of its files is still theirs, not another run's by now."""
        return any(m.has_its_name for m in (self._core, self._source) if m is not None)

    def close(self) -> None:
        """Lets go of the segments; the creator also removes their files."""
        for mapping in (self._core, self._source):
            if mapping is not None:
                if self._is_owner and mapping.has_its_name:
                    unlink(mapping.file_name)
                mapping.close()
        self._is_owner = False  # the name may be another run's from now on

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _config_of(name: str, core: Mapping) -> PipelineConfig:
    text = _header_text(core.memory)
    try:
        return PipelineConfig.from_json(text)
    except (ValueError, TypeError, RecursionError, ConfigError) as e:
        raise LayoutMismatchError(name, "a configuration of this build", repr(str(e))) from None


def _header_text(memory: mmap.mmap) -> str:
    start, length = _native.CONFIG_OFFSET, _native.CONFIG_BYTES
    return bytes(memory[start : start + length]).split(b"\0")[0].decode()


def _wait_open(name: str, file_name: str, timeout_s: float) -> Mapping:
    begun = time.monotonic()
    while True:
        waited = time.monotonic() - begun
        try:
            mapping = Mapping.open(file_name)
        except FileNotFoundError:
            mapping = None
        if mapping is not None:
            version = mapping.word(8)
            if version == _native.LAYOUT_VERSION and mapping.is_locked(LOCK_COORDINATOR):
                return mapping
            mapping.close()
            if version not in (0, _native.LAYOUT_VERSION):
                raise LayoutMismatchError(
                    name, f"layout {_native.LAYOUT_VERSION}", f"layout {version}"
                )
        if waited >= timeout_s:
            raise SegmentMissingError(name, timeout_s)
        time.sleep(min(0.01, timeout_s - waited))


def _taken(name: str, file_name: str) -> SegmentError:
    found = _examine(file_name)
    pid = _owner_pid(file_name) if found is not None and found.why == _IN_USE else 0
    if pid:
        return SegmentExistsError(name, pid)
    why = "it came meanwhile" if found is None else found.why
    return SegmentError(
        name,
        f'create "{name}": {FOLDER}/{file_name} is there and is not ours to remove: {why}; choose '
        "another name",
    )


def _owner_pid(file_name: str) -> int:
    try:
        mapping = Mapping.open(file_name)
    except (FileNotFoundError, SegmentError):
        return 0
    try:
        return _pid_in(mapping)
    finally:
        mapping.close()


def _pid_in(mapping: Mapping) -> int:
    is_core = mapping.file_name.endswith(".core")
    offset = int(_native.CORE_PID_OFFSET if is_core else _native.SOURCE_PID_OFFSET)
    return int(struct.unpack_from("<I", mapping.memory, offset)[0])


@dataclass(frozen=True)
class Leftover:
    """A file of ours in /dev/shm, and whether a sweep may remove it."""

    file_name: str
    num_bytes: int
    is_dead: bool
    why: str
    is_foreign: bool = False
    """Another user's: only he, or root, may say whether it is dead and remove it."""


def leftovers(name: str | None = None) -> Iterator[Leftover]:
    """Yields every segment file of one pipeline, or of all, with what is known of its owner.

    Dead means provably so: it begins as a segment of ours does, and no party holds a lock on it (a
    file has its name only once it is complete and its creator holds one). What is another user's,
    or of other content, is reported and never touched.
    """
    wanted = None if name is None else {core_name(name), source_name(name)}
    for file_name in sorted(os.listdir(FOLDER)):
        if not file_name.startswith(PREFIX) or not file_name.endswith((".core", ".source")):
            continue
        if wanted is not None and file_name not in wanted:
            continue
        if not _OUR_FILE.fullmatch(file_name):
            yield Leftover(ascii(file_name)[1:-1], 0, False, _NO_NAME)
            continue
        found = _examine(file_name)
        if found is None:
            continue
        if found.is_dead and file_name.endswith(".source"):
            # Roles and clients hold the core alone: a coordinator's successor needs both files.
            core = _examine(file_name.removesuffix(".source") + ".core")
            if core is not None and not core.is_dead:
                found = replace(found, is_dead=False, why="its core segment is in use")
            elif _queue_namespace(file_name) not in (0, ipc_namespace()):
                # Without it nobody there would know of the queue that is left.
                why = "its System V queue is in another namespace"
                found = replace(found, is_dead=False, why=why)
        yield found


def _magic_of(file_name: str) -> bytes:
    is_core = file_name.endswith(".core")
    return struct.pack("<Q", _native.CORE_MAGIC if is_core else _native.SOURCE_MAGIC)


def _is_held(file_name: str, first: int, count: int) -> bool:
    """Whether another open file holds one of these locks. Raises FileNotFoundError."""
    path = os.path.join(FOLDER, file_name)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        answer = fcntl.fcntl(fd, _F_OFD_GETLK, _flock(fcntl.F_WRLCK, first, count))
        return int(struct.unpack_from("h", answer)[0]) != fcntl.F_UNLCK
    finally:
        os.close(fd)


def _examine(file_name: str) -> Leftover | None:
    path = os.path.join(FOLDER, file_name)
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(about.st_mode):
        return Leftover(file_name, 0, False, "not a regular file")
    if about.st_uid != os.geteuid():
        why = f"belongs to uid {about.st_uid}"
        return Leftover(file_name, about.st_size, False, why, is_foreign=True)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as e:
        return Leftover(file_name, about.st_size, False, f"cannot be opened ({e.strerror})")
    try:
        answer = fcntl.fcntl(fd, _F_OFD_GETLK, _flock(fcntl.F_WRLCK, *_ALL_LOCKS))
        if struct.unpack_from("h", answer)[0] != fcntl.F_UNLCK:
            return Leftover(file_name, about.st_size, False, _IN_USE)
        begin, ours = os.pread(fd, 8, 0), _magic_of(file_name)
        if begin != ours:
            why = f"begins with {begin!r}, a segment of ours with {ours!r}"
            return Leftover(file_name, about.st_size, False, why)
    finally:
        os.close(fd)
    return Leftover(file_name, about.st_size, True, "no process holds it")


def sweep(name: str | None = None, report: Callable[[Leftover], None] | None = None) -> int:
    """Removes the segments of dead runs, of one pipeline or of all; returns how many."""
    removed = 0
    for found in leftovers(name):
        if found.is_dead and _remove(found.file_name):
            removed += 1
        if report is not None:
            report(found)
    return removed


def live_configs() -> Iterator[tuple[PipelineConfig, int, int]]:
    """Yields (configuration, coordinator's start time, its pid) of every pipeline that somebody
    holds, as far as it can be read."""
    for found in leftovers():
        if found.is_dead or not found.file_name.endswith(".core"):
            continue
        try:
            mapping = Mapping.open(found.file_name)
        except (FileNotFoundError, SegmentError):
            continue
        try:
            if mapping.word(8) == _native.LAYOUT_VERSION:
                config = _config_of(found.file_name, mapping)
                start = mapping.word(int(_native.CORE_START_OFFSET))
                yield config, start, _pid_in(mapping)
        except (LayoutMismatchError, struct.error):
            continue
        finally:
            mapping.close()


def _queue_namespace(file_name: str) -> int:
    try:
        mapping = Mapping.open(file_name)
    except (FileNotFoundError, SegmentError):
        return 0
    try:
        return _native.queue_namespace(_native.Source(mapping.memory))
    except ValueError:  # of another layout: it says nothing of a queue that we could trust
        return 0
    finally:
        mapping.close()


def _remove_queue_of(file_name: str) -> None:
    """Removes the System V queue that a dead pipeline had made."""
    try:
        mapping = Mapping.open(file_name)
    except (FileNotFoundError, SegmentError):
        return
    try:
        _native.remove_queue(_native.Source(mapping.memory))
    except ValueError:  # of another layout: it says nothing of a queue that we could trust
        return
    finally:
        mapping.close()


def _remove_socket_of(file_name: str) -> None:
    """Removes the socket file that a dead pipeline's reader had bound, unless it is another's."""
    try:
        mapping = Mapping.open(file_name)
    except (FileNotFoundError, SegmentError):
        return
    try:
        if mapping.word(8) == _native.LAYOUT_VERSION:
            config = _config_of(file_name, mapping)
            if config.source == "zmq":
                remove_stale(config.zmq_socket)
    except (LayoutMismatchError, struct.error, SocketTakenError):
        return
    finally:
        mapping.close()


def _remove(file_name: str) -> bool:
    """Removes a dead file, unless another sweep was first and the name is a new run's."""
    path = os.path.join(FOLDER, file_name)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.fcntl(fd, _F_OFD_SETLK, _flock(fcntl.F_WRLCK, _SWEEP_LOCK, 1))
        found = _examine(file_name)
        is_same = os.path.samestat(os.fstat(fd), os.lstat(path))
        if not is_same or found is None or not found.is_dead:
            return False
        if file_name.endswith(".source"):
            _remove_queue_of(file_name)
        else:
            _remove_socket_of(file_name)
        return unlink(file_name)
    except (BlockingIOError, PermissionError, FileNotFoundError):
        return False  # another sweep has it, or has had it
    finally:
        os.close(fd)
