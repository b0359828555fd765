"""The ops on FastDeploy's queue: runs ops_cases.py where the long messages fit, and tests what is
about the packaging of the ops: the operators' build and its cache, the C header, the kernel's
limits as they are."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from fastdeploy_peer import Worker, custom_ftok, free_queue_id

from tokenpipe.errors import OpsBuildError, QueueError
from tokenpipe.ops import sysv
from tokenpipe.ops.build import paddle_library

ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build" / "paddle-ops"
"""Where the operators are kept for a checkout, so that not every run compiles them."""
RAISE_LIMITS = (
    "echo 1000000 >/proc/sys/kernel/msgmax && echo 4000000 >/proc/sys/kernel/msgmnb && exec "
)
needs_paddle = pytest.mark.skipif(
    importlib.util.find_spec("paddle") is None, reason="no Paddle wheel for this Python"
)


def run_cases(which: str, **more: str) -> None:
    """Runs the cases in an IPC namespace of their own, in which alone the limits are raised; `more`
    is for their environment."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs"]
    command += [str(ROOT / "tests" / "ops_cases.py"), "-k", which]
    isolated = ["unshare", "--ipc", "sh", "-c", RAISE_LIMITS + '"$@"', "sh"]
    may_isolate = (
        shutil.which("unshare") is not None
        and subprocess.run([*isolated, "true"], capture_output=True).returncode == 0
    )
    environment = os.environ | {"TOKENPIPE_CACHE_DIR": str(CACHE)} | more
    done = subprocess.run(
        [*isolated, *command] if may_isolate else command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "skipped" in done.stdout.splitlines()[-1]:
        pytest.skip(f"no IPC namespace with raised limits here: {done.stdout[-1000:]}")


@pytest.mark.timeout(300)
def test_the_ops_on_arrays() -> None:
    run_cases("not paddle and not Paddle")


@needs_paddle
@pytest.mark.timeout(600)  # it compiles the operators
def test_the_ops_as_paddle_operators(tmp_path: Path) -> None:
    compile_with_paddle("-O1", "-shared", "tests/paddle_device.cpp", "-o", f"{tmp_path}/liblate.so")
    run_cases("paddle or Paddle", CUSTOM_DEVICE_ROOT=str(tmp_path))


def compile_with_paddle(*arguments: str) -> None:
    """Runs g++ with Paddle's headers."""
    paddle = importlib.util.find_spec("paddle")
    assert paddle is not None
    assert paddle.origin is not None
    headers = Path(paddle.origin).parent / "include"
    command = ["g++", "-std=c++20", "-fPIC", "-w", f"-isystem{headers}"]
    command += [f"-isystem{headers / 'third_party'}", *arguments]
    subprocess.run(command, cwd=ROOT, check=True)


# What the operators hand to Paddle and are handed by it.
SEEN_BY_BOTH = """
#include "paddle/phi/api/ext/op_meta_info.h"
using namespace paddle;
extern const size_t looks[] = {
    sizeof(Tensor), alignof(Tensor), sizeof(phi::Place), alignof(phi::Place),
    sizeof(CustomOpKernelContext), sizeof(OpMetaInfo), sizeof(OpMetaInfoBuilder), sizeof(any),
    size_t(DataType::BOOL), size_t(DataType::INT32), size_t(DataType::INT64),
    size_t(DataType::FLOAT32), size_t(phi::AllocationType::GPUPINNED)};
"""


@pytest.mark.full
@needs_paddle
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no headers of CUDA on this machine")
def test_the_operators_see_of_a_paddle_with_cuda_what_they_were_compiled_with(
    tmp_path: Path,
) -> None:
    """They are compiled without its macro, so that no header of CUDA is needed."""
    (tmp_path / "looks.cpp").write_text(SEEN_BY_BOTH)
    command = ["nvcc", "--dryrun", "-c", "x.cu", "-o", "x.o"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    cuda = re.findall(r'"-I([^"]+)"', said)[0]
    found = []
    for more in (["-DPADDLE_WITH_CUDA", f"-isystem{cuda}", f"-isystem{cuda}/cccl"], []):
        compile_with_paddle(*more, "-S", f"{tmp_path}/looks.cpp", "-o", f"{tmp_path}/looks.s")
        table = (tmp_path / "looks.s").read_text().split("\nlooks:\n")[1]
        found.append(re.findall(r"\.quad\t(\d+)", table)[:13])
    assert found[0] == found[1]
    assert len(found[0]) == 13


def test_a_message_beyond_the_kernels_limits_is_refused_with_the_numbers() -> None:
    longest = int(Path("/proc/sys/kernel/msgmax").read_text())
    if longest >= 88072:
        pytest.skip(f"kernel.msgmax is {longest} here")
    queue_id = free_queue_id()
    worker = Worker(custom_ftok("/dev/shm", queue_id))
    ids, scores = np.zeros((1, 3), np.int64), np.zeros((1, 3), np.float32)
    try:
        with pytest.raises(QueueError) as caught:
            sysv.save_output_topk(
                *(ids[:, 0], ids, scores, ids[:, 0], True), wire=sysv.Wire(queue_id)
            )
    finally:
        worker.remove()
    assert caught.value.errno == errno.EMSGSIZE
    for said in (f"kernel.msgmax is {longest}", "kernel.msgmax=88072", "kernel.msgmnb=176144"):
        assert said in str(caught.value)


# --- the C header

PROGRAM = """
#include <stdio.h>
#include "tokenpipe_ops.h"
int main(void) {
  int64_t token = 41, got[514] = {2};
  tokenpipe_tensor x = {&token, TOKENPIPE_INT64, 1, {1}}, out = {got, TOKENPIPE_INT64, 1, {514}};
  tokenpipe_error error = {"", ""};
  if (tokenpipe_save_output(NULL, &x, true, NULL, 0, &error) != 0 ||
      tokenpipe_get_output(NULL, &out, 0, true, &error) != 0)
    return puts(error.text), 1;
  out.shape[0] = 513;
  int code = tokenpipe_get_output(NULL, &out, 0, false, &error);
  printf("%d %d %d|%d %s|%s\\n", (int)got[0], (int)got[1], (int)got[2], code, error.argument,
         error.text);
  x.shape[0] = -1;
  code = tokenpipe_save_output(NULL, &x, true, NULL, 0, &error);
  printf("%d %s|", code, error.text);
  x.shape[0] = 1, x.data = NULL;
  code = tokenpipe_save_output(NULL, &x, true, NULL, 0, &error);
  printf("%d %s\\n", code, error.text);
  return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_header_is_plain_c_and_the_library_needs_no_python(tmp_path: Path) -> None:
    (tmp_path / "program.c").write_text(PROGRAM)
    (library,) = (ROOT / "tokenpipe").glob("_ops.*.so")
    command = ["cc", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    command += [f"-I{ROOT / 'cuda_ops'}", str(tmp_path / "program.c"), str(library)]
    subprocess.run([*command, "-o", str(tmp_path / "program")], check=True)
    queue_id = free_queue_id()
    worker = Worker(custom_ftok("/dev/shm", queue_id))
    try:
        environment = os.environ | {"INFERENCE_MSG_QUEUE_ID": str(queue_id)}
        said = subprocess.check_output([tmp_path / "program"], env=environment, text=True)
    finally:
        worker.remove()
    assert said.splitlines() == [
        f"1 1 41|{errno.EINVAL} x|x has 513 elements, must have at least 514",
        f"{errno.EINVAL} x has -1 as shape[0]|{errno.EINVAL} x has 1 elements and no data",
    ]


# --- the operators' build, with a compiler that tells how often it was called

COMPILER = """#!/bin/sh
[ "$1" = --version ] && exec echo "c++ $VERSION"
echo "$@" >>"$LOG"
for last; do :; done
[ -z "$FAIL" ] || { echo "no header" >&2; exit 4; }
echo library >"$last"
"""
BUILD = "from tokenpipe.ops.build import paddle_library as b; print(b('3.0', [], []))"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the log of a compiler that makes a file of one line, the cache is in tmp_path."""
    script = tmp_path / "cxx"
    script.write_text(COMPILER)
    script.chmod(0o755)
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("LOG", str(log))
    monkeypatch.setenv("VERSION", "1")
    monkeypatch.setenv("TOKENPIPE_CACHE_DIR", str(tmp_path / "cache"))
    return log


def test_the_operators_are_compiled_once_for_each_paddle_and_compiler(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = paddle_library("3.0", [], [])
    assert first.read_text() == "library\n"
    assert paddle_library("3.0", [], []) == first
    assert len(compiler.read_text().splitlines()) == 1
    monkeypatch.setenv("VERSION", "2")
    others = {paddle_library("3.0", [], []), paddle_library("3.1", [], [])}
    assert len(others | {first}) == 3
    assert len(compiler.read_text().splitlines()) == 3


def test_first_uses_at_the_same_time_compile_once(compiler: Path) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = {child.communicate()[0] for child in children}
    (path,) = said
    assert Path(path.strip()).read_text() == "library\n"
    assert len(compiler.read_text().splitlines()) == 1
    assert {p.name for p in Path(path).parent.iterdir()} == {Path(path.strip()).name, "lock"}


def test_a_compiler_that_fails_says_why_and_leaves_nothing(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(OpsBuildError, match=r"paddle_ops\.cc.* failed \(4\):\nno header"):
        paddle_library("3.0", [], [])
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["lock"]
    monkeypatch.setenv("FAIL", "")
    assert paddle_library("3.0", [], []).exists()


def test_without_a_compiler_the_message_says_what_to_install(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(OpsBuildError, match=r"no-such-compiler.*g\+\+ 12"):
        paddle_library("3.0", [], [])


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_folder_that_others_may_write_is_refused(
    compiler: Path, mode: int, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(OpsBuildError, match=rf"{mode:o}.*TOKENPIPE_CACHE_DIR"):
        paddle_library("3.0", [], [])
    assert not compiler.exists()
    cache.rmdir()
    made = paddle_library("3.0", [], [])
    assert made.parent.stat().st_mode & 0o777 == 0o700


def import_error(environment: Mapping[str, str], code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | dict(environment),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def test_without_paddle_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['paddle'] = None; import tokenpipe.ops.paddle"
    assert "OpsBuildError" in import_error({}, code)
    assert "install paddlepaddle" in import_error({}, code)


@needs_paddle
def test_without_a_compiler_the_import_of_the_operators_says_so(tmp_path: Path) -> None:
    environment = {"CXX": "no-such-compiler", "TOKENPIPE_CACHE_DIR": str(tmp_path / "cache")}
    said = import_error(environment, "from tokenpipe.ops.paddle import save_output")
    assert "OpsBuildError: no C++ compiler: 'no-such-compiler'" in said


TWICE = """
import importlib, paddle, tokenpipe.ops.paddle
importlib.reload(tokenpipe.ops.paddle)
"""


@needs_paddle
@pytest.mark.timeout(600)  # it may have to compile the operators
def test_operators_of_these_names_are_not_loaded_a_second_time() -> None:
    """Paddle would abort the process."""
    said = import_error({"TOKENPIPE_CACHE_DIR": str(CACHE)}, TWICE)
    assert "OpsBuildError: operators of these names are in this process already" in said
