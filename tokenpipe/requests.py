"""What a client asks for, and what it gets for it: Request and Admission."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tokenpipe.commands import AdmissionFlag
from tokenpipe.config import PipelineConfig
from tokenpipe.errors import InvalidRequestError
from tokenpipe.records import LogprobsLists, RequestMetrics

_INT32 = 2**31


def whole_number(request_id: str, field: str, value: object, low: int) -> int:
    """Returns the value of a request's field. Raises InvalidRequestError: below `low`, no int32."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequestError(request_id, field, value, "must be a whole number") from None
    if not low <= number < _INT32:
        raise InvalidRequestError(request_id, field, value, f"must be {low} to {_INT32 - 1}")
    return number


def fits(request_id: str, config: PipelineConfig) -> bool:
    """Whether an id can be that of a request."""
    try:
        return len(request_id.encode()) <= config.max_request_id_bytes
    except UnicodeEncodeError:
        return False


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

        def refuse(field: str, value: object, why: str) -> NoReturn:
            raise InvalidRequestError(str(self.request_id), field, value, why)

        if not isinstance(self.request_id, str) or not self.request_id:
            refuse("request_id", self.request_id, "must be a string that is not empty")
        try:
            num_bytes = len(self.request_id.encode())
        except UnicodeEncodeError as error:
            refuse("request_id", self.request_id, f"has no UTF-8: {error.reason}")
        if num_bytes > config.max_request_id_bytes:
            limit = config.max_request_id_bytes
            refuse("request_id", self.request_id, f"{num_bytes} bytes, at most {limit} fit")
        for name in ("prompt_token_ids", "eos_token_ids", "prefill_chunk_info"):
            value = getattr(self, name)
            if value is None and name == "prefill_chunk_info":
                continue
            if isinstance(value, str) or not hasattr(value, "__len__"):
                refuse(name, value, "must be a sequence of whole numbers")
        if len(self.prompt_token_ids) == 0:
            refuse("prompt_token_ids", [], "must not be empty")
        if len(self.eos_token_ids) > config.max_eos_ids:
            why = f"{len(self.eos_token_ids)} ids, max_eos_ids is {config.max_eos_ids}"
            refuse("eos_token_ids", list(self.eos_token_ids), why)
        for token in self.eos_token_ids:
            whole_number(self.request_id, "eos_token_ids", token, 0)
        whole_number(self.request_id, "num_emitted_tokens", self.num_emitted_tokens, 0)
        if self.max_tokens is not None:
            low = self.num_emitted_tokens + 1
            whole_number(self.request_id, "max_tokens", self.max_tokens, low)
        if self.prefill_chunk_info is not None and len(self.prefill_chunk_info) >= _INT32:
            refuse("prefill_chunk_info", len(self.prefill_chunk_info), "too many chunks")
        if self.num_blocks is not None:
            whole_number(self.request_id, "num_blocks", self.num_blocks, 0)

    def add_prompt_logprobs(self, begin: int, piece: LogprobsLists) -> None:
        """Keeps a piece of the prompt's logprobs, that of prompt token `begin` and following.

        A place that is saved again (an engine that fills a prompt twice) has its last value.
        """
        self._prompt_pieces.append((begin, piece))

    def take_prompt_logprobs(self) -> LogprobsLists | None:
        """Returns what has come of the prompt's logprobs since the last call, in prompt order."""
        if not self._prompt_pieces:
            return None
        found = in_prompt_order(self._prompt_pieces)
        self._prompt_pieces.clear()
        return found

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


def in_prompt_order(pieces: list[tuple[int, LogprobsLists]]) -> LogprobsLists:
    """Returns pieces of a prompt's logprobs, of prompt token `begin` and following each, as one; at
    least one token. A place that is there twice has its last value."""
    places = {
        begin + j: columns
        for begin, piece in pieces
        for j, columns in enumerate(
            zip(piece.logprob_token_ids, piece.logprobs, piece.sampled_token_ranks, strict=True)
        )
    }
    ids, logprobs, ranks = zip(*(places[at] for at in sorted(places)), strict=True)
    return LogprobsLists(list(ids), list(logprobs), list(ranks))


@dataclass(frozen=True)
class Admission:
    """A request's row. `generation` is the row's life: the engine stamps its steps with it."""

    request_id: str
    row: int
    generation: int
    block_ids: tuple[int, ...] = ()
