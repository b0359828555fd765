"""An engine that is not to be trusted: valid steps, spoilt bytes, and a verdict from layout.h."""

from __future__ import annotations

import os
import random
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from oracle import BAD

from tokenpipe import _native, layout

TARGET, DRAFT = 3, 4
ACCEPT, POSITIONS, NOT_NEED_STOP, POOLING, PROMPT = 1, 2, 4, 8, 16
KINDS = ("plain", "topk", "speculative", "speculative topk", "draft", "pooling", "prompt")
EOS, FIRST_TOKEN = 2, 10
WORDS = ("sequence", "source_sequence", "saved_ns", "published_ns", "saved_tokens")
FIELDS = ("num_rows", "num_tokens", "width", "flags", "message_flag", "body_bytes", "bad")
HEAD = struct.Struct("<5Q7I")
HEAD_BYTES = layout.STEP.itemsize


@contextmanager
def seeded() -> Iterator[random.Random]:
    """A source of chance, another one each run. A failing test shows how to have the same again."""
    seed = int(os.environ.get("FUZZ_SEED", secrets.randbits(32)))
    print(f"run again with FUZZ_SEED={seed}")  # pytest shows it when the test fails
    yield random.Random(seed)


def odd_value(rng: random.Random, old: int, limits: tuple[int, ...], bits: int = 32) -> int:
    """A number at which checks break: limits, powers of two, a neighbour, a flipped bit."""
    top = 1 << bits
    choice = rng.randrange(8)
    if choice == 0:
        value = rng.choice((0, 1, top - 1, top - 2, top // 2, top // 2 - 1))
    elif choice == 1:
        value = 1 << rng.randrange(bits)
    elif choice in (2, 3):
        value = rng.choice(limits) + rng.randrange(-1, 2)
    elif choice in (4, 5):
        value = old + rng.randrange(-2, 3)
    elif choice == 6:
        value = old ^ 1 << rng.randrange(bits)
    else:
        value = rng.getrandbits(bits)
    return value % top


@dataclass
class Sizes:
    """The sizes that a step must keep to."""

    rows: int
    depth: int
    top: int
    floats: int
    decoders: int
    slot_bytes: int

    @property
    def limits(self) -> tuple[int, ...]:
        """Where a check may be off by one."""
        return (self.rows, self.depth, self.top + 1, self.floats, self.rows * self.depth)

    def verdict(self, slot: memoryview, due: int) -> set[str]:
        """Every reason of BAD that is true of the step in `slot`: which is counted is the reader's
        choice. Written from the text of layout.h; Python's integers cannot overflow."""
        head = dict(zip(WORDS + FIELDS, HEAD.unpack_from(slot), strict=True))
        n, m, width, flags = (head[f] for f in ("num_rows", "num_tokens", "width", "flags"))
        is_draft = head["message_flag"] == DRAFT
        is_pooling, is_prompt = bool(flags & POOLING), bool(flags & PROMPT)
        accepts, places = bool(flags & ACCEPT), bool(flags & POSITIONS)
        found = set()
        if head["source_sequence"] != due:
            found.add("sequence")
        if n > self.rows:
            found.add("rows")
        if width > (self.floats if is_pooling else self.top + 1):
            found.add("width")
        rows_each = -(-self.rows // self.decoders)
        if is_prompt and not is_pooling:
            has_bad_tokens = m > rows_each * self.depth
        else:
            has_bad_tokens = m > n * self.depth if accepts else m != n
        if has_bad_tokens:
            found.add("tokens")
        if (
            flags >= 2 * PROMPT
            or (head["message_flag"] != TARGET and not is_draft)
            or (is_pooling and (accepts or is_prompt or is_draft))
            or (is_prompt and (not accepts or not places or is_draft))
        ):
            found.add("flags")
        parts = (4 * n, 4 * n, n, 4 * n * places, 4 * n * accepts)
        tokens = () if is_pooling else (4 * m, 4 * m * width)
        ranks = () if is_pooling or not width else (4 * m,)
        end = 0
        for at, part in enumerate((*parts, *tokens, 4 * m * width, *ranks)):
            if at == 4:
                accept_at = end
            end += -(-part // 16) * 16
        if end != head["body_bytes"] or end + HEAD_BYTES > self.slot_bytes:
            found.add("bytes")
        if accepts and not found:
            counts = struct.unpack_from(f"<{n}i", slot, HEAD_BYTES + accept_at)
            most = m if is_prompt else self.depth
            if sum(c for c in counts if 0 <= c <= most) != m:
                found.add("tokens")
        assert found <= set(BAD[1:])
        return found


@dataclass
class Composer:
    """Makes valid steps for rows that are given out, and spoils them."""

    rng: random.Random
    sizes: Sizes
    generation: dict[int, int] = field(default_factory=dict)
    emitted: dict[int, int] = field(default_factory=dict)

    def compose(self, due: int) -> bytearray:
        """A step of any kind, right to the byte."""
        rng, sizes = self.rng, self.sizes
        kind = rng.choice(KINDS)
        if kind == "pooling" and rng.randrange(4):
            kind = "plain"  # it ends every row that it names
        rows = [row for row in self.generation if rng.randrange(4)]
        n, prompt, draft, pooling = (
            len(rows),
            *(kind == k for k in ("prompt", "draft", "pooling")),
        )
        accepts = kind not in ("plain", "topk", "pooling")
        places = prompt or draft or rng.randrange(3) == 0
        width = 0
        if "topk" in kind or prompt or draft:
            width = rng.randint(1, sizes.top + 1)
        elif pooling:
            width = rng.randint(1, sizes.floats)
        states = [rng.randrange(4) if rng.randrange(12) == 0 else 0 for _ in rows]
        room = -(-sizes.rows // sizes.decoders) * sizes.depth
        accepted = []
        for state in states:
            most = min(room, 4) if prompt else sizes.depth
            count = rng.randint(0, most) if accepts else 1
            accepted.append(0 if state and accepts else count)
            room -= accepted[-1] if prompt else 0
        m = sum(accepted) if accepts else n
        tokens = [
            EOS if rng.randrange(40) == 0 else rng.randint(FIRST_TOKEN, 10**6) for _ in range(m)
        ]
        flags = ACCEPT * accepts | POSITIONS * places | POOLING * pooling | PROMPT * prompt
        columns = [
            struct.pack(f"<{n}I", *rows),
            struct.pack(f"<{n}I", *(self.generation[r] for r in rows)),
            bytes(states),
            struct.pack(f"<{n}i", *(self.emitted[r] for r in rows)) if places else b"",
            struct.pack(f"<{n}i", *accepted) if accepts else b"",
            struct.pack(f"<{m}i", *tokens) if not pooling else b"",
            rng.randbytes(4 * m * width) if not pooling else b"",
            struct.pack(f"<{m * width}f", *([-1.5] * (m * width))),
            struct.pack(f"<{m}i", *([1] * m)) if width and not pooling else b"",
        ]
        body = b"".join(column.ljust(-(-len(column) // 16) * 16, b"\0") for column in columns)
        message = DRAFT if draft else TARGET
        head = HEAD.pack(0, due, _native.now_ns(), 0, 0, n, m, width, flags, message, len(body), 0)
        return bytearray(head.ljust(HEAD_BYTES, b"\0") + body)

    def spoil(self, slot: memoryview) -> None:
        """Changes one to three things of the step in `slot`."""
        for _ in range(self.rng.randint(1, 3)):
            self.rng.choice(
                (
                    *(self._spoil_head, self._spoil_head, self._lie, self._flip_bits),
                    *(self._move_accepted, self._spoil_word, self._spoil_word, self._fill),
                )
            )(slot)

    def _spoil_head(self, slot: memoryview) -> None:
        values = list(HEAD.unpack_from(slot))
        at = self.rng.randrange(len(values)) if self.rng.randrange(3) else self.rng.randrange(5, 12)
        bits = 64 if at < len(WORDS) else 32
        values[at] = odd_value(self.rng, values[at], self.sizes.limits, bits)
        HEAD.pack_into(slot, 0, *values)

    def _lie(self, slot: memoryview) -> None:
        """Counts that are not those of the columns, and a length that agrees to the byte."""
        rng, sizes = self.rng, self.sizes
        values = dict(zip(WORDS + FIELDS, HEAD.unpack_from(slot), strict=True))
        if rng.randrange(2):
            values["num_rows"] = rng.randrange(sizes.rows + 2)
        if rng.randrange(2):
            values["width"] = rng.randrange(max(sizes.top + 1, sizes.floats) + 2)
        if rng.randrange(2):
            values["flags"] ^= 1 << rng.randrange(5)
        if not values["flags"] & ACCEPT:
            values["num_tokens"] = values["num_rows"]
        elif rng.randrange(2):
            values["num_tokens"] = rng.randrange(sizes.rows * sizes.depth + 2)
        counts = [min(values[k], 2**20) for k in ("num_rows", "num_tokens", "width")]
        end = _native.step_columns(*counts, values["flags"])["end"]
        values["body_bytes"] = end - HEAD_BYTES & 2**32 - 1
        HEAD.pack_into(slot, 0, *values.values())

    def _columns(self, slot: memoryview) -> dict[str, int] | None:
        """Where the columns lie, as long as the header still tells."""
        n, m, width, flags, _, body = HEAD.unpack_from(slot)[5:11]
        columns = dict(_native.step_columns(n, min(m, 2**20), min(width, 2**20), flags))
        is_right = columns["end"] - HEAD_BYTES == body and columns["end"] <= len(slot)
        return columns if is_right and n > 0 else None

    def _spoil_word(self, slot: memoryview) -> None:
        columns = self._columns(slot)
        if columns is None:
            return
        name = self.rng.choice(
            ("rows", "generations", "states", "positions", "accept_num", "tokens")
        )
        n = HEAD.unpack_from(slot)[5]
        at = columns[name] + 4 * self.rng.randrange(n)
        if at + 4 <= columns["end"]:
            (old,) = struct.unpack_from("<I", slot, at)
            struct.pack_into("<I", slot, at, odd_value(self.rng, old, self.sizes.limits))

    def _move_accepted(self, slot: memoryview) -> None:
        """The sum stays right: only the single counts are wrong."""
        columns, head = self._columns(slot), HEAD.unpack_from(slot)
        if columns is None or not head[8] & ACCEPT:
            return
        by = odd_value(self.rng, 1, self.sizes.limits)
        for sign in (1, -1):
            at = columns["accept_num"] + 4 * self.rng.randrange(head[5])
            (old,) = struct.unpack_from("<I", slot, at)
            struct.pack_into("<I", slot, at, (old + sign * by) % 2**32)

    def _flip_bits(self, slot: memoryview) -> None:
        end = min(HEAD_BYTES + HEAD.unpack_from(slot)[10], len(slot))
        for _ in range(self.rng.randint(1, 8)):
            slot[self.rng.randrange(HEAD_BYTES, max(end, HEAD_BYTES + 1))] ^= (
                1 << self.rng.randrange(8)
            )

    def _fill(self, slot: memoryview) -> None:
        if self.rng.randrange(8) == 0:
            begin = 0 if self.rng.randrange(4) == 0 else HEAD_BYTES
            end = min(len(slot), 1024)
            slot[begin:end] = self.rng.randbytes(end - begin)
