"""What vLLM's /metrics says of the masks, in the process of its server: vLLM's entry point for statistics."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, Gauge
from vllm.v1.metrics.loggers import StatLoggerBase

from .config import WisparseConfig


class MaskMetrics(StatLoggerBase):
    """Two gauges, set once: a model without the plug-in has neither."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        config = vllm_config.quant_config
        if not isinstance(config, WisparseConfig):
            return
        sparsity, weights, unread = config.served(vllm_config.additional_config)
        labelled = {"sparsity": f"{sparsity:g}", "weights": weights}
        share = (
            "Share of the blocks' weights that the masks dropped on the calibration text; not measured while serving"
        )
        for name, words, labels, value in (
            ("wisparse_masks", "1: the plug-in runs this model", labelled, 1.0),
            ("wisparse_unread_ratio", share, {}, unread),
        ):
            known: Any = getattr(REGISTRY, "_names_to_collectors", {}).get(name)  # of another engine in this process
            gauge = known or Gauge(name, words, list(labels), multiprocess_mode="max")
            (gauge.labels(**labels) if labels else gauge).set(value)

    def record(self, *_: Any, **__: Any) -> None:
        """Nothing of a batch."""

    def log_engine_initialized(self) -> None:
        """The processes with layers log."""
