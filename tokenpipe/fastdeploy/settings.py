"""The pipeline's configuration as FastDeploy's says it; TOKENPIPE_* says the rest."""

from __future__ import annotations

from typing import Any

from tokenpipe.config import SYSV_OPS, SYSV_ROWS, PipelineConfig
from tokenpipe.errors import ConfigError

_MOST_EOS_IDS = 64
_MOST_ID_BYTES = 256
_LOGPROBS = 20
"""FastDeploy's own default of max_logprobs."""


def op_of(cfg: Any) -> str:
    """Returns the op by which FastDeploy's own processor would read."""
    is_speculative = cfg.speculative_config.method is not None
    if cfg.model_config.enable_logprob:
        return "speculate_get_output_topk" if is_speculative else "get_output_topk"
    if is_speculative:
        return "speculate_get_output"
    return "get_output_ep" if cfg.parallel_config.data_parallel_size > 1 else "get_output"


def config_of(cfg: Any, *, use_zmq: bool) -> PipelineConfig:
    """Returns the configuration for FastDeploy's `cfg`. `use_zmq`: its worker sends to a socket,
    not to a System V queue. Raises ConfigError."""
    op = op_of(cfg)
    fixed: dict[str, Any] = {
        "max_num_seqs": _num_rows(cfg, SYSV_ROWS[SYSV_OPS[op]]),
        "role": cfg.scheduler_config.splitwise_role,
        "report_acknowledgements": True,
    }
    defaults: dict[str, Any] = {
        "max_eos_ids": _MOST_EOS_IDS,
        "max_request_id_bytes": _MOST_ID_BYTES,
    }
    if use_zmq:
        fixed["source"] = "zmq"
        defaults["zmq_socket"] = _socket(cfg.parallel_config)
        defaults["top_logprobs"] = _width(cfg.model_config)
    else:
        top_logprobs = 20 if op.endswith("_topk") else 0
        fixed |= {"source": "sysv", "sysv_op": op, "top_logprobs": top_logprobs}
    if op.startswith("speculate"):
        method, drafts = _name(cfg.speculative_config.method), _num_drafts(cfg)
        fixed |= {
            "speculative_method": "ngram" if method.startswith("ngram") else "mtp",
            "num_speculative_tokens": drafts,
            "max_draft_tokens": drafts + 1,
            "enable_draft_logprob": op.endswith("_topk")
            and bool(getattr(cfg.speculative_config, "enable_draft_logprob", False)),
        }
    config = PipelineConfig.with_environment(fixed, defaults)
    if use_zmq:
        _check_zmq(cfg, config)
    return config


def _check_zmq(cfg: Any, config: PipelineConfig) -> None:
    try:
        import zmq  # noqa: F401 - for the reader, which would only fail to start
    except ImportError as error:
        why = "needs pyzmq: pip install 'tokenpipe[zmq]', or set it to 0"
        raise ConfigError("FD_USE_GET_SAVE_OUTPUT_V1", 1, why) from error
    most = _max_logprobs(cfg.model_config)
    if cfg.model_config.enable_logprob and most < 0 and not config.top_logprobs:
        why = "is every token there is: say in TOKENPIPE_TOP_LOGPROBS how many requests may ask for"
        raise ConfigError("max_logprobs", most, why)
    is_pooling = getattr(cfg.model_config, "runner_type", None) == "pooling"
    if is_pooling and not config.max_pooling_floats:
        why = "the model pools: say in TOKENPIPE_MAX_POOLING_FLOATS how many floats a vector has"
        raise ConfigError("max_pooling_floats", 0, why)


def _socket(parallel: Any) -> str:
    """Where FastDeploy's worker sends to."""
    rank, port = parallel.local_data_parallel_id, parallel.local_engine_worker_queue_port
    return f"/dev/shm/get_save_output_rank{rank}_{port}.socket"


def _width(model: Any) -> int:
    return max(0, _max_logprobs(model)) if model.enable_logprob else 0


def _max_logprobs(model: Any) -> int:
    """FastDeploy's limit of a request's logprobs and prompt_logprobs; -1: the vocabulary."""
    return int(getattr(model, "max_logprobs", _LOGPROBS))


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
