"""The shared bytes: each has a name, its place follows from the sizes, and the version tells."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokenpipe as tp
from tokenpipe import _native, layout
from tokenpipe.config import PipelineConfig
from tokenpipe.segment import Segment

HEADER_TEXT = (Path(__file__).resolve().parents[1] / "cuda_ops" / "layout.h").read_text()
CONSTANTS = {
    name: int(value)
    for name, value in re.findall(r"\b(TP_[A-Z_]+) = (\d+)\b", HEADER_TEXT)
    if name.endswith(("_VERSION", "_BYTES", "_ALIGN")) or name.startswith("TP_MAX_")
}
STRUCTS = re.findall(r"^\} (tp_\w+);$", HEADER_TEXT, re.MULTILINE)
LINE, PAGE, COLUMN = (CONSTANTS[f"TP_{n}"] for n in ("LINE_BYTES", "PAGE_BYTES", "COLUMN_ALIGN"))

# tp_options stands inside the header only.
assert layout.HEADER.fields is not None
DTYPES = {"OPTIONS": layout.HEADER.fields["options"][0], **layout.DTYPES}
POOLING, PROMPT = 8, 16  # TP_STEP_*

# Of every version that a run may meet. A new version gets a new line here, the old ones stay.
DIGESTS = {
    1: "730f0e29399c474c0b69ba9c7d771655bfa83f238766457cb09c669a5378a2ce",
    5: "82b387e48224a410e72c84926e893be78fa903f30ece3dba1192b625ac6d8383",
    6: "a7a5e027a406278adf1ee9d2dac90034a14a3283fa4b57e8bedee54288144f27",
    7: "6c4255b484f6af5140144b1b0ac048e39f47d96529c48d203cb27476bc66cda0",
    8: "4b888134f53cb755c76d375d4f98907a735343df008ca7c24929ed331a5ed275",
    9: "fe82263f5f600434b328beebaafdab8f5e84e784794d548f2257cdc03c67e316",
    10: "f02a7e3bf20175e5e07bc1fea6b49a5606cfc07e49472966aced4527ab67ab94",
    11: "703c83cb09d5d4510fa00329dedfc26819c1c0df53d34a2bc1360d9bd9635410",
}

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

SIZES = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 600),
        "top_logprobs": st.integers(0, 40),
        "max_draft_tokens": st.integers(1, 8),
        "num_decoders": st.integers(1, 16),
        "ring_slots": st.sampled_from([2, 4, 64]),
        "output_slots": st.sampled_from([2, 8, 64]),
        "source_slots": st.sampled_from([2, 16]),
        "command_slots": st.integers(1, 300),
        "num_blocks": st.integers(0, 5000),
        "block_size": st.integers(1, 128),
        "max_eos_ids": st.integers(1, 33),
        "max_request_id_bytes": st.integers(1, 40).map(lambda n: 8 * n),
        "max_pooling_floats": st.sampled_from([0, 1, 7, 3000]),
        "raw_bytes": st.sampled_from([0, 2080, 530_472]),
    }
)


def struct_name(key: str) -> str:
    return f"tp_{key.lower()}"


def fields(dtype: np.dtype[Any]) -> Iterator[tuple[str, int, np.dtype[Any]]]:
    """Each field as (name, offset, dtype), in the order of their offsets."""
    assert dtype.fields is not None
    named = ((name, int(entry[1]), entry[0]) for name, entry in dtype.fields.items())
    yield from sorted(named, key=lambda field: field[1])


def described(dtype: np.dtype[Any]) -> str:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return f"{described(base)}{list(shape)}"
    if dtype.fields is None:
        return dtype.str
    inner = ", ".join(f"{name} @{at} {described(of)}" for name, at, of in fields(dtype))
    return f"{dtype.itemsize} {{{inner}}}"


def digest() -> str:
    """A hash of every dtype, and of where the parts lie for one set of sizes."""
    lines = [f"{key} {described(dtype)}" for key, dtype in sorted(DTYPES.items())]
    config = PipelineConfig(max_num_seqs=37, top_logprobs=5, max_draft_tokens=3, num_decoders=3)
    lines.append(str(sorted(config.plan().items())))
    lines.append(str(sorted(_native.step_columns(37, 90, 6, 3).items())))
    lines.append(str(sorted(_native.step_columns(37, 37, 768, POOLING).items())))
    lines.append(str(_native.frame_columns(13, 30, 6, 4, 9, 128, 0)))
    lines.append(str(_native.frame_columns(13, 13, 768, 0, 9, 128, POOLING)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


# --- the structs


def test_every_struct_of_the_header_has_a_dtype() -> None:
    assert {struct_name(key) for key in DTYPES} == set(STRUCTS)


@pytest.mark.parametrize("key", sorted(DTYPES))
def test_every_byte_belongs_to_a_named_field(key: str) -> None:
    dtype, end = DTYPES[key], 0
    for name, at, of in fields(dtype):
        assert at == end, f"bytes {end} to {at} of {struct_name(key)}, before {name}, have no name"
        end = at + of.itemsize
    assert end == dtype.itemsize, f"bytes {end} to {dtype.itemsize} of {struct_name(key)}"


@pytest.mark.parametrize("key", sorted(DTYPES))
def test_a_struct_inside_a_struct_has_a_dtype_of_its_own(key: str) -> None:
    known = {described(dtype) for dtype in DTYPES.values()}
    for name, _, of in fields(DTYPES[key]):
        inner = of.subdtype[0] if of.subdtype is not None else of
        assert inner.fields is None or described(inner) in known, name


@pytest.mark.parametrize("key", sorted(DTYPES))
def test_a_dtype_is_as_large_as_the_header_says(key: str) -> None:
    asserted = re.search(rf"TP_ASSERT_SIZE\({struct_name(key)}, (.+)\);", HEADER_TEXT)
    assert asserted is not None, f"the header asserts no size of {struct_name(key)}"
    size = eval(asserted[1], {"__builtins__": {}}, CONSTANTS)
    assert DTYPES[key].itemsize == size


def test_every_field_is_aligned_to_its_own_size() -> None:
    def misaligned(key: str, dtype: np.dtype[Any], begin: int) -> Iterator[str]:
        for name, at, of in fields(dtype):
            base = of.subdtype[0] if of.subdtype is not None else of
            if base.fields is not None:
                yield from misaligned(f"{key}.{name}", base, begin + at)
            elif base.kind in "iuf" and (begin + at) % base.itemsize:
                yield f"{key}.{name}"

    assert not [bad for key, of in DTYPES.items() for bad in misaligned(key, of, 0)]


def test_the_built_module_is_of_this_header() -> None:
    assert CONSTANTS["TP_LAYOUT_VERSION"] == _native.LAYOUT_VERSION
    assert CONSTANTS["TP_MAX_DECODERS"] == _native.MAX_DECODERS
    assert CONSTANTS["TP_MAX_DRAFT_TOKENS"] == _native.MAX_DRAFT_TOKENS
    assert CONSTANTS["TP_CONFIG_BYTES"] == _native.CONFIG_BYTES
    for prefix, head in (("CORE", layout.HEADER), ("SOURCE", layout.SOURCE)):
        magic = re.search(rf"TP_{prefix}_MAGIC UINT64_C\((0x[0-9a-f]+)\)", HEADER_TEXT)
        assert magic is not None
        assert int(magic[1], 16) == getattr(_native, f"{prefix}_MAGIC")
        assert head.fields is not None
        assert head.fields["owner_pid"][1] == getattr(_native, f"{prefix}_PID_OFFSET")
        assert head.fields["version"][1] == 8, "attach reads the version before it maps the rest"


def test_the_states_are_those_of_the_header() -> None:
    named = re.findall(r"TP_STATE_(\w+) = (\d+)", HEADER_TEXT)
    assert {name: int(value) for name, value in named} == {s.name: s for s in tp.PipelineState}


def test_a_changed_layout_has_a_new_version() -> None:
    now, version = digest(), _native.LAYOUT_VERSION
    assert version in DIGESTS, f"add `{version}: {now!r}` to DIGESTS of this file"
    assert now == DIGESTS[version], (
        "shared bytes have changed their meaning and the version has not: an older process would "
        "attach and misread them. Raise TP_LAYOUT_VERSION in cuda_ops/layout.h and add to DIGESTS "
        f"of this file `{version + 1}: {now!r}`. As long as nobody runs version {version}, its "
        "line may be replaced instead."
    )


# --- the parts of the segments


def parts_of(sizes: dict[str, int], plan: dict[str, int]) -> dict[str, list[tuple[str, int, int]]]:
    """Parts of each segment as (name, bytes, alignment), in the order of layout.h."""
    rows, decoders = sizes["max_num_seqs"], sizes["num_decoders"]
    of = {key: dtype.itemsize for key, dtype in DTYPES.items()}
    core = [
        ("roles", of["ROLE"] * (2 + decoders), LINE),
        ("ring", of["RING"], LINE),
        ("consumers", of["CONSUMER"] * decoders, LINE),
        ("decoders", of["DECODER"] * decoders, LINE),
        ("client", of["CLIENT"], LINE),
        ("admitted", 8 * rows, LINE),
        ("freed", 8 * rows, LINE),
        ("marks", of["MARK"] * rows, LINE),
        ("admissions", of["ADMISSION"] * rows, LINE),
        ("ids", sizes["max_request_id_bytes"] * rows, LINE),
        ("eos", 4 * sizes["max_eos_ids"] * rows, LINE),
        ("progress", 2 * of["PROGRESS"] * rows, LINE),
        ("blocks", of["BLOCK"] * sizes["num_blocks"], LINE),
        ("commands", plan["command_bytes"] * sizes["command_slots"], LINE),
        ("slots", plan["slot_bytes"] * sizes["ring_slots"], PAGE),
        ("frames", plan["frame_bytes"] * sizes["output_slots"] * decoders, PAGE),
    ]
    source = [
        ("control", 8 * rows, LINE),
        ("exported", of["EXPORT"] + 64 * sizes["source_slots"], LINE),
        ("source_steps", plan["slot_bytes"] * sizes["source_slots"], PAGE),
    ]
    return {"core": core, "source": source}


@unhurried
@given(SIZES)
def test_parts_are_aligned_and_do_not_overlap(sizes: dict[str, int]) -> None:
    plan = _native.plan(sizes)
    heads = {"core": layout.HEADER.itemsize, "source": layout.SOURCE.itemsize}
    named = {"slot_bytes", "frame_bytes", "command_bytes", "core_bytes", "source_bytes"}
    for segment, parts in parts_of(sizes, plan).items():
        end = heads[segment]
        for name, num_bytes, alignment in parts:
            named.add(name)
            assert plan[name] % alignment == 0, name
            assert end <= plan[name] < end + alignment, f"{name} overlaps or leaves a hole"
            end = plan[name] + num_bytes
        total = plan[f"{segment}_bytes"]
        assert total % PAGE == 0
        assert end <= total < end + PAGE
    assert named == set(plan), "a part of the plan is not looked at here"
    assert plan["slot_bytes"] % PAGE == plan["frame_bytes"] % PAGE == 0
    assert plan["command_bytes"] % LINE == 0
    least = sizes["max_request_id_bytes"] + 4 * sizes["max_eos_ids"]
    assert plan["command_bytes"] >= DTYPES["COMMAND"].itemsize + least


STEP_ORDER = (
    *("rows", "generations", "states", "positions", "accept_num"),
    *("tokens", "topk_ids", "logprobs", "ranks"),
)
# Columns as they lie: first_token_ns stands behind finish_reason, the drafts before the finals.
FRAME_ORDER = (0, 1, 2, 3, 4, 11, 5, 6, 7, 8, 12, 13, 9, 10)


def check_columns(begins: list[int], lengths: list[int], head: int) -> int:
    end = head
    for begin, length in zip(begins, lengths, strict=True):
        assert begin % COLUMN == 0
        assert end <= begin < end + COLUMN
        end = begin + length
    return end


@unhurried
@given(SIZES, st.data())
def test_columns_of_any_step_fit_its_slot(sizes: dict[str, int], data: st.DataObject) -> None:
    n = data.draw(st.integers(0, sizes["max_num_seqs"]), "rows")
    width = data.draw(st.integers(0, sizes["top_logprobs"] + 1), "width")
    has_accept, has_positions = data.draw(st.booleans()), data.draw(st.booleans())
    m = data.draw(st.integers(0, n * sizes["max_draft_tokens"]), "tokens") if has_accept else n
    at = _native.step_columns(n, m, width, 1 * has_accept + 2 * has_positions)
    lengths = {
        "rows": 4 * n,
        "generations": 4 * n,
        "states": n,
        "positions": 4 * n * has_positions,
        "accept_num": 4 * n * has_accept,
        "tokens": 4 * m,
        "topk_ids": 4 * m * width,
        "logprobs": 4 * m * width,
        "ranks": 4 * m * (width > 0),
    }
    begins = [at[name] for name in lengths]
    end = check_columns(begins, list(lengths.values()), layout.STEP.itemsize)
    assert end <= at["end"] <= _native.plan(sizes)["slot_bytes"] - sizes["raw_bytes"]


@unhurried
@given(SIZES, st.data())
def test_columns_of_any_prompt_step_fit_its_slot(
    sizes: dict[str, int], data: st.DataObject
) -> None:
    per_decoder = -(-sizes["max_num_seqs"] // sizes["num_decoders"])
    n = data.draw(st.integers(1, sizes["max_num_seqs"]), "rows")
    m = data.draw(st.integers(0, per_decoder * sizes["max_draft_tokens"]), "prompt tokens")
    width = data.draw(st.integers(1, sizes["top_logprobs"] + 1), "width")
    at = _native.step_columns(n, m, width, 1 + 2 + PROMPT)
    lengths = [4 * n, 4 * n, n, 4 * n, 4 * n, 4 * m, 4 * m * width, 4 * m * width, 4 * m]
    end = check_columns([at[name] for name in STEP_ORDER], lengths, layout.STEP.itemsize)
    assert end <= at["end"] <= _native.plan(sizes)["slot_bytes"]


@unhurried
@given(SIZES, st.data())
def test_columns_of_any_pooling_step_and_frame_fit(
    sizes: dict[str, int], data: st.DataObject
) -> None:
    n = data.draw(st.integers(0, sizes["max_num_seqs"]), "rows")
    floats = data.draw(st.integers(0, sizes["max_pooling_floats"]), "floats")
    at = _native.step_columns(n, n, floats, POOLING)
    lengths = [4 * n, 4 * n, n, 0, 0, 0, 0, 4 * n * floats, 0]
    end = check_columns([at[name] for name in STEP_ORDER], lengths, layout.STEP.itemsize)
    assert end <= at["end"] <= _native.plan(sizes)["slot_bytes"]

    n = data.draw(st.integers(0, -(-sizes["max_num_seqs"] // sizes["num_decoders"])), "of one")
    finals = data.draw(st.integers(0, n), "finals")
    id_bytes = sizes["max_request_id_bytes"]
    columns = _native.frame_columns(n, n, floats, 0, finals, id_bytes, POOLING)
    begins = [columns[i] for i in FRAME_ORDER]
    lengths = [4 * n, 4 * n, 4 * n, 4 * (n + 1), n, 8 * n, 0, 0, 4 * n * floats, 0, 0, 0]
    lengths += [layout.FINAL.itemsize * finals, id_bytes * finals]
    end = check_columns(begins, lengths, layout.FRAME.itemsize)
    assert end <= _native.plan(sizes)["frame_bytes"]


@unhurried
@given(SIZES, st.data())
def test_columns_of_any_frame_fit_its_place(sizes: dict[str, int], data: st.DataObject) -> None:
    rows, decoders = sizes["max_num_seqs"], sizes["num_decoders"]
    id_bytes = sizes["max_request_id_bytes"]
    n = data.draw(st.integers(0, -(-rows // decoders)), "rows of one decoder")
    # prompt tokens of one row may fill a frame, so m does not hang on n
    most = -(-rows // decoders) * sizes["max_draft_tokens"]
    m = data.draw(st.integers(0, most), "tokens")
    width = data.draw(st.integers(0, sizes["top_logprobs"] + 1), "width")
    drafts = data.draw(st.just(0) | st.integers(1, most), "drafts")
    finals = data.draw(st.integers(0, n), "finals")
    flags = data.draw(st.sampled_from([0, PROMPT]), "flags")
    columns = _native.frame_columns(n, m, width, drafts, finals, id_bytes, flags)
    begins = [columns[i] for i in FRAME_ORDER]
    table = 4 * m * width
    lengths = [4 * n, 4 * n, 4 * n, 4 * (n + 1), n, 8 * n]
    lengths += [4 * m, table, table, 4 * m * (width > 0)]
    lengths += [4 * (n + 1) * (drafts > 0), 4 * drafts]
    lengths += [layout.FINAL.itemsize * finals, id_bytes * finals]
    end = check_columns(begins, lengths, layout.FRAME.itemsize)
    assert end <= _native.plan(sizes)["frame_bytes"]


def test_a_running_segment_is_as_planned(unique_name: str) -> None:
    config = PipelineConfig(
        name=unique_name,
        max_num_seqs=5,
        top_logprobs=3,
        num_decoders=2,
        num_blocks=7,
        max_pooling_floats=9,
        max_draft_tokens=3,
        role="decode",
        internal_adapter=True,
        speculative_method="mtp",
        num_speculative_tokens=2,
        enable_draft_logprob=True,
    )
    plan, sizes = config.plan(), config.sizes()
    with Segment.create(config) as segment:
        core = np.frombuffer(segment.core_memory, layout.HEADER, 1)[0]
        source = np.frombuffer(segment.source_memory, layout.SOURCE, 1)[0]
        for head, kind, memory in (
            (core, "core", segment.core_memory),
            (source, "source", segment.source_memory),
        ):
            assert head["total_bytes"] == len(memory) == plan[f"{kind}_bytes"]
            assert head["slot_bytes"] == plan["slot_bytes"]
            assert head["version"] == _native.LAYOUT_VERSION
            names = [n for n in head["sizes"].dtype.names if n != "pad_"]
            assert {n: int(head["sizes"][n]) for n in names} == sizes
        options = {n: int(core["options"][n]) for n in config.options()}
        assert options == config.options()
        assert core["frame_bytes"] == plan["frame_bytes"]
        assert core["magic"] == _native.CORE_MAGIC
        assert source["magic"] == _native.SOURCE_MAGIC
        assert segment.core.sizes == segment.source.sizes == sizes
        begin = _native.CONFIG_OFFSET
        text = bytes(segment.core_memory[begin : begin + _native.CONFIG_BYTES]).split(b"\0")[0]
        assert PipelineConfig.from_json(text.decode()) == config


def test_one_more_row_slot_or_candidate_is_one_more_in_the_plan() -> None:
    config = PipelineConfig(max_num_seqs=256, top_logprobs=20, num_decoders=1)
    plan = config.plan()
    # rows, generations, positions, accept counts, tokens, ranks: 4 bytes each; one byte of state;
    # 21 candidates of 8 bytes. Header and alignment come on top.
    body = 256 * (6 * 4 + 1 + 21 * 8)
    assert body < plan["slot_bytes"] < body + 2 * PAGE
    doubled = PipelineConfig(max_num_seqs=256, top_logprobs=20, num_decoders=1, ring_slots=128)
    assert doubled.plan()["core_bytes"] - plan["core_bytes"] == 64 * plan["slot_bytes"]
