"""Every Python that the package promises, where it is installed: built, installed and run.

An interpreter counts as installed when it is on PATH as python3.X, or where pyenv keeps its own.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_parents import BODY, NOISE

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def find(version: str) -> str | None:
    """A working interpreter of that version which can make a venv and build an extension."""
    kept = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for found in (shutil.which(f"python{version}"), *map(str, kept)):
        if found is None:
            continue
        check = (
            "import ensurepip, os, sys, sysconfig, venv\n"
            f"assert '%d.%d' % sys.version_info[:2] == {version!r}\n"
            "assert os.path.exists(sysconfig.get_path('include') + '/Python.h')"
        )
        if subprocess.run([found, "-c", check], capture_output=True).returncode == 0:
            return found
    return None


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd)
    assert ended.returncode == 0, f"{command}:\n{ended.stdout}\n{ended.stderr}"
    return ended


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_package_is_built_installed_and_run_by(
    version: str, tmp_path: Path, unique_name: str
) -> None:
    """B26, B27: no word of the resource tracker on any of them."""
    interpreter = find(version)
    if interpreter is None:
        pytest.skip(f"no python{version} with venv and headers here")
    run(interpreter, "-m", "venv", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    # A copy: two versions that build in one folder would take each other's objects.
    tree = tmp_path / "tree"
    for name in ("tokenpipe", "cuda_ops"):
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    tools = ("pytest", "pytest-asyncio", "pytest-timeout")
    run(python, "-m", "pip", "install", "--quiet", tree, *tools, cwd=tmp_path)
    # Not from the checkout: its extension is another version's.
    script = tmp_path / "program.py"
    script.write_text(BODY + f"main({unique_name!r})\n")
    ended = run(python, "-W", "error", script, cwd=tmp_path)
    assert ended.stdout == "[7, 8, 9]\n"
    assert not any(word in ended.stderr for word in NOISE), ended.stderr
    own = [ROOT / "tests" / "test_pipeline.py", ROOT / "tests" / "test_supervision.py"]
    # The warnings of the tools themselves are not ours to turn into errors.
    options = ("-q", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider")
    run(python, "-m", "pytest", *options, "-m", "not full", *own, cwd=tmp_path)
