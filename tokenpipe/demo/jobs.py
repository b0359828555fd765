"""The demo's requests: what is asked for, and what has come of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenpipe.demo.options import DemoOptions
from tokenpipe.demo.text import TextStream, prompt_texts


@dataclass
class Job:
    """One request of the demo and what has come of it."""

    number: int
    request_id: str
    prompt: str
    prompt_token_ids: list[int]
    max_tokens: int
    stream: TextStream
    is_submitted: bool = False
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """It ended as it should."""
        return self.finish_reason in ("stop", "length")


def make_jobs(options: DemoOptions, tokenizer: Any, context_tokens: int) -> list[Job]:
    """Returns the requests, none with more tokens than the context has room for."""
    jobs = []
    for number, prompt in enumerate(prompt_texts(options.requests)):
        ids = tokenizer.encode(prompt)
        # The last token needs no place in the context. The engine stops there too; it is said in
        # the request so that the pipeline ends it with 'length'.
        room = context_tokens - len(ids) + 1
        max_tokens = min(options.max_tokens, room)
        stream = TextStream(tokenizer)
        jobs.append(Job(number, f"demo-{number}", prompt, ids, max_tokens, stream))
    return jobs
