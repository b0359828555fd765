"""The README's tables say what the code does."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import tokenpipe as tp

TEXT = (Path(__file__).parents[1] / "README.md").read_text()


def test_every_flag_stands_in_the_table_with_its_default_and_help() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.*?) \| (.*?) \|$", TEXT, re.MULTILINE)
    expected = [
        (
            "--" + f.name.replace("_", "-"),
            str(f.metadata.get("shown", f.default)),
            f.metadata["help"],
        )
        for f in dataclasses.fields(tp.PipelineConfig)
    ]
    assert rows == expected


def test_every_exit_code_stands_in_the_table() -> None:
    rows = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", TEXT, re.MULTILINE)
    assert rows == [(str(int(code)), code.name) for code in tp.ExitCode]


def test_every_finish_reason_stands_in_the_table() -> None:
    table = TEXT.split("### How a request ends")[1].split("##")[0]
    names = re.findall(r"^\| ([a-z]+) \| \d+", table, re.MULTILINE)
    assert names == [r.name.lower() for r in tp.FinishReason if r is not tp.FinishReason.NONE]


def test_every_public_name_can_be_imported_and_is_typed() -> None:
    stub = (Path(tp.__file__).parent / "__init__.pyi").read_text()
    typed = set(re.findall(r"import (\w+) as \1", stub))
    assert typed == set(tp.__all__) - {"__version__"}
    for name in tp.__all__:
        assert getattr(tp, name) is not None
