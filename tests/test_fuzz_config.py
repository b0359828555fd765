"""Configuration from anywhere: a good configuration or a ConfigError, and nothing else."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import random
import re
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenpipe as tp
from tokenpipe import _native, cli
from tokenpipe.config import PipelineConfig
from tokenpipe.segment import Segment

FIELDS = [f.name for f in dataclasses.fields(PipelineConfig)]
FEW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(FEW, max_examples=5_000)

# Beside what hypothesis thinks of: what has broken a parser before.
ODD = (
    *(
        float("nan"),
        float("inf"),
        float("-inf"),
        -0.0,
        1e-320,
        10**400,
        -(10**400),
        2**63,
        -1,
        0,
        1,
    ),
    *("", " ", "\0", "a\0b", "\ud800", "\u0663", "\u00e9", "nan", "inf", "-0", "1e999", "9" * 5000),
    *(
        "1_0",
        "0x10",
        "true",
        "False",
        None,
        True,
        False,
        "a" * 300,
        "..",
        "a..b",
        "<broadcast>",
        "*",
    ),
)
anything = st.one_of(
    st.sampled_from(ODD),
    st.integers(),
    st.floats(),
    st.text(st.characters(), max_size=40),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)
near = st.one_of(
    st.integers(-1, 70), st.sampled_from([128, 256, 4096, 65536, 65537, 2**20, 2**26, 2**40])
)
values = st.one_of(anything, near, near.map(str), st.floats(0, 100).map(str))


def is_good(config: PipelineConfig) -> None:
    """It can be made again from each of its forms, fits its segment's header, and has a size."""
    assert PipelineConfig.from_json(config.to_json()) == config
    assert of_flags(config.to_cli_args()) == config
    assert len(config.to_json().encode()) < _native.CONFIG_BYTES
    assert config.plan()["core_bytes"] > 0
    assert config.health_host.isascii()


def of_flags(flags: list[str], **environment: str) -> PipelineConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    PipelineConfig.add_cli_args(parser)
    return PipelineConfig.from_cli_args(parser.parse_args(flags), environment)


def outcome(make: Callable[[], PipelineConfig], fields: Sequence[str]) -> None:
    """Makes one: it is good, or refused by a short text that names one of the fields."""
    try:
        config = make()
    except tp.ConfigError as error:
        refused = error
    else:
        is_good(config)
        return
    assert refused.field in fields
    assert len(str(refused)) < 2000, "a message is to be read"
    json.dumps(str(refused))


def check_fields(given: dict[str, Any]) -> None:
    outcome(lambda: PipelineConfig(**given), FIELDS)


def check_json(text: str) -> None:
    outcome(lambda: PipelineConfig.from_json(text), [*FIELDS, "JSON"])


def check_flags(given: dict[str, Any], in_environment: dict[str, Any]) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    environment = {f"TOKENPIPE_{n.upper()}": str(v) for n, v in in_environment.items()}
    outcome(lambda: of_flags(flags, **environment), FIELDS)


some = st.dictionaries(st.sampled_from(FIELDS), values, max_size=4)
broken_json = st.one_of(
    st.dictionaries(
        st.one_of(st.sampled_from(FIELDS), st.text(max_size=5)), values, max_size=4
    ).map(json.dumps),
    st.text(max_size=60),
    st.integers(0, 200_000).map(lambda n: "[" * n),
    st.integers(0, 2000).map(lambda n: PipelineConfig(name="x", num_decoders=1).to_json()[:n]),
)


@FEW
@given(some)
def test_any_fields_give_a_configuration_or_a_config_error(given: dict[str, Any]) -> None:
    check_fields(given)


@FEW
@given(broken_json)
def test_any_json_gives_a_configuration_or_a_config_error(text: str) -> None:
    check_json(text)


@FEW
@given(some, some)
def test_any_flags_give_a_configuration_or_a_config_error(
    given: dict[str, Any], in_environment: dict[str, Any]
) -> None:
    check_flags(given, in_environment)


@pytest.mark.full
@pytest.mark.timeout(900)
@MANY
@given(some, some, broken_json)
def test_any_configuration_many_times(
    given: dict[str, Any], in_environment: dict[str, Any], text: str
) -> None:
    check_fields(given)
    check_flags(given, in_environment)
    check_json(text)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_refuses_every_odd_value_or_works(name: str) -> None:
    for value in ODD:
        check_fields({name: value})
        check_json(json.dumps({name: value}))
        check_flags({name: value}, {})
        check_flags({}, {name: value})


def test_a_flag_cut_anywhere_is_a_configuration_or_an_error_of_argparse() -> None:
    rng = random.Random(1)
    for _ in range(300):
        flags = PipelineConfig(name="x", num_decoders=1).to_cli_args()
        at = rng.randrange(len(flags))
        flags[at] = flags[at][: rng.randrange(len(flags[at]) + 1)]
        try:
            is_good(of_flags(flags))
        except (tp.ConfigError, argparse.ArgumentError, SystemExit):
            continue


# --- the endpoint's address


@pytest.mark.parametrize("host", ["", " ", "*", "\0", "<broadcast>", "127.0.0.1\n", "\u0661.0.0.1"])
def test_no_host_is_not_every_network(host: str) -> None:
    """An empty address means every network to a socket; a template without a value gives one."""
    with pytest.raises(tp.ConfigError, match=r"0\.0\.0\.0 for every network"):
        PipelineConfig(health_host=host)
    with pytest.raises(tp.ConfigError, match="health_host"):
        of_flags([], TOKENPIPE_HEALTH_HOST=host)


@pytest.mark.parametrize("host", ["a..b", ".", "a" * 64, "::1"])
def test_a_host_that_cannot_be_listened_on_is_a_config_error(host: str, unique_name: str) -> None:
    from tokenpipe.health import HealthServer

    config = PipelineConfig(name=unique_name, health_host=host, max_num_seqs=4, num_decoders=1)
    with Segment.create(config) as segment, pytest.raises(tp.ConfigError, match="health_host"):
        HealthServer(segment)


# --- names that nobody reads


def warnings_of(
    caplog: pytest.LogCaptureFixture, flags: list[str], **environment: str
) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tokenpipe.config"):
        of_flags(flags, **environment)
    return [record.message for record in caplog.records]


def test_a_misspelt_variable_is_told_with_the_nearest_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert warnings_of(caplog, [], TOKENPIPE_RINGSLOTS="4") == [
        "environment variable TOKENPIPE_RINGSLOTS is not known and is ignored; did you mean "
        "TOKENPIPE_RING_SLOTS?"
    ]
    assert warnings_of(caplog, [], TOKENPIPE_XYZZY="4", TOKENPIPE_NAME="x") == [
        "environment variable TOKENPIPE_XYZZY is not known and is ignored"
    ]


def test_variables_that_others_read_are_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    known = ("FAULT", "SHARED", "DEBUG", "SANITIZE", "TEST_MARK", "DISABLE")
    service = ("PORT", "PORT_8089_TCP", "PORT_8089_TCP_ADDR", "SERVICE_HOST", "SERVICE_PORT_HTTP")
    others = {f"TOKENPIPE_{name}": "1" for name in known + service}
    assert warnings_of(caplog, [], TOKENPIPE="1", tokenpipe_ring_slots="1", **others) == []


def test_whom_the_environment_does_not_reach_is_not_told_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The coordinator of an owner gets every field by flag."""
    flags = PipelineConfig(name="x", num_decoders=1).to_cli_args()
    assert warnings_of(caplog, flags, TOKENPIPE_RINGSLOTS="4") == []


def test_the_variables_of_this_run_are_all_known(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(caplog, [], **os.environ) == []


# --- version


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert re.fullmatch(r"tokenpipe (\S+) \(layout of the shared memory: \d+\)\n", told)
    assert tp.__version__ in told
    assert metadata.version("tokenpipe") == tp.__version__
    assert str(_native.LAYOUT_VERSION) in told


# --- ids


@pytest.mark.parametrize("request_id", ["\0", "a\0b", "a\0", "\n", "\x1b[31m", "\u00e9\U0001f600"])
def test_an_id_is_opaque_also_with_a_nul_in_it(request_id: str, unique_name: str) -> None:
    """Carried byte for byte, told from its neighbours, and back in the final of a later client."""
    from inprocess import InProcess

    config = PipelineConfig(name=unique_name, max_num_seqs=4, num_decoders=1, top_logprobs=0)
    with InProcess(config) as pipe:
        admission = pipe.submit(tp.Request(request_id, [1], [2]))
        other = pipe.submit(tp.Request(request_id + "x", [1], [2]))
        assert _native.request_id_of(pipe.segment.core, admission.row, admission.generation) == (
            request_id.encode()
        )
        pipe.writer.save_output(
            [2, 3], generations=[admission.generation, other.generation], rows=[0, 1]
        )
        outputs = pipe.outputs()
        assert [(o.request_id, o.finished) for o in outputs] == [
            (request_id, True),
            (request_id + "x", False),
        ]
