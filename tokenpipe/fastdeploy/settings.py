"""The pipeline's configuration as FastDeploy's says it; TOKENPIPE_* says the rest."""

from __future__ import annotations

from typing import Any

from tokenpipe.config import SYSV_OPS, SYSV_ROWS, PipelineConfig
from tokenpipe.errors import ConfigError

_MOST_EOS_IDS = 64
_MOST_ID_BYTES = 256


def op_of(cfg: Any) -> str:
    """Returns the op by which FastDeploy's own processor would read."""
    is_speculative = cfg.speculative_config.method is not None
    if cfg.model_config.enable_logprob:
        return "speculate_get_output_topk" if is_speculative else "get_output_topk"
    if is_speculative:
        return "speculate_get_output"
    return "get_output_ep" if cfg.parallel_config.data_parallel_size > 1 else "get_output"


def config_of(cfg: Any, *, use_zmq: bool) -> PipelineConfig:
    """Returns the configuration for FastDeploy's `cfg`. Raises ConfigError."""
    if use_zmq:
        why = "reads the System V queue: set it to 0, or TOKENPIPE_DISABLE=1"
        raise ConfigError("FD_USE_GET_SAVE_OUTPUT_V1", 1, why)
    op = op_of(cfg)
    fixed: dict[str, Any] = {
        "source": "sysv",
        "sysv_op": op,
        "max_num_seqs": _num_rows(cfg, SYSV_ROWS[SYSV_OPS[op]]),
        "top_logprobs": 20 if op.endswith("_topk") else 0,
        "role": cfg.scheduler_config.splitwise_role,
        "report_acknowledgements": True,
    }
    if op.startswith("speculate"):
        method, drafts = _name(cfg.speculative_config.method), _num_drafts(cfg)
        fixed |= {
            "speculative_method": "ngram" if method.startswith("ngram") else "mtp",
            "num_speculative_tokens": drafts,
            "max_draft_tokens": drafts + 1,
            "enable_draft_logprob": op.endswith("_topk")
            and bool(getattr(cfg.speculative_config, "enable_draft_logprob", False)),
        }
    defaults = {"max_eos_ids": _MOST_EOS_IDS, "max_request_id_bytes": _MOST_ID_BYTES}
    return PipelineConfig.with_environment(fixed, defaults)


def _num_drafts(cfg: Any) -> int:
    return int(cfg.speculative_config.num_speculative_tokens or 1)


def _name(method: Any) -> str:
    """FastDeploy's methods are strings or string enums."""
    return str(getattr(method, "value", method)).lower()


def _num_rows(cfg: Any, most: int) -> int:
    """Rows of a batch. Where no version that we know says it, as many as a message holds."""
    for part in (cfg.scheduler_config, cfg, cfg.parallel_config):
        rows = getattr(part, "max_num_seqs", None)
        if rows is not None:
            return int(rows)
    return most
