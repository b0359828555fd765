"""What a client asks for, and what it gets for it: Request and Admission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenpipe.commands import AdmissionFlag
from tokenpipe.config import PipelineConfig
from tokenpipe.errors import InvalidRequestError
from tokenpipe.records import LogprobsLists, RequestMetrics

_INT32 = 2**31


@dataclass
class Request:
    """One request. Fields that decide nothing here are echoed in its outputs.

    `eos_token_ids` and `max_tokens` end it; without both only the engine or abort() does.
    """

    request_id: str
    prompt_token_ids: Sequence[int] = ()
    eos_token_ids: Sequence[int] = ()
    max_tokens: int | None = None
    """Tokens in all, those of `num_emitted_tokens` included."""
    num_emitted_tokens: int = 0
    """Tokens that were delivered elsewhere before: send_idx starts there."""
    num_blocks: int | None = None
    """KV blocks to reserve; None: as many as the prompt fills, where the pipeline has a pool."""
    prompt: Any = None
    """Messages; on the first output only."""
    num_cached_tokens: int = 0
    multimodal_inputs: dict[str, Any] | None = None
    ic_req_data: Any = None
    trace_carrier: dict[str, str] | None = None
    """On the last output only."""
    user: str = ""
    """Named in trace events."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    """The caller's stamps; each output carries a copy with its own filled in."""
    disaggregate_info: dict[str, Any] | None = None
    """Not None: prefill and decode run on two instances."""
    prefill_chunk_info: Sequence[int] | None = None
    """Tokens per prefill chunk: the tokens sampled at all but the last are not delivered."""
    warm_up: bool = False
    """Its tokens are counted apart and not delivered; only its end is."""
    _prompt_pieces: list[tuple[int, LogprobsLists]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    def check(self, config: PipelineConfig) -> None:
        """Raises InvalidRequestError (field, value, why) for what cannot work."""

        def refuse(field: str, value: object, why: str) -> None:
            raise InvalidRequestError(str(self.request_id), field, value, why)

        if not isinstance(self.request_id, str) or not self.request_id:
            refuse("request_id", self.request_id, "must be a string that is not empty")
        num_bytes = len(self.request_id.encode())
        if num_bytes > config.max_request_id_bytes:
            limit = config.max_request_id_bytes
            refuse("request_id", self.request_id, f"{num_bytes} bytes, at most {limit} fit")
        if len(self.prompt_token_ids) == 0:
            refuse("prompt_token_ids", [], "must not be empty")
        if len(self.eos_token_ids) > config.max_eos_ids:
            why = f"{len(self.eos_token_ids)} ids, max_eos_ids is {config.max_eos_ids}"
            refuse("eos_token_ids", list(self.eos_token_ids), why)
        for token in self.eos_token_ids:
            if not 0 <= token < _INT32:
                refuse("eos_token_ids", token, f"must be 0 to {_INT32 - 1}")
        if self.num_emitted_tokens < 0:
            refuse("num_emitted_tokens", self.num_emitted_tokens, "must be 0 or more")
        if self.max_tokens is not None and not self.num_emitted_tokens < self.max_tokens < _INT32:
            refuse("max_tokens", self.max_tokens, f"must be above {self.num_emitted_tokens}")
        if self.prefill_chunk_info is not None and len(self.prefill_chunk_info) >= _INT32:
            refuse("prefill_chunk_info", len(self.prefill_chunk_info), "too many chunks")
        if self.num_blocks is not None and self.num_blocks < 0:
            refuse("num_blocks", self.num_blocks, "must be 0 or more")

    def add_prompt_logprobs(self, begin: int, piece: LogprobsLists) -> None:
        """Keeps a piece of the prompt's logprobs, that of prompt token `begin` and following."""
        self._prompt_pieces.append((begin, piece))

    def take_prompt_logprobs(self) -> LogprobsLists | None:
        """Returns what has come of the prompt's logprobs since the last call, in prompt order."""
        if not self._prompt_pieces:
            return None
        pieces = [piece for _begin, piece in sorted(self._prompt_pieces, key=lambda p: p[0])]
        self._prompt_pieces.clear()
        return LogprobsLists(
            [row for p in pieces for row in p.logprob_token_ids],
            [row for p in pieces for row in p.logprobs],
            [rank for p in pieces for rank in p.sampled_token_ranks],
        )

    @property
    def flags(self) -> int:
        """What the admission record says of the request."""
        return (AdmissionFlag.DISAGGREGATED if self.disaggregate_info is not None else 0) | (
            AdmissionFlag.WARM_UP if self.warm_up else 0
        )

    def blocks_wanted(self, config: PipelineConfig) -> int:
        """Returns how many KV blocks the request reserves."""
        if self.num_blocks is not None:
            return self.num_blocks
        return -(-len(self.prompt_token_ids) // config.block_size) if config.num_blocks else 0


@dataclass(frozen=True)
class Admission:
    """A request's row. `generation` is the row's life: the engine stamps its steps with it."""

    request_id: str
    row: int
    generation: int
    block_ids: tuple[int, ...] = ()
