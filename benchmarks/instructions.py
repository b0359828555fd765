"""Instructions per step of the hot paths by callgrind: a regression shows in spite of noise.

    python benchmarks/instructions.py            # measure and show beside the committed figures
    python benchmarks/instructions.py --check    # exit code 1 where one grew by more than 10 %
    python benchmarks/instructions.py --write    # commit what this prints, after a wanted change

The committed figures (instructions.json) hold for the compiler that they name. Without it, or
without valgrind, nothing is checked, and a line says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import native_build
import table
from modes import MODES

_ROOT = Path(__file__).resolve().parents[1]
_COMMITTED = Path(__file__).with_suffix(".json")
_ROWS, _STEPS = 256, 100
_MOST_GROWTH = 1.10
_MEMCPY = {"GLIBC_TUNABLES": f"glibc.cpu.x86_rep_movsb_threshold={1 << 40}"}
"""callgrind counts `rep movsb` once per byte, which would hide all else."""
PATHS = {"save_step": "save", "get_step": "get", "decode_step": "decode", "read_step": "read"}
"""By the function of native/steps.cpp."""

Counts = dict[str, dict[str, int]]
"""Instructions of one step, by mode and path."""


def measure() -> Counts:
    """Returns the counts of all modes. Raises CalledProcessError, RuntimeError."""
    program = native_build.program("steps", f"-I{_ROOT / 'tests' / 'native'}")
    return {mode: _measure(program, mode) for mode in MODES}


def _measure(program: Path, mode: str) -> dict[str, int]:
    with tempfile.TemporaryDirectory(prefix="tokenpipe-bench-") as folder:
        out = Path(folder) / "callgrind.out"
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", str(program)]
        command += [mode, str(_ROWS), str(_STEPS)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **_MEMCPY})
        report = subprocess.run(
            ["callgrind_annotate", "--inclusive=yes", "--threshold=100", str(out)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = {}
    for function, path in PATHS.items():
        line = re.search(rf"^ *([\d,]+) .*[:/]{function}\b", report, re.MULTILINE)
        if line is None:
            raise RuntimeError(f"callgrind does not name {function} in mode {mode}")
        found[path] = round(int(line[1].replace(",", "")) / _STEPS)
    return found


def compiler() -> str:
    """Returns what the compiler calls itself."""
    command = [native_build.compiler(), "--version"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\n")[0]


def cannot_check(committed: dict[str, object]) -> str:
    """Returns why the committed figures say nothing here; empty where they do."""
    if shutil.which("valgrind") is None:
        return "there is no valgrind"
    if compiler() != committed["compiler"]:
        return f"the figures are of {committed['compiler']}, here is {compiler()}"
    return ""


def grown(committed: Counts, found: Counts) -> list[str]:
    """Returns a line for each path that takes too many more instructions than committed."""
    return [
        f"{mode} {path}: {found[mode][path]:,} instructions a step, committed are {before:,}"
        for mode, paths in committed.items()
        for path, before in paths.items()
        if found[mode][path] > before * _MOST_GROWTH
    ]


def show(committed: Counts, found: Counts) -> None:
    """Prints a JSON line and a table."""
    print(json.dumps({"benchmark": "instructions", "rows": _ROWS, "per_step": found}), flush=True)
    rows = [
        [f"{MODES[mode]}: {path}", count, count / before if before else "-"]
        for mode, paths in found.items()
        for path, count in paths.items()
        for before in [committed.get(mode, {}).get(path, 0)]
    ]
    table.show(f"instructions a step, {_ROWS} rows", ("", "counted", "to committed"), rows)


def main() -> int:
    """Measures, and checks or writes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail on growth above 10 %%")
    parser.add_argument("--write", action="store_true", help="make these the committed figures")
    args = parser.parse_args()
    committed = json.loads(_COMMITTED.read_text()) if _COMMITTED.exists() else {}
    if args.check and (why := cannot_check(committed)):
        print(f"instructions: skipped, {why}", file=sys.stderr)
        return 0
    found = measure()
    show(committed.get("per_step", {}), found)
    if args.write:
        facts = {"compiler": compiler(), "rows": _ROWS, "per_step": found}
        _COMMITTED.write_text(json.dumps(facts, indent=2) + "\n")
    worse = grown(committed["per_step"], found) if args.check else []
    for line in worse:
        print(f"instructions: {line}", file=sys.stderr)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
