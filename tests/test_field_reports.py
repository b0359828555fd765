"""Field reports on wrong values and slow output paths (group F): which test holds each off."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tokenpipe as tp
from tokenpipe import config

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent

DOES_NOT_APPLY = "does not apply: "
MEASURED = "measured: "

# report: the tests, or the feature that does not exist here, or the benchmark that measures it.
GROUP_F: dict[str, tuple[str, ...]] = {
    "B70": ("test_decoder.py::test_ids_candidates_ranks_and_counts_end_at_one_place",),
    "B71": (
        "test_decoder.py::test_ids_candidates_ranks_and_counts_end_at_one_place",
        "test_decoder.py::test_each_of_the_end_tokens_ends_a_request",
        DOES_NOT_APPLY + "stop strings and stop sequences: a request ends by one token or a limit",
    ),
    "B72": (
        "test_modes.py::test_every_name_of_fastdeploy_holds_what_was_delivered",
        "test_decoder.py::test_the_decoder_equals_the_oracle",
    ),
    "B73": (
        "test_modes.py::test_drafts_come_beside_the_target_they_belong_to",
        "test_modes.py::test_drafts_without_a_target_and_targets_without_drafts_are_counted",
        "test_modes.py::test_a_held_target_goes_out_before_what_follows_it",
        "test_modes.py::test_a_target_waits_for_its_drafts_but_not_for_ever",
    ),
    "B74": (
        "test_modes.py::test_real_output_comes_out_bit_for_bit",
        "test_modes.py::test_what_is_on_every_output_and_what_on_one_only",
    ),
    "B75": (
        "test_modes.py::test_what_was_not_sent_is_none_in_a_slot_that_held_it_before",
        "test_decoder.py::test_special_floats_come_out_bit_for_bit",
    ),
    "B76": (
        "test_modes.py::test_real_output_comes_out_bit_for_bit",
        "test_decoder.py::test_candidates_of_minus_one_are_kept_and_width_one_is_enough",
    ),
    "B77": (
        "test_decoder.py::test_special_floats_come_out_bit_for_bit",
        DOES_NOT_APPLY + "JSON of outputs: the client makes it; floats pass through unchanged",
    ),
    "B78": ("test_modes.py::test_requests_of_different_widths_share_a_pipeline",),
    "B79": (
        "test_decoder.py::test_the_first_and_the_last_id_are_tokens_like_any_other",
        DOES_NOT_APPLY + "text: the client makes it, ids pass through unchanged",
    ),
    "B80": (
        "test_decoder.py::test_the_bytes_of_a_step_and_a_frame_follow_the_width_asked_for",
        MEASURED + "benchmarks/pipeline.py",
    ),
    "B81": (
        "test_modes.py::test_work_is_spread_evenly_over_the_decoders",
        MEASURED + "benchmarks/pipeline.py",
    ),
    "B82": (MEASURED + "benchmarks/pipeline.py", MEASURED + "benchmarks/latency.py"),
    "B83": ("test_field_reports.py::test_the_default_number_of_decoders_follows_the_usable_cores",),
}


def test_every_report_of_the_group_stands_in_the_table() -> None:
    assert list(GROUP_F) == [f"B{number}" for number in range(70, 84)]
    assert all(GROUP_F.values())


@pytest.mark.parametrize("report", GROUP_F)
def test_what_the_table_names_is_there(report: str) -> None:
    for entry in GROUP_F[report]:
        if entry.startswith(DOES_NOT_APPLY):
            assert ":" in entry.removeprefix(DOES_NOT_APPLY), "name the feature and say why"
        elif entry.startswith(MEASURED):
            assert (ROOT / entry.removeprefix(MEASURED)).is_file()
        else:
            file_name, _, test = entry.partition("::")
            body = ast.parse((TESTS / file_name).read_text(encoding="utf-8")).body
            assert test in {node.name for node in body if isinstance(node, ast.FunctionDef)}


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
