"""Shows that the tests of the modes catch one-line faults: scripts/mutants.

Each mutant is a copy of the tree with one line changed. Its extension is built anew and the fast
tests of the decoder and of the modes run against it; they must fail. Most of the list are faults
that upstream's own tests let pass.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ("tokenpipe", "cuda_ops", "tests", "pyproject.toml")
# One claim each first: they say more and take less time than the search for any difference.
CLAIMS = ("tests/test_decoder.py", "-k", "not equals_the_oracle")
ORACLE = ("tests/test_decoder.py", "-k", "equals_the_oracle")
MODES = ("tests/test_modes.py",)
DECODER, OUTPUTS = "cuda_ops/decoder.hpp", "cuda_ops/python_outputs.hpp"
OBJECTS, DRAFTS = "tokenpipe/objects.py", "tokenpipe/drafts.py"
LIMIT_S = 600


@dataclass(frozen=True)
class Mutant:
    """One changed line; `old` stands in the file exactly once."""

    name: str
    path: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "send_idx is that after the step",
        DECODER,
        "push({row.index, p.emitted, row.first, shown, reason,",
        "push({row.index, p.emitted + taken, row.first, shown, reason,",
    ),
    Mutant(
        "only the first end token counts",
        DECODER,
        "std::find(eos, eos + known.num_eos, token) != eos + known.num_eos",
        "known.num_eos != 0 && *eos == token",
    ),
    Mutant("-3 is emitted as a token", DECODER, "if (token < 0) {", "if (token < -3) {"),
    Mutant(
        "any negative id aborts",
        DECODER,
        "        reason = TP_FINISH_ERROR;\n        break;",
        "        reason = TP_FINISH_ABORT;\n        break;",
    ),
    Mutant(
        "a marked row's tokens are delivered (decode role's shield)",
        DECODER,
        "             rows_[row.index].mark != TP_FINISH_NONE)",
        "             false)",
    ),
    Mutant(
        "ranks of the step's first tokens",
        DECODER,
        "copy(frame, to.ranks, slot, from.ranks, put_at, first, count);",
        "copy(frame, to.ranks, slot, from.ranks, put_at, 0, count);",
    ),
    Mutant(
        "accept 0 gives an output",
        DECODER,
        "    else if (row.num != 0)\n",
        "    else if (row.num == 0) finish(row, 0, 0, TP_FINISH_NONE, slot); else\n",
    ),
    Mutant(
        "tokens behind an end are delivered",
        DECODER,
        "while (taken < row.num && reason == TP_FINISH_NONE) {",
        "while (taken < row.num && reason != TP_FINISH_ERROR) {",
    ),
    Mutant(
        "max_tokens is one too many",
        DECODER,
        "state_[row.index].emitted + taken >= known.max_tokens",
        "state_[row.index].emitted + taken > known.max_tokens",
    ),
    Mutant(
        "the step at from_sequence is not the newcomer's",
        DECODER,
        "if (slot.source_sequence < known.from_sequence ||",
        "if (slot.source_sequence <= known.from_sequence ||",
    ),
    Mutant("chunks are counted in tokens", DECODER, "p.chunks += 1;", "p.chunks += row.num;"),
    Mutant(
        "rows of the turn before are not written again",
        DECODER,
        "changed_before_.swap(changed_);",
        "changed_before_.clear();",
    ),
    Mutant(
        "the internal adapter gets end tokens",
        DECODER,
        "shown += is_end && options_.internal_adapter ? 0 : 1;",
        "shown += 1;",
    ),
    Mutant(
        "heads behind the end are counted",
        DECODER,
        "count_accepted(p, taken);",
        "count_accepted(p, row.num);",
    ),
    Mutant(
        "a mark applies one step late",
        DECODER,
        "at < get(mark.from_sequence)",
        "at <= get(mark.from_sequence)",
    ),
    Mutant(
        "a prefill instance goes on",
        DECODER,
        "if (is_end || known.is_prefill)",
        "if (is_end)",
    ),
    Mutant(
        "a gap is not shared by its tokens",
        DECODER,
        "gap.ns / gap.taken, gap.tokens",
        "gap.ns, gap.tokens",
    ),
    Mutant(
        "drafts belong to the step to come",
        DECODER,
        ": state_[row.index].last_send_idx,",
        ": state_[row.index].emitted,",
    ),
    Mutant(
        "wrong recovery text",
        OBJECTS,
        "Recover is not supported, the result is incomplete!",
        "Recover is not supported, the result is incomplete",
    ),
    Mutant(
        "the prompt is on every output",
        OUTPUTS,
        "echo(o, request, sent == 0 && has_slot);",
        "echo(o, request, has_slot);",
    ),
    Mutant(
        "logprob of the first token of a step",
        OUTPUTS,
        "PyList_GET_SIZE(rows) - 1), 0)",
        "0), 0)",
    ),
    Mutant(
        "the decode role stamps its third token",
        OUTPUTS,
        "sent == 1 &&",
        "sent == 2 &&",
    ),
    Mutant(
        "drafts are joined by list position",
        DRAFTS,
        "[found.get(key, -1) for key in wanted]",
        "[j if j < len(found) else -1 for j in range(len(wanted))]",
    ),
    Mutant(
        "one finished row flushes the whole step without drafts",
        DRAFTS,
        "batch.num_finals < batch.num_rows:",
        "not batch.num_finals:",
    ),
    Mutant(
        "a doubled target overwrites the first",
        DRAFTS,
        "        if held is not None:\n            self._let_go(decoder)\n",
        "",
    ),
)


def copy_tree(folder: Path) -> Path:
    """Copies what a test run needs; `shared` lies beside the copy as beside the tree."""
    tree = folder / "tree"
    tree.mkdir()
    for name in TREE:
        if (ROOT / name).is_dir():
            hidden = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / name, tree / name, ignore=hidden)
        else:
            shutil.copy2(ROOT / name, tree / name)
    if (ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    return tree


def build(tree: Path) -> str:
    """Builds the extension in place; returns what the compiler said when it failed."""
    includes = subprocess.run(
        [sys.executable, "-m", "pybind11", "--includes"], check=True, capture_output=True, text=True
    ).stdout.split()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    command = [
        *(os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared"),
        *("-fvisibility=hidden", "-UNDEBUG", "-Icuda_ops", *includes),
        *("cuda_ops/module.cpp", "-o", f"tokenpipe/_native{suffix}"),
    ]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr


def run_tests(tree: Path, *tests: str) -> tuple[bool, str]:
    """Runs the fast ones of some tests to the first failure: whether all passed, which failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not full", "--tb=no", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {LIMIT_S} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 0:
        return True, ""
    if done.returncode != 1 or not failed:
        return False, f"pytest ended with {done.returncode}"
    return False, failed[0].split(" - ")[0].removeprefix("FAILED tests/")


def attempt(mutant: Mutant | None) -> tuple[bool, str]:
    """Returns whether the suite passes with that change, and what failed. None: no change."""
    with tempfile.TemporaryDirectory(prefix="tokenpipe-mutant-") as folder:
        tree = copy_tree(Path(folder))
        if mutant is not None:
            text = (tree / mutant.path).read_text(encoding="utf-8")
            if text.count(mutant.old) != 1:
                raise SystemExit(
                    f"{mutant.name!r}: its text stands {text.count(mutant.old)} times in "
                    f"{mutant.path}; it must be once: {mutant.old!r}"
                )
            changed = text.replace(mutant.old, mutant.new)
            (tree / mutant.path).write_text(changed, encoding="utf-8")
        if mutant is None or mutant.path.startswith("cuda_ops/"):
            error = build(tree)
            if error:
                raise SystemExit(f"{mutant.name if mutant else 'no change'}: {error}")
        is_python = mutant is not None and mutant.path.endswith(".py")
        for tests in (MODES, CLAIMS, ORACLE) if is_python else (CLAIMS, ORACLE, MODES):
            passes, failed = run_tests(tree, *tests)
            if not passes:
                return False, failed
        return True, ""


def main() -> int:
    """Tries the mutants that are named, or all; 1 when one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="words of the names of the mutants to try")
    parser.add_argument("--list", action="store_true", help="show the mutants and try none")
    args = parser.parse_args()
    chosen = [m for m in MUTANTS if not args.only or any(word in m.name for word in args.only)]
    if args.list:
        print("\n".join(f"{m.path}: {m.name}" for m in chosen))
        return 0
    passes, failed = attempt(None)
    if not passes:
        print(f"the tree without a change fails: {failed}")
        return 1
    survivors = []
    print(f"{'':9}{'s':>5}  {'mutant':58} caught by")
    for mutant in chosen:
        begun = time.monotonic()
        survives, failed = attempt(mutant)
        if survives:
            survivors.append(mutant.name)
        verdict = "SURVIVED" if survives else "caught"
        print(f"{verdict:9}{time.monotonic() - begun:5.0f}  {mutant.name:58} {failed}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
