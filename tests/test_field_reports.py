"""The table of field reports (FIELD_REPORTS.md): every report stands in it, everything it names is
there. And the one report that no test of a feature holds."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import tokenpipe as tp
from tokenpipe import config

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
TABLE = TESTS / "FIELD_REPORTS.md"
REPORTS = [f"B{number:02}" for number in range(1, 90)]
TEST = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
FILE = re.compile(r"measured: (\S+\.\w+)")
DOES_NOT_APPLY = re.compile(r"does not apply: [^`]{20,}")


@cache
def held_by() -> dict[str, str]:
    rows = re.finditer(
        r"^\| (B\d+) \| [^|]+ \| ([^|]+) \|$", TABLE.read_text(encoding="utf-8"), re.M
    )
    return {row[1]: row[2] for row in rows}


@cache
def names_in(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_report_stands_in_the_table_once() -> None:
    assert list(held_by()) == REPORTS
    assert TABLE.read_text(encoding="utf-8").count("\n| B") == len(REPORTS)


@pytest.mark.parametrize("report", REPORTS)
def test_what_the_table_names_is_there(report: str) -> None:
    cell = held_by()[report]
    tests, files = TEST.findall(cell), FILE.findall(cell)
    assert tests or files or DOES_NOT_APPLY.match(cell), "nothing holds it"
    # Nothing else stands there, so that a name with a slip is not passed over.
    assert re.sub(r"[\s,]", "", DOES_NOT_APPLY.sub("", FILE.sub("", TEST.sub("", cell)))) == ""
    for file, test in tests:
        assert test in names_in(file), f"{file}::{test}"
    for file in files:
        assert (ROOT / file).is_file()


def test_the_default_number_of_decoders_follows_the_usable_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B83: the affinity and the quota both count; an explicit option wins."""
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(80)))
    for text, cores in (("150000 100000", 1.5), ("max 100000", 80), ("800000 100000", 8)):
        quota.write_text(text)
        assert config.usable_cores(str(quota)) == cores
    assert config.usable_cores(str(tmp_path / "none")) == 80
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0})
    assert config.usable_cores(str(quota)) == 1
    assert tp.PipelineConfig().num_decoders == 1
    assert tp.PipelineConfig(num_decoders=3).num_decoders == 3
