"""The rules of the house that no other tool checks: floors, "only here", what is forbidden.

Each rule is a function from the root of a tree to its findings, "path:line: what". Edit the tables,
not the code; below them every rule is shown to bite on a bad snippet. The file is long by its two
tables; they stand beside the rules because they are read together.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from support import Leftovers

ROOT = Path(__file__).resolve().parents[1]

# What may import what: only from lower floors, never sideways. A package is one module here, its
# files may import each other. `__init__` is the public face: what is below must not look up to it.
FLOORS = (
    ("_native", "stop", "forks"),
    ("errors", "commands"),
    ("layout", "config", "records", "limits", "socket_file"),
    ("segment", "requests", "cuda"),
    ("sources", "lifeline", "outputs", "status"),
    ("reader", "decoder", "resources", "writer", "metrics", "channel", "objects", "drafts"),
    ("children", "health", "events", "handover", "ops"),
    ("roles", "keeper", "delivery"),
    ("streams",),
    ("coordinator", "pipeline"),
    ("__init__",),
    ("demo", "fastdeploy"),
    ("cli",),
    ("__main__",),
)

# What may be named only in some files of tokenpipe/; a place that ends in / is a package.
ONLY_HERE: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("posix_ipc",), ("segment.py",)),
    (
        (
            *("subprocess", "asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
            *("os.kill", "os.killpg", "os.fork", "os.posix_spawn", "os.posix_spawnp"),
            *("os.wait", "os.wait3", "os.wait4", "os.waitpid", "os.waitid"),
            *("os.pidfd_open", "signal.pidfd_send_signal"),
        ),
        # ops/build.py starts a compiler.
        ("children.py", "keeper.py", "demo/", "ops/build.py"),
    ),
    (("signal.signal",), ("stop.py", "demo/")),
    (
        ("sys.exit", "builtins.exit", "builtins.quit", "builtins.print"),
        ("cli.py", "__main__.py", "demo/"),
    ),
    # config.py adds its fields to whatever parser it is given (DESIGN 8).
    (("argparse",), ("cli.py", "config.py", "demo/")),
    # children.py hands it on to the roles; CXX and the cache folder are no part of a configuration.
    (
        ("os.environ", "os.environb", "os.getenv", "os.putenv"),
        ("config.py", "children.py", "ops/build.py"),
    ),
    (("prometheus_client",), ("metrics.py", "health.py")),
    (
        ("http.server", "socket", "socketserver"),
        ("health.py", "socket_file.py", "sources/", "demo/"),
    ),
    # Its queues and pipes unpickle, its children import the user's main module again, its locks
    # outlive who held them; a semaphore does, too.
    (("multiprocessing", "posix_ipc.Semaphore"), ()),
    # The wall clock may be set at any time: fields that are wall time by their meaning, and the one
    # offset between the clocks. Everything else is CLOCK_MONOTONIC.
    (
        ("time.time", "time.time_ns", "time.localtime", "time.gmtime", "datetime"),
        ("records.py", "handover.py", "segment.py", "fastdeploy/"),
    ),
    # Nothing received is unpickled or evaluated.
    (("pickle", "_pickle", "pickletools", "copyreg", "marshal", "shelve", "dbm"), ()),
    (("dill", "cloudpickle", "joblib", "jsonpickle"), ()),
    (("yaml.load", "yaml.unsafe_load", "yaml.full_load"), ()),
    (("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__"), ()),
    (("importlib", "runpy", "code", "codeop"), ("__init__.py", "fastdeploy/host.py")),
    # No shell reads what we pass on; nothing is made that another user could open.
    (("os.system", "os.popen", "pty", "os.mkfifo", "os.mknod"), ()),
    (("tempfile",), ("demo/",)),
)

MEMORY_ORDER = re.compile(r"memory_order\w*|atomic_ref|atomic_thread_fence|__(?:atomic|sync)_\w+")
LOCK = re.compile(
    r"\b(?:pthread_(?:mutex|rwlock|cond|spin|barrier)\w*|sem_\w+|\w*mutex|\w+_lock|atomic_flag)\b"
)
MEMORY_ORDER_HOME = "cuda_ops/atomics.hpp"

SYNC_POINT = re.compile(r"SYNC POINT:\s*(?P<label>.+?)\s+-\s+(?P<what>.*)")
CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# pickle.hpp reads pickles; what no line may do is call Python's module.
EVALUATION = re.compile(
    r"\"_?pickle\"|py::pickle|\bmarshal\b|py::(?:eval|exec)|PyRun_\w+|PyMarshal_\w+"
)
PYTHON = (".py", ".pyi")
CPP = (".h", ".hpp", ".cpp", ".cc", ".cu", ".cuh")
OPEN_END = re.compile(r"\b(TODO|FIXME)\b(?!.*#\d+)")
# Folders that only a developer's machine has, and hosts that pip is configured with, not we.
PRIVATE = re.compile(
    r"(?:^|[^.A-Za-z0-9_-])/(?:work|farm)/"
    r"|pypi\.org|pythonhosted\.org|registry\.npmjs|deb\.debian\.org"
)


# --- the tree


def source_files(root: Path, *folders: str, suffixes: tuple[str, ...]) -> list[Path]:
    found = (p for folder in folders for p in (root / folder).rglob("*") if p.suffix in suffixes)
    return sorted(found)


def text_files(root: Path) -> list[Path]:
    """What a commit would hold, as git sees it; outside of a checkout all files."""
    if not (root / ".git").exists():
        return sorted(p for p in root.rglob("*") if p.is_file())
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    listing = subprocess.run(
        [*command, "--exclude-standard"], check=True, capture_output=True, text=True
    ).stdout
    return [root / name for name in listing.split("\0") if name and (root / name).is_file()]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def modules(root: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in source_files(root, "tokenpipe", suffixes=(".py",)):
        yield path, parsed(path)


def at(root: Path, path: Path, line: int, what: str) -> str:
    return f"{path.relative_to(root)}:{line}: {what}"


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    yield from enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1)


def only_types(tree: ast.Module) -> set[ast.AST]:
    """What stands under `if TYPE_CHECKING:`, and so does not run."""
    return {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }


def imported_from(root: Path, path: Path, node: ast.ImportFrom) -> str:
    """The absolute name of what `from ... import` names, its leading dots resolved."""
    package = path.relative_to(root).parent.parts
    base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
    return ".".join(part for part in (base, node.module) if part)


def imported_names(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[ast.stmt, str, str]]:
    """Each import as (statement, name bound here, absolute dotted name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.asname or alias.name, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = imported_from(root, path, node)
            for alias in node.names:
                yield node, alias.asname or alias.name, f"{base}.{alias.name}"


# --- the rules


def floors(root: Path) -> Iterator[str]:
    floor_of = {name: floor for floor, names in enumerate(FLOORS, 1) for name in names}

    def module_of(parts: tuple[str, ...]) -> str:
        """tokenpipe.segment.Segment -> segment; a name of tokenpipe itself -> __init__."""
        is_module = len(parts) > 1 and (
            parts[1] in floor_of
            or (root / "tokenpipe" / parts[1]).is_dir()
            or (root / "tokenpipe" / f"{parts[1]}.py").exists()
        )
        return parts[1] if is_module else "__init__"

    for path, tree in modules(root):
        me = module_of(path.relative_to(root).with_suffix("").parts)
        if me not in floor_of:
            yield at(root, path, 1, f"module {me} is on no floor; add it to FLOORS")
            continue
        for node, _, name in imported_names(root, path, tree):
            if name.split(".")[0] != "tokenpipe":
                continue
            other = module_of(tuple(name.split(".")))
            if other == me and me != "__init__" and (root / "tokenpipe" / me).is_dir():
                continue
            above = floor_of.get(other, len(FLOORS) + 1)
            if above >= floor_of[me]:
                what = f"{me} (floor {floor_of[me]}) imports {other} (floor {above})"
                yield at(root, path, node.lineno, what)


def used_names(root: Path, path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Absolute dotted names that a module imports or looks up at run time."""
    ignored = only_types(tree)
    bound: dict[str, str] = {}
    for node, local, name in imported_names(root, path, tree):
        bound[local.split(".")[0]] = name if local != name else name.split(".")[0]
        if node not in ignored:
            yield node.lineno, name
    for look_up in ast.walk(tree):
        if look_up in ignored or not isinstance(look_up, ast.Attribute | ast.Name):
            continue
        first, *rest = ast.unparse(look_up).split(".")
        if first in bound:
            yield look_up.lineno, ".".join((bound[first], *rest))
        elif isinstance(look_up, ast.Name) and hasattr(builtins, first):
            yield look_up.lineno, f"builtins.{first}"


def only_here(root: Path) -> Iterator[str]:
    for path, tree in modules(root):
        inside = path.relative_to(root / "tokenpipe").as_posix()
        found = set(used_names(root, path, tree))
        for names, homes in ONLY_HERE:
            if any(
                inside == home or (home[-1] == "/" and inside.startswith(home)) for home in homes
            ):
                continue
            for line, used in sorted(found):
                for name in names:
                    if used == name or used.startswith(name + "."):
                        allowed = ", ".join(homes) or "no file"
                        yield at(root, path, line, f"{name} belongs to {allowed}")


def no_unpickling_by_numpy(root: Path) -> Iterator[str]:
    for path, tree in modules(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                yield at(root, path, node.value.lineno, "allow_pickle")


def no_shell(root: Path) -> Iterator[str]:
    for path, tree in modules(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                yield at(root, path, node.value.lineno, "a shell")


def pickle_in_cpp(root: Path) -> Iterator[str]:
    for path in source_files(root, "cuda_ops", suffixes=CPP):
        for number, line in lines_of(path):
            if found := EVALUATION.search(line):
                yield at(root, path, number, f"{found[0]} unpickles or evaluates")


def memory_orders(root: Path) -> Iterator[str]:
    for path in source_files(root, "cuda_ops", suffixes=CPP):
        if path.relative_to(root).as_posix() == MEMORY_ORDER_HOME:
            continue
        code = CPP_COMMENT.sub(lambda m: "\n" * m[0].count("\n"), path.read_text(encoding="utf-8"))
        for number, line in enumerate(code.splitlines(), 1):
            if found := MEMORY_ORDER.search(line):
                yield at(root, path, number, f"{found[0]} belongs to {MEMORY_ORDER_HOME}")


def no_locks(root: Path) -> Iterator[str]:
    """Who is killed with a lock in shared memory in his hand blocks all others for ever."""
    for path in source_files(root, "cuda_ops", suffixes=CPP):
        code = CPP_COMMENT.sub(lambda m: "\n" * m[0].count("\n"), path.read_text(encoding="utf-8"))
        for number, line in enumerate(code.splitlines(), 1):
            if found := LOCK.search(line):
                yield at(root, path, number, f"{found[0]}: there is no lock in the path")


def no_abort_at_exit(root: Path) -> Iterator[str]:
    for path in source_files(root, "cuda_ops", suffixes=CPP):
        for number, line in lines_of(path):
            if "py::gil_scoped_release" in line:
                what = "aborts the program at its exit; module.cpp has GilReleased"
                yield at(root, path, number, what)


def sync_points(root: Path) -> Iterator[str]:
    sides: dict[str, list[set[str]]] = {}
    for path in source_files(root, "cuda_ops", suffixes=CPP):
        for number, line in lines_of(path):
            if "SYNC POINT:" not in line:
                continue
            point = SYNC_POINT.search(line)
            said = set(re.findall(r"\b(?:release|acquire)\b", point["what"])) if point else set()
            if point is None or not said:
                form = "expected `SYNC POINT: <label> - release|acquire: ...`"
                yield at(root, path, number, form)
            else:
                sides.setdefault(point["label"], []).append(said)
    for label, points in sides.items():
        missing = {"release", "acquire"} - set().union(*points)
        if missing or len(points) < 2:
            yield f"SYNC POINT {label}: stands {len(points)} times, lacks {sorted(missing)}"


def swallowed_exceptions(root: Path) -> Iterator[str]:
    broad = {"Exception", "BaseException"}
    swallowed = "an exception of any kind is swallowed"
    for path, tree in modules(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                caught = {ast.unparse(t) for t in ast.walk(node.type)} if node.type else set()
                idle = all(ast.unparse(s) in ("pass", "...", "continue") for s in node.body)
                if node.type is None:
                    yield at(root, path, node.lineno, "bare except")
                elif idle and caught & broad:
                    yield at(root, path, node.lineno, swallowed)
            elif (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("suppress")
                and broad & {ast.unparse(argument) for argument in node.args}
            ):
                yield at(root, path, node.lineno, swallowed)


def open_ends(root: Path) -> Iterator[str]:
    for path in source_files(root, "tokenpipe", "cuda_ops", suffixes=PYTHON + CPP):
        for number, line in lines_of(path):
            if found := OPEN_END.search(line):
                yield at(root, path, number, f"{found[0]} without the number of its issue")


def docstrings(root: Path) -> Iterator[str]:
    def undocumented(node: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
        for child in node.body:
            if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            # An overload and a setter are the same name once more.
            again = any(
                ast.unparse(d).endswith(("overload", ".setter")) for d in child.decorator_list
            )
            if child.name.startswith("_") or again:
                continue
            if ast.get_docstring(child) is None:
                yield child.lineno, child.name
            if isinstance(child, ast.ClassDef):
                yield from undocumented(child)

    for path, tree in modules(root):
        if ast.get_docstring(tree) is None:
            yield at(root, path, 1, "the module has no docstring")
        for line, name in undocumented(tree):
            yield at(root, path, line, f"{name} has no docstring")


def plain_ascii(root: Path) -> Iterator[str]:
    for path in text_files(root):
        if path.suffix in PYTHON + CPP:
            for number, line in lines_of(path):
                if not line.isascii():
                    yield at(root, path, number, "not plain ASCII")


def private_names(root: Path) -> Iterator[str]:
    for path in text_files(root):
        if b"\0" in path.read_bytes():
            continue
        for number, line in lines_of(path):
            if found := PRIVATE.search(line):
                yield at(root, path, number, f"{found[0]!r} names a machine or a registry")


Rule = Callable[[Path], Iterator[str]]
RULES: tuple[Rule, ...] = (
    floors,
    only_here,
    no_unpickling_by_numpy,
    no_shell,
    pickle_in_cpp,
    memory_orders,
    no_locks,
    no_abort_at_exit,
    sync_points,
    swallowed_exceptions,
    open_ends,
    docstrings,
    plain_ascii,
    private_names,
)


@pytest.mark.parametrize("rule", RULES)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    findings = list(rule(ROOT))
    assert not findings, "\n".join(findings)


# --- each rule bites

DOC = '"""Doc."""\n'
BAD: tuple[tuple[Rule, str, str], ...] = (
    (floors, "tokenpipe/decoder.py", "import tokenpipe.reader"),
    (floors, "tokenpipe/reader.py", "from tokenpipe.decoder import Decoder"),
    (floors, "tokenpipe/reader.py", "from tokenpipe import decoder"),
    (floors, "tokenpipe/reader.py", "def run():\n    from .decoder import Decoder"),
    (floors, "tokenpipe/reader.py", "if TYPE_CHECKING:\n    from . import coordinator"),
    (floors, "tokenpipe/sources/shm.py", "from ..reader import run"),
    (floors, "tokenpipe/config.py", "from tokenpipe import PipelineConfig"),
    (floors, "tokenpipe/config.py", "import tokenpipe as tp"),
    (floors, "tokenpipe/config.py", "import tokenpipe.helpers"),
    (floors, "tokenpipe/helpers.py", ""),
    (floors, "tokenpipe/helpers/__init__.py", ""),
    (only_here, "tokenpipe/reader.py", "import posix_ipc"),
    (only_here, "tokenpipe/reader.py", "from posix_ipc import SharedMemory"),
    (only_here, "tokenpipe/cli.py", "import subprocess"),
    (only_here, "tokenpipe/health.py", "import os\nos.kill(1, 9)"),
    (only_here, "tokenpipe/health.py", "import os as o\nend = o.waitpid"),
    (only_here, "tokenpipe/health.py", "from os import pidfd_open"),
    (only_here, "tokenpipe/reader.py", "import signal\nsignal.signal(15, print)"),
    (only_here, "tokenpipe/reader.py", "from signal import signal as handle"),
    (only_here, "tokenpipe/reader.py", "import argparse"),
    (only_here, "tokenpipe/children.py", "import multiprocessing"),
    (only_here, "tokenpipe/keeper.py", "from multiprocessing import Queue"),
    (only_here, "tokenpipe/segment.py", "import posix_ipc\nposix_ipc.Semaphore('/x')"),
    (only_here, "tokenpipe/reader.py", "import sys\nsys.exit(1)"),
    (only_here, "tokenpipe/reader.py", "print('x')"),
    (only_here, "tokenpipe/reader.py", "import os\nos.environ['X'] = '1'"),
    (only_here, "tokenpipe/reader.py", "from os import getenv"),
    (only_here, "tokenpipe/reader.py", "from prometheus_client import Counter"),
    (only_here, "tokenpipe/coordinator.py", "from http.server import HTTPServer"),
    (only_here, "tokenpipe/coordinator.py", "from http import server"),
    (only_here, "tokenpipe/coordinator.py", "import socket"),
    (only_here, "tokenpipe/demo/engine.py", "import pickle"),
    (only_here, "tokenpipe/sources/zmq.py", "from pickle import loads"),
    (only_here, "tokenpipe/config.py", "import marshal, shelve, dill, cloudpickle"),
    (only_here, "tokenpipe/config.py", "import yaml\nyaml.load(f)"),
    (only_here, "tokenpipe/config.py", "eval('1')"),
    (only_here, "tokenpipe/config.py", "exec('1')"),
    (only_here, "tokenpipe/config.py", "compile('1', '', 'eval')"),
    (only_here, "tokenpipe/config.py", "__import__('pickle')"),
    (only_here, "tokenpipe/config.py", "from importlib import import_module"),
    (only_here, "tokenpipe/children.py", "from multiprocessing.connection import Client"),
    (only_here, "tokenpipe/children.py", "import os\nos.system('ls')"),
    (only_here, "tokenpipe/children.py", "import tempfile"),
    (no_shell, "tokenpipe/children.py", "import subprocess\nsubprocess.run('ls', shell=True)"),
    (pickle_in_cpp, "cuda_ops/module.cpp", 'py::module_::import("pickle")'),
    (pickle_in_cpp, "cuda_ops/module.cpp", 'py::eval("1")'),
    (pickle_in_cpp, "cuda_ops/module.cpp", "c.def(py::pickle(a, b));"),
    (no_unpickling_by_numpy, "tokenpipe/reader.py", "np.load(f, allow_pickle=True)"),
    (no_abort_at_exit, "cuda_ops/module.cpp", "const py::gil_scoped_release release;"),
    (memory_orders, "cuda_ops/ring.hpp", "x.load(std::memory_order_acquire);"),
    (memory_orders, "cuda_ops/module.cpp", "std::atomic_ref<int> r(x);"),
    (memory_orders, "cuda_ops/ring.hpp", "/* c */ std::atomic_thread_fence(order);"),
    (memory_orders, "cuda_ops/ring.hpp", "__atomic_load_n(&x, 0);"),
    (no_locks, "cuda_ops/ring.hpp", "pthread_mutex_lock(&header.lock);"),
    (no_locks, "cuda_ops/ring.hpp", "std::mutex all;"),
    (no_locks, "cuda_ops/ring.hpp", "sem_wait(&slots);"),
    (no_locks, "cuda_ops/ring.hpp", "const std::scoped_lock hold(all);"),
    (sync_points, "cuda_ops/ring.hpp", "// SYNC POINT: slot - release: the slot\n"),
    (sync_points, "cuda_ops/ring.hpp", "// SYNC POINT: slot - acquire: the slot\n" * 2),
    (sync_points, "cuda_ops/ring.hpp", "// SYNC POINT: slot - acquire and release\n"),
    (sync_points, "cuda_ops/ring.hpp", "// SYNC POINT: release\n"),
    (sync_points, "cuda_ops/ring.hpp", "// SYNC POINT: released slot - seen\n"),
    (swallowed_exceptions, "tokenpipe/reader.py", "try:\n    f()\nexcept:\n    g()"),
    (swallowed_exceptions, "tokenpipe/reader.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (
        swallowed_exceptions,
        "tokenpipe/reader.py",
        "try:\n    f()\nexcept (OSError, BaseException) as e:\n    ...",
    ),
    (swallowed_exceptions, "tokenpipe/reader.py", "with contextlib.suppress(Exception):\n    f()"),
    (open_ends, "tokenpipe/reader.py", "# TODO: later"),
    (open_ends, "cuda_ops/ring.hpp", "// FIXME see issue 2"),
    (docstrings, "tokenpipe/reader.py", "class Reader:\n    pass"),
    (docstrings, "tokenpipe/reader.py", "async def run():\n    pass"),
    (docstrings, "tokenpipe/reader.py", f"class A:\n    {DOC}    def f(self):\n        pass"),
    (plain_ascii, "benchmarks/ring.py", "# \u00b5s"),
    (plain_ascii, "cuda_ops/ring.hpp", "// \u2192"),
    (private_names, "README.md", "see /" + "work/notes"),
    (private_names, "scripts/test", "pip install -i https://py" + "pi.org/simple"),
)


def tree_of(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(DOC + text if path.suffix == ".py" else text, encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("rule", "name", "text"), BAD, ids=[f"{rule.__name__}-{name}" for rule, name, _ in BAD]
)
def test_the_rule_bites(rule: Rule, name: str, text: str, tmp_path: Path) -> None:
    assert list(rule(tree_of(tmp_path, name, text)))


def test_every_rule_has_a_snippet_that_it_bites() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


def test_a_missing_module_docstring_is_found(tmp_path: Path) -> None:
    (tmp_path / "tokenpipe").mkdir()
    (tmp_path / "tokenpipe" / "reader.py").write_text("x = 1\n")
    assert list(docstrings(tmp_path)) == ["tokenpipe/reader.py:1: the module has no docstring"]


GOOD: tuple[tuple[str, str], ...] = (
    ("tokenpipe/reader.py", "from tokenpipe import stop\nfrom . import segment\nimport re"),
    ("tokenpipe/sources/shm.py", "from . import sysv\nfrom .sysv import x\nfrom ..config import y"),
    ("tokenpipe/__init__.py", "from tokenpipe.pipeline import Pipeline"),
    ("tokenpipe/demo/client.py", "import tokenpipe as tp\nimport subprocess\nprint(tp)"),
    ("tokenpipe/config.py", "if TYPE_CHECKING:\n    import argparse\nimport os\nx = os.environ"),
    ("tokenpipe/reader.py", "import re\nx = re.compile('a')\nmodel.eval()\nlog.print(x)"),
    ("tokenpipe/reader.py", "try:\n    f()\nexcept OSError:\n    pass\n# TODO(#7): later"),
    ("tokenpipe/reader.py", "class _A:\n    def f(self): pass\ndef _g(): pass"),
    (
        "cuda_ops/ring.hpp",
        "// SYNC POINT: slot a-b - release: x\n/* memory_order_acquire */\n"
        "// SYNC POINT: slot a-b - acquire: y\n",
    ),
    ("README.md", "a/work/ and ./work/ and ~/.work/ are nobody's machine\n"),
)


@pytest.mark.parametrize(("name", "text"), GOOD, ids=[name for name, _ in GOOD])
def test_no_rule_bites_what_is_allowed(name: str, text: str, tmp_path: Path) -> None:
    root = tree_of(tmp_path, name, text)
    assert [finding for rule in RULES for finding in rule(root)] == []


def test_what_a_test_leaves_behind_is_found_and_removed(unique_name: str) -> None:
    before = Leftovers.now()
    segment = Path("/dev/shm") / f"tokenpipe.{unique_name}"
    segment.touch()
    child = subprocess.Popen(["sleep", "600"])
    orphan = int(subprocess.check_output("setsid sleep 600 >/dev/null & echo $!", shell=True))
    left = Leftovers.now().since(before)
    left.remove()
    assert left.segments == {segment.name}
    assert {process.pid for process in left.processes} == {child.pid, orphan}
    assert not Leftovers.now().since(before)
    child.wait()
