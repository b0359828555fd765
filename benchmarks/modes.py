"""The four modes of a step, how large its arrays are, and arrays that are made beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenpipe import _native

Array = npt.NDArray[Any]

MODES = {"plain": "plain", "topk": "top-20", "spec": "spec", "spec_topk": "spec+top-20"}
"""By the name that the engine's flag has, the name in tables."""

_ACCEPT, _NOT_NEED_STOP = 1, 4  # TP_STEP_ACCEPT, TP_STEP_NOT_NEED_STOP
_FRAME_END = 10  # of frame_columns(): the last column, which is empty while no request ends


@dataclass(frozen=True)
class Shape:
    """Of a mode's step: `width` candidates a token, up to `depth` tokens a row."""

    mode: str
    width: int = 21
    depth: int = 6

    @property
    def has_candidates(self) -> bool:
        """Whether tokens come with candidates."""
        return self.mode.endswith("topk")

    @property
    def is_speculative(self) -> bool:
        """Whether a row may have several tokens."""
        return self.mode.startswith("spec")

    def whole(self, steps: int) -> int:
        """Returns `steps` up to where every row has had equally many tokens."""
        cycle = self.depth if self.is_speculative else 1
        return -(-steps // cycle) * cycle

    def tokens_per_row(self, steps: int) -> int:
        """Returns how many tokens each row has in whole(steps) steps: of a speculative mode
        1 to depth in turn, so (depth + 1) / 2 a step."""
        return self.whole(steps) * (self.depth + 1) // 2 if self.is_speculative else steps

    def accept_num(self, rows: int, number: int) -> Array:
        """Returns how many tokens each row has in step `number`, int32 [rows]."""
        return (1 + (np.arange(rows) + number) % self.depth).astype(np.int32)

    def hop_bytes(self, rows: int, id_bytes: int = 128) -> int:
        """Returns the bytes that one mean step copies on its way: engine -> source -> ring ->
        frame. The client reads the frame in place."""
        m = self.tokens_per_row(2 * self.depth) * rows // (2 * self.depth)
        width = self.width if self.has_candidates else 0
        flags = _NOT_NEED_STOP | (_ACCEPT if self.is_speculative else 0)
        step = _native.step_columns(rows, m, width, flags)["end"]
        frame = _native.frame_columns(rows, m, width, 0, 0, id_bytes, flags)[_FRAME_END]
        return 2 * step + frame

    def arrays(self, rows: int, number: int, ids: Any = np.int32) -> tuple[Array, ...]:
        """Returns the arguments of the mode's save for step `number`; tokens and candidates of
        dtype `ids`."""
        random = np.random.default_rng(number)
        lead = (rows, self.depth) if self.is_speculative else (rows,)
        found = [random.integers(16, 150_000, lead, ids)]
        if self.is_speculative:
            found.append(self.accept_num(rows, number))
        if self.has_candidates:
            every = (*lead, self.width)
            found.append(random.integers(16, 150_000, every, ids))
            found.append(-random.random(every, np.float32))
            found.append(random.integers(1, 1000, lead, ids))
        return tuple(found)
