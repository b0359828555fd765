"""PipelineConfig: each setting once, as field, flag and variable; what cannot work is refused."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenpipe as tp
from tokenpipe import _native
from tokenpipe.config import PipelineConfig, default_decoders, usable_cores
from tokenpipe.errors import ExitCode

FIELDS = {field.name: field for field in dataclasses.fields(PipelineConfig)}
UNITS = ("_s", "_us", "_bytes")

# Another value than the default of each field, as a flag's text and as it must come out.
OTHER: dict[str, tuple[str, Any]] = {
    "name": ("some.name-1", "some.name-1"),
    "num_decoders": ("3", 3),
    "max_num_seqs": ("17", 17),
    "top_logprobs": ("0", 0),
    "max_draft_tokens": ("6", 6),
    "max_eos_ids": ("3", 3),
    "max_request_id_bytes": ("64", 64),
    "num_blocks": ("1000", 1000),
    "block_size": ("16", 16),
    "max_pooling_floats": ("768", 768),
    "command_slots": ("16", 16),
    "ring_slots": ("16", 16),
    "ring_bytes": ("10000000", 10_000_000),
    "output_slots": ("8", 8),
    "source_slots": ("4", 4),
    "spin_us": ("0", 0.0),
    "source": ("sysv", "sysv"),
    "sysv_op": ("get_output_topk", "get_output_topk"),
    "sysv_generation": ("g1", "g1"),
    "sysv_queue_id": ("8000", 8000),
    "sysv_folder": ("/opt", "/opt"),
    "sysv_leftovers": ("keep", "keep"),
    "zmq_socket": ("/tmp/z.socket", "/tmp/z.socket"),
    "zmq_max_message_bytes": ("8192", 8192),
    "quarantine_s": ("2.5", 2.5),
    "heartbeat_interval_s": ("0.05", 0.05),
    "stall_timeout_s": ("1.5", 1.5),
    "start_timeout_s": ("7", 7.0),
    "max_restarts": ("3", 3),
    "restart_window_s": ("12.5", 12.5),
    "restart_backoff_s": ("0", 0.0),
    "drain_timeout_s": ("0", 0.0),
    "orphan_grace_s": ("0.25", 0.25),
    "abort_timeout_s": ("9", 9.0),
    "prefill_timeout_s": ("11", 11.0),
    "health_host": ("0.0.0.0", "0.0.0.0"),
    "health_port": ("8080", 8080),
    "role": ("prefill", "prefill"),
    "speculative_method": ("mtp", "mtp"),
    "num_speculative_tokens": ("3", 3),
    "enable_draft_logprob": ("true", True),
    "draft_wait_s": ("0.5", 0.5),
    "internal_adapter": ("yes", True),
    "report_acknowledgements": ("1", True),
    "metrics_prefix": ("", ""),
    "log_level": ("debug", "debug"),
}
SPECULATIVE = {"speculative_method": "ngram", "num_speculative_tokens": 1, "max_draft_tokens": 5}
MOST_DRAFTS = _native.MAX_DRAFT_TOKENS

# (field, value, what the text must name beside the field and the value)
BAD: list[tuple[str, Any, tuple[str, ...]]] = [
    ("name", "a/b", ("letters, digits",)),
    ("name", "x" * 65, ("64",)),
    ("name", "sp ace", ("letters, digits",)),
    ("name", "\0", ("letters, digits",)),
    ("name", 7, ("str",)),
    ("num_decoders", -1, ("1", "16")),
    ("num_decoders", _native.MAX_DECODERS + 1, ("1", str(_native.MAX_DECODERS))),
    ("max_num_seqs", 0, ("1", "65536")),
    ("max_num_seqs", 65537, ("1", "65536")),
    ("max_num_seqs", 2.0, ("int",)),
    ("max_num_seqs", True, ("int",)),
    ("max_num_seqs", "8", ("int",)),
    ("max_num_seqs", None, ("int",)),
    ("top_logprobs", -1, ("0", "1024")),
    ("top_logprobs", 1025, ("0", "1024")),
    ("max_draft_tokens", 0, ("1", str(MOST_DRAFTS))),
    ("max_draft_tokens", MOST_DRAFTS + 1, ("1", str(MOST_DRAFTS))),
    ("max_eos_ids", 0, ("1", "4096")),
    ("max_eos_ids", 4097, ("1", "4096")),
    ("max_request_id_bytes", 0, ("8", "4096")),
    ("max_request_id_bytes", 4104, ("8", "4096")),
    ("max_request_id_bytes", 12, ("multiple of 8",)),
    ("num_blocks", -1, ("0", str(2**26))),
    ("num_blocks", 2**26 + 1, ("0", str(2**26))),
    ("block_size", 0, ("1", "65536")),
    ("max_pooling_floats", -1, ("0", str(2**20))),
    ("max_pooling_floats", 2**20 + 1, ("0", str(2**20))),
    ("command_slots", 15, ("16", "65536")),
    ("command_slots", 65537, ("16", "65536")),
    ("ring_slots", 1, ("2", "65536")),
    ("ring_slots", 131072, ("2", "65536")),
    ("ring_slots", 48, ("power of two", "32", "64")),
    ("output_slots", 0, ("2", "65536")),
    ("output_slots", 3, ("power of two", "2", "4")),
    ("source_slots", 1, ("2", "65536")),
    ("source_slots", 12, ("power of two", "8", "16")),
    ("ring_bytes", -1, ("0",)),
    ("ring_bytes", 2**40 + 1, (str(2**40),)),
    ("health_port", -1, ("0", "65535")),
    ("health_port", 65536, ("0", "65535")),
    ("spin_us", -0.5, ("0",)),
    ("spin_us", float("nan"), ("0",)),
    ("spin_us", "1", ("float",)),
    ("heartbeat_interval_s", 0.0, ("0.001", "10")),
    ("heartbeat_interval_s", 11.0, ("0.001", "10")),
    ("stall_timeout_s", 0.3, ("4 x heartbeat_interval_s", "0.4")),
    ("stall_timeout_s", -1.0, ("0",)),
    ("start_timeout_s", 0.0, ("0.1",)),
    ("start_timeout_s", float("inf"), ("0.1",)),
    ("drain_timeout_s", -1.0, ("0",)),
    ("orphan_grace_s", -1.0, ("0",)),
    ("abort_timeout_s", float("inf"), ("0",)),
    ("prefill_timeout_s", -1.0, ("0",)),
    ("max_restarts", -1, ("0", str(10**9))),
    ("max_restarts", 1.0, ("int",)),
    ("restart_window_s", float("nan"), ("0",)),
    ("restart_backoff_s", 61.0, ("0", "60")),
    ("draft_wait_s", -0.1, ("0",)),
    ("source", "carrier pigeon", ("shm", "sysv", "zmq")),
    ("sysv_op", "get_input", ("get_output", "speculate_get_output_topk")),
    ("sysv_op", "get_output_topk", ("--source sysv",)),
    ("sysv_generation", "g5", ("g1", "g4")),
    ("sysv_queue_id", 2**20, ("0", str(2**20 - 1))),
    ("sysv_folder", "/opt", ("--source sysv",)),
    ("sysv_leftovers", "lose", ("drain", "keep")),
    ("quarantine_s", -1.0, ("0",)),
    ("zmq_socket", "/dev/shm/x", ("--source zmq",)),
    ("zmq_max_message_bytes", 100, ("4096", str(2**31 - 1))),
    ("zmq_max_message_bytes", 8192, ("--source zmq",)),
    ("quarantine_s", 3.0, ("--source sysv",)),
    ("role", "both", ("mixed", "prefill", "decode")),
    ("speculative_method", "magic", ("none", "mtp", "ngram")),
    ("num_speculative_tokens", -1, ("0", str(MOST_DRAFTS - 1))),
    ("num_speculative_tokens", MOST_DRAFTS, ("0", str(MOST_DRAFTS - 1))),
    ("num_speculative_tokens", 1, ("--speculative-method",)),
    ("enable_draft_logprob", True, ("--speculative-method",)),
    ("enable_draft_logprob", 1, ("bool",)),
    ("internal_adapter", "true", ("bool",)),
    ("report_acknowledgements", 1, ("bool",)),
    ("metrics_prefix", "fast deploy", ("prefix of a metric",)),
    ("metrics_prefix", "9a", ("prefix of a metric",)),
    ("health_host", 127, ("str",)),
    ("log_level", "loud", ("debug", "info", "warning", "error")),
]

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SPECULATION = st.integers(2, MOST_DRAFTS).flatmap(
    lambda depth: st.fixed_dictionaries(
        {
            "speculative_method": st.sampled_from(["mtp", "ngram"]),
            "max_draft_tokens": st.just(depth),
            "num_speculative_tokens": st.integers(1, depth - 1),
        },
        optional={"enable_draft_logprob": st.booleans()},
    )
)

PLAIN = st.fixed_dictionaries(
    {},
    optional={
        "name": st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True),
        "num_decoders": st.integers(1, 3),
        "max_num_seqs": st.integers(3, 600),
        "top_logprobs": st.integers(0, 40),
        "max_draft_tokens": st.integers(1, 8),
        "max_eos_ids": st.integers(1, 40),
        "max_request_id_bytes": st.integers(1, 40).map(lambda n: 8 * n),
        "num_blocks": st.integers(0, 5000),
        "block_size": st.integers(1, 128),
        "command_slots": st.integers(16, 500),
        "max_pooling_floats": st.integers(0, 2000),
        "max_restarts": st.integers(0, 10**9),
        "restart_window_s": st.floats(0, 1e6),
        "restart_backoff_s": st.floats(0, 60),
        "prefill_timeout_s": st.floats(0, 1e6),
        "draft_wait_s": st.floats(0, 1e6),
        "role": st.sampled_from(["mixed", "prefill", "decode"]),
        "internal_adapter": st.booleans(),
        "report_acknowledgements": st.booleans(),
        "metrics_prefix": st.from_regex(r"([a-zA-Z_:][a-zA-Z0-9_:]{,20}|)", fullmatch=True),
        "ring_bytes": st.integers(0, 3).map(lambda n: n * 10**9),
        "output_slots": st.integers(1, 10).map(lambda n: 2**n),
        "source_slots": st.integers(1, 10).map(lambda n: 2**n),
        "spin_us": st.floats(0, 1e6),
        "heartbeat_interval_s": st.floats(0.001, 0.25),
        "stall_timeout_s": st.sampled_from([0.0, 1.0]) | st.floats(1, 1e6),
        "start_timeout_s": st.floats(0.1, 1e6),
        "drain_timeout_s": st.floats(0, 1e6) | st.integers(0, 10),
        "health_host": st.sampled_from(["127.0.0.1", "::1", "localhost", "0.0.0.0"]),
        "health_port": st.integers(0, 65535),
        "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
    },
)
CONFIGS = st.tuples(PLAIN, st.just({}) | SPECULATION).map(lambda both: {**both[0], **both[1]})


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    made.add_argument("--engines-own", default="x")
    PipelineConfig.add_cli_args(made)
    return made


def parsed(*args: str, **environment: str) -> PipelineConfig:
    return PipelineConfig.from_cli_args(parser().parse_args(args), environment)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def needed_for(name: str) -> dict[str, Any]:
    """Other fields that must change with this one."""
    if name in ("speculative_method", "num_speculative_tokens", "enable_draft_logprob"):
        return {other: value for other, value in SPECULATIVE.items() if other != name}
    if name.startswith("sysv_") or name == "quarantine_s":
        return {"source": "sysv"}
    if name.startswith("zmq_"):
        return {"source": "zmq"}
    return {"heartbeat_interval_s": 0.1} if name == "stall_timeout_s" else {}


def as_variables(values: dict[str, Any]) -> dict[str, str]:
    return {f"TOKENPIPE_{name.upper()}": str(value) for name, value in values.items()}


# --- defaults


def test_the_defaults_work_and_are_those_of_the_fields() -> None:
    config = PipelineConfig()
    found = {n: getattr(config, n) for n in FIELDS if n not in ("name", "num_decoders")}
    assert found == {n: FIELDS[n].default for n in found}
    assert config.num_decoders == min(default_decoders(), config.max_num_seqs)
    assert (config.max_num_seqs, config.top_logprobs, config.ring_slots) == (256, 20, 64)
    assert config.health_host == "127.0.0.1", "loopback unless asked otherwise"


def test_each_default_name_is_new() -> None:
    assert len({PipelineConfig().name for _ in range(20)}) == 20
    assert re.fullmatch(r"tp-[0-9a-f]{16}", PipelineConfig().name)


def test_a_configuration_cannot_be_changed_afterwards() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        PipelineConfig().ring_slots = 128  # type: ignore[misc]


def test_a_whole_number_is_a_number_of_seconds() -> None:
    config = PipelineConfig(start_timeout_s=3)
    assert (config.start_timeout_s, type(config.start_timeout_s)) == (3.0, float)


def test_one_row_has_one_decoder() -> None:
    assert PipelineConfig(max_num_seqs=1).num_decoders == 1


# --- each field


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_has_a_group_a_help_and_a_unit(name: str) -> None:
    about = FIELDS[name].metadata
    assert about["help"]
    assert about["group"]
    if type(FIELDS[name].default) is float:
        assert name.endswith(UNITS), "a number that is not whole is an amount of something"
    others = set(FIELDS) - {name}
    assert all(FIELDS[other].metadata["help"] != about["help"] for other in others)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_its_flag_and_its_variable(name: str) -> None:
    assert set(OTHER) == set(FIELDS), "a field is not looked at here"
    text, wanted = OTHER[name]
    needed = as_variables(needed_for(name))
    for config in (
        parsed(flag(name), text, **needed),
        parsed(f"{flag(name)}={text}", **needed),
        parsed(**{f"TOKENPIPE_{name.upper()}": text}, **needed),
        PipelineConfig(**{name: wanted}, **needed_for(name)),
    ):
        got = getattr(config, name)
        assert (got, type(got)) == (wanted, type(FIELDS[name].default))
        assert got != FIELDS[name].default


@pytest.mark.parametrize("name", FIELDS)
def test_a_flag_wins_over_the_environment_and_that_over_the_default(name: str) -> None:
    text, wanted = OTHER[name]
    variable, needed = f"TOKENPIPE_{name.upper()}", as_variables(needed_for(name))
    bad = {variable: "not even valid"}
    assert getattr(parsed(flag(name), text, **bad, **needed), name) == wanted
    assert getattr(parsed(**{variable: text}, **needed), name) == wanted
    if name not in ("name", "num_decoders"):
        assert getattr(parsed(), name) == FIELDS[name].default


@pytest.mark.parametrize("name", [n for n in FIELDS if type(FIELDS[n].default) is bool])
def test_a_bool_is_told_in_words_and_a_bare_flag_is_true(name: str) -> None:
    needed = as_variables(needed_for(name))
    variable = f"TOKENPIPE_{name.upper()}"
    assert getattr(parsed(flag(name), **needed), name) is True
    for text, wanted in (("1", True), ("TRUE", True), ("yes", True)):
        assert getattr(parsed(**{variable: text}, **needed), name) is wanted
    for text in ("0", "False", "no"):
        assert getattr(parsed(**{variable: text}, **needed), name) is False
        assert getattr(parsed(f"{flag(name)}={text}", **{variable: "1"}, **needed), name) is False
    with pytest.raises(tp.ConfigError, match="true or false"):
        parsed(**{variable: "2"}, **needed)


def test_the_environment_is_the_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENPIPE_MAX_NUM_SEQS", "31")
    assert PipelineConfig.from_cli_args(parser().parse_args([])).max_num_seqs == 31
    assert PipelineConfig().max_num_seqs == 256, "the environment is read with the flags only"


def test_help_groups_the_flags_and_names_default_and_variable() -> None:
    text = " ".join(parser().format_help().split())
    for name, field in FIELDS.items():
        assert f"tokenpipe: {field.metadata['group']}" in text
        assert flag(name) in text
        shown = field.metadata.get("shown", field.default)
        about = f"{field.metadata['help']} (default {shown}; TOKENPIPE_{name.upper()})"
        # argparse breaks lines at hyphens too
        assert about.replace(" ", "") in text.replace(" ", ""), name
    assert "--engines-own" in text


def test_the_flags_leave_the_engine_s_own_alone() -> None:
    args = parser().parse_args(["--ring-slots", "32", "--engines-own", "y"])
    assert args.engines_own == "y"
    assert PipelineConfig.from_cli_args(args, {}).ring_slots == 32


# --- what cannot work


@pytest.mark.parametrize(("name", "value", "limits"), BAD)
def test_a_bad_value_is_refused_with_field_value_and_limit(
    name: str, value: Any, limits: tuple[str, ...]
) -> None:
    with pytest.raises(tp.ConfigError) as caught:
        PipelineConfig(**{name: value})
    error = caught.value
    assert (error.field, error.exit_code) == (name, ExitCode.BAD_CONFIG)
    assert error.value is value or error.value == value
    assert str(error).startswith(f"{name} = {value!r}: ")
    for limit in limits:
        assert limit in error.why


def test_every_field_with_a_limit_is_tried() -> None:
    assert {name for name, _, _ in BAD} == set(FIELDS)


@pytest.mark.parametrize("name", [n for n in FIELDS if type(FIELDS[n].default) is not str])
@pytest.mark.parametrize("text", ["", "many", "1e", "0x10"])
def test_a_flag_that_is_no_number_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(tp.ConfigError) as caught:
        parsed(f"{flag(name)}={text}")
    assert (caught.value.field, caught.value.value) == (name, text)
    with pytest.raises(tp.ConfigError, match=f"^{name} = "):
        parsed(**{f"TOKENPIPE_{name.upper()}": text})


def test_there_are_no_more_decoders_than_rows() -> None:
    with pytest.raises(tp.ConfigError, match=r"^num_decoders = 3: must be 1 to 2$"):
        PipelineConfig(max_num_seqs=2, num_decoders=3)


def test_a_stall_timeout_of_zero_is_never() -> None:
    assert PipelineConfig(stall_timeout_s=0, heartbeat_interval_s=10).stall_timeout_s == 0


def test_a_digit_of_another_alphabet_is_not_a_name() -> None:
    with pytest.raises(tp.ConfigError, match=r"^name = "):
        PipelineConfig(name="\u0663")


@pytest.mark.parametrize("name", ["health_host", "metrics_prefix"])
def test_a_text_that_no_segment_can_hold_is_refused(name: str) -> None:
    with pytest.raises(tp.ConfigError, match=f"^{name} = "):
        PipelineConfig(**{name: "a" * 256})


# --- ring_bytes


@unhurried
@given(st.integers(1, 600), st.integers(0, 40), st.integers(1, 8), st.integers(2, 2**34 - 1))
def test_ring_bytes_is_the_most_slots_that_fit(
    rows: int, top: int, draft: int, ring_bytes: int
) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": rows, "top_logprobs": top, "num_decoders": 1}
    sizes["max_draft_tokens"] = draft
    slot_bytes = PipelineConfig(**sizes).plan()["slot_bytes"]
    if ring_bytes < 2 * slot_bytes:
        with pytest.raises(tp.ConfigError, match=f"a slot is {slot_bytes} bytes"):
            PipelineConfig(**sizes, ring_bytes=ring_bytes)
        return
    slots = PipelineConfig(**sizes, ring_bytes=ring_bytes).ring_slots
    assert slots & (slots - 1) == 0
    assert slots * slot_bytes <= ring_bytes
    assert slots == 65536 or 2 * slots * slot_bytes > ring_bytes


def test_a_ring_too_small_for_two_slots_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(tp.ConfigError) as caught:
        PipelineConfig(max_num_seqs=512, top_logprobs=20, max_draft_tokens=6, ring_bytes=1000)
    slot_bytes = PipelineConfig(max_num_seqs=512, max_draft_tokens=6).plan()["slot_bytes"]
    assert (caught.value.field, caught.value.value) == ("ring_bytes", 1000)
    for fact in (f"{slot_bytes} bytes", "512 rows", "6 tokens", "21 candidates", "at least 2"):
        assert fact in caught.value.why


def test_ring_slots_and_ring_bytes_are_not_given_both() -> None:
    with pytest.raises(tp.ConfigError, match=r"^ring_bytes = 100000000: .*--ring-slots"):
        parsed("--ring-slots", "32", "--ring-bytes", "100000000")


# --- there and back


@unhurried
@given(CONFIGS)
def test_json_gives_the_same_configuration(values: dict[str, Any]) -> None:
    config = PipelineConfig(**values)
    again = PipelineConfig.from_json(config.to_json())
    assert again == config
    assert again.digest() == config.digest()
    assert len(config.to_json()) < _native.CONFIG_BYTES


@unhurried
@given(CONFIGS)
def test_its_flags_give_the_same_configuration(values: dict[str, Any]) -> None:
    config = PipelineConfig(**values)
    assert parsed(*config.to_cli_args()) == config


@unhurried
@given(CONFIGS)
def test_its_flags_leave_nothing_to_the_environment(values: dict[str, Any]) -> None:
    config = PipelineConfig(**values)
    # The coordinator inherits it, but the configuration was made without it.
    environment = {f"TOKENPIPE_{name.upper()}": text for name, (text, _) in OTHER.items()}
    assert parsed(*config.to_cli_args(), **environment) == config


def test_its_flags_name_every_field_once() -> None:
    flags = [arg.partition("=")[0] for arg in PipelineConfig().to_cli_args()]
    assert flags == [flag(name) for name in FIELDS]


def test_another_configuration_has_another_digest() -> None:
    same: dict[str, Any] = {"name": "a", "num_decoders": 1, **SPECULATIVE}
    one = PipelineConfig(**same)
    assert one.digest() == PipelineConfig(**same).digest()
    for name, (_, value) in OTHER.items():
        other = PipelineConfig(**{**same, **needed_for(name), name: value})
        assert other.digest() != one.digest(), name
        follows = {"ring_slots"} if name == "ring_bytes" else set()
        if other.source == "sysv":
            follows = {"source", "sysv_queue_id", "sysv_folder"}
        if other.source == "zmq":
            follows = {"source", "zmq_socket"}
        assert set(one.differences(other, ())) == {name} | follows
        assert one.differences(other, (name, *follows)) == []


@pytest.mark.parametrize(("drafts", "depth"), [(0, 4), (4, 4), (1, 1)])
def test_drafts_and_the_bonus_token_fit_one_step(drafts: int, depth: int) -> None:
    with pytest.raises(tp.ConfigError, match=f"max_draft_tokens - 1 = {depth - 1}") as caught:
        PipelineConfig(
            speculative_method="mtp", num_speculative_tokens=drafts, max_draft_tokens=depth
        )
    assert (caught.value.field, caught.value.value) == ("num_speculative_tokens", drafts)


def test_the_options_are_the_decoders_part_of_the_configuration() -> None:
    names = _native.dtypes()["HEADER"]["options"].names
    config = PipelineConfig(role="decode", internal_adapter=True, **SPECULATIVE)
    assert set(config.options()) == set(names or ()) - {"pad_"}
    assert config.options() == {
        "role": 2,
        "internal_adapter": 1,
        "enable_draft_logprob": 0,
        "num_speculative_tokens": 1,
        "source": 0,
        "report_acknowledgements": 0,
    }


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"ring_slots": 3}', "ring_slots = 3"),
        ('{"ringslots": 4}', "JSON = 'ringslots': no such field; did you mean ring_slots?"),
        ("{", "JSON = '{'"),
        ("[]", "JSON = '[]'"),
    ],
)
def test_json_is_checked_again(text: str, found: str) -> None:
    with pytest.raises(tp.ConfigError, match=re.escape(found)):
        PipelineConfig.from_json(text)


def test_the_plan_is_of_the_sizes() -> None:
    config = PipelineConfig(max_num_seqs=9, num_decoders=2)
    assert config.plan() == _native.plan(config.sizes())
    assert set(config.sizes()) == {*(_native.dtypes()["SIZES"].names or ())} - {"pad_"}


# --- cores (field report B83)


def quota(folder: Path, text: str) -> str:
    path = folder / "cpu.max"
    path.write_text(text)
    return str(path)


def pin(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))


@pytest.mark.parametrize(
    ("affinity", "cpu_max", "cores"),
    [
        (8, "max 100000\n", 8.0),
        (8, "150000 100000\n", 1.5),
        (8, "1600000 100000\n", 8.0),
        (1, "400000 100000\n", 1.0),
        (80, "200000 100000\n", 2.0),
        (6, "", 6.0),
    ],
)
def test_usable_cores_are_the_affinity_cut_by_the_quota(
    affinity: int, cpu_max: str, cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, affinity)
    assert usable_cores(quota(tmp_path, cpu_max)) == cores


def test_without_a_quota_the_affinity_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin(monkeypatch, 5)
    assert usable_cores(str(tmp_path / "none")) == 5.0


@pytest.mark.parametrize(
    ("affinity", "cpu_max", "decoders"),
    [
        (1, "max 100000", 1),
        (3, "max 100000", 1),
        (4, "max 100000", 2),
        (64, "max 100000", 2),
        (64, "150000 100000", 1),
        (64, "50000 100000", 1),
        (2, "800000 100000", 1),
    ],
)
def test_decoders_by_default_follow_the_usable_cores(
    affinity: int,
    cpu_max: str,
    decoders: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pin(monkeypatch, affinity)
    injected = functools.partial(usable_cores, quota(tmp_path, cpu_max))
    monkeypatch.setattr("tokenpipe.config.usable_cores", injected)
    assert default_decoders() == decoders
    assert PipelineConfig().num_decoders == decoders
    assert PipelineConfig(max_num_seqs=1).num_decoders == 1
    assert PipelineConfig(num_decoders=7).num_decoders == 7, "an explicit number wins"
