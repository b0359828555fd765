"""The engine's token log, and the comparison of what was delivered against it, value by value.

The log is the magic followed by LOG_DTYPE records. A step's records are written before the step
is saved: whatever the pipeline has seen is in the log, whoever was killed when.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokenpipe.demo.errors import DemoError

MAGIC = b"TPTOKLG1"
LOG_DTYPE = np.dtype(
    [
        ("request", "<u4"),  # number of the request; the launcher's requests are numbered from 0
        ("position", "<u4"),  # 0 = the first sampled token
        ("token", "<i4"),
        ("logprob_bits", "<u4"),  # float32 as it is stored: equal means equal in every bit
        ("topk_crc", "<u4"),  # over the ids and logprobs of the top-k and the rank: topk_crcs()
    ]
)
Records = NDArray[np.void]


def topk_crcs(topk_ids: NDArray[Any], logprobs: NDArray[Any], ranks: NDArray[Any]) -> list[int]:
    """Returns per token one CRC-32 over all of its top-k values, whatever their integer type."""
    values = np.hstack(
        [
            topk_ids.astype("<i4"),
            np.ascontiguousarray(logprobs, "<f4").view("<i4"),
            ranks.astype("<i4")[:, None],
        ]
    )
    return [zlib.crc32(row) for row in values]


def make_records(
    requests: Iterable[int],
    positions: Iterable[int],
    tokens: NDArray[Any],
    topk_ids: NDArray[Any],
    logprobs: NDArray[Any],
    ranks: NDArray[Any],
) -> Records:
    """Returns one record per token; both sides make theirs with it."""
    records = np.empty(len(tokens), LOG_DTYPE)
    records["request"] = requests
    records["position"] = positions
    records["token"] = tokens
    records["logprob_bits"] = np.ascontiguousarray(logprobs[:, 0], "<f4").view("<u4")
    records["topk_crc"] = topk_crcs(topk_ids, logprobs, ranks)
    return records


class TokenLog:
    """The writing side, held by the engine."""

    def __init__(self, path: str | Path) -> None:
        # Unbuffered: append() hands its bytes to the kernel, which keeps them if we are killed.
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by __exit__
        self._file.write(MAGIC)

    def append(self, records: Records) -> None:
        """Hands a step's records to the kernel."""
        self._file.write(records.tobytes())

    def __enter__(self) -> TokenLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def read_log(data: bytes) -> Records:
    """Returns the records of a log; b"" is the log of an engine that never started.

    A torn record at the end is left out: its engine was killed in the write, before the save.
    """
    if not data:
        return np.empty(0, LOG_DTYPE)
    if not data.startswith(MAGIC):
        raise DemoError(f"read the token log: it begins with {data[:8]!r}, not with {MAGIC!r}")
    count = (len(data) - len(MAGIC)) // LOG_DTYPE.itemsize
    return np.frombuffer(data, LOG_DTYPE, count, offset=len(MAGIC))


@dataclass(frozen=True)
class Comparison:
    """Delivered against logged. Everything but `tokens` is 0 when the pipeline kept its promise."""

    tokens: int  # what had to be delivered: each request up to its first eos or its max_tokens
    lost: int  # of these, not delivered with their values
    duplicated: int  # deliveries of a position that had been delivered before
    mismatched: int  # lost ones whose position was delivered with another value
    unexpected: int  # delivered positions that had not to be delivered
    out_of_order: int  # deliveries of a position below its request's last one

    @property
    def is_clean(self) -> bool:
        """Everything was delivered once, in order, as it was logged."""
        return not (self.lost or self.duplicated or self.unexpected or self.out_of_order)


def compare(
    log: Records, delivered: Records, max_tokens: Mapping[int, int], eos_token_ids: Iterable[int]
) -> Comparison:
    """Holds the delivered records, in the order of their delivery, against the engine's log."""
    expected = _by_place(_until_end(log, max_tokens, set(eos_token_ids)))
    lost = mismatched = duplicated = unexpected = out_of_order = 0
    seen: dict[tuple[int, int], tuple[int, ...]] = {}
    last_position: dict[int, int] = {}
    for request, position, *value in delivered.tolist():
        place = (request, position)
        if place in seen:
            duplicated += 1
            continue
        seen[place] = tuple(value)
        unexpected += place not in expected
        out_of_order += position < last_position.get(request, 0)
        last_position[request] = position
    for place, wanted in expected.items():
        if seen.get(place) != wanted:
            lost += 1
            mismatched += place in seen
    return Comparison(len(expected), lost, duplicated, mismatched, unexpected, out_of_order)


def _until_end(log: Records, max_tokens: Mapping[int, int], eos: set[int]) -> Records:
    """Leaves out what the engine sampled beyond a request's end, before it was told of it."""
    ends = dict(max_tokens)
    for request, position, token, *_ in log.tolist():
        if token in eos:
            ends[request] = min(ends[request], position + 1)
    limits = np.array([ends[number] for number in log["request"].tolist()], np.int64)
    return log[log["position"] < limits]


def _by_place(records: Records) -> dict[tuple[int, int], tuple[int, ...]]:
    return {(request, position): tuple(v) for request, position, *v in records.tolist()}
