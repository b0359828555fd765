"""The demo's own options; those of the pipeline are passed on to `tokenpipe serve` as they are."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenpipe import ConfigError


@dataclass(frozen=True)
class DemoOptions:
    """A field is a flag of `tokenpipe demo`. Raises ConfigError for a value that cannot work."""

    requests: int = field(
        default=16,
        metadata={"help": "number of requests; more than --max-num-seqs wait for a row"},
    )
    max_tokens: int = field(
        default=64,
        metadata={"help": "most tokens per request; the model's context of 128 bounds it too"},
    )
    temperature: float = field(
        default=0.8, metadata={"help": "sampling temperature; 0 always takes the likeliest token"}
    )
    seed: int = field(
        default=0, metadata={"help": "seed of the sampling; equal seeds give equal texts"}
    )
    step_ms: float | None = field(
        default=None,
        metadata={
            "help": "least time of an engine step in ms; 0 is as fast as the model goes "
            "(default: 25 on a terminal, so that the texts can be watched, else 0)",
            "type": float,
        },
    )
    json: bool = field(
        default=False,
        metadata={"help": "print one JSON object per request and a last one as the summary"},
    )

    def __post_init__(self) -> None:
        for name, least in (("requests", 1), ("max_tokens", 1), ("temperature", 0), ("seed", 0)):
            value = getattr(self, name)
            if not value >= least:
                raise ConfigError(name, value, f"must be at least {least}")
        if self.step_ms is not None and not self.step_ms >= 0:
            raise ConfigError("step_ms", self.step_ms, "must be at least 0")
