"""vLLM's entry point: makes ``--quantization wisparse`` known, and recognises bundles."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

from wisparse.formats.errors import UsageError

log = logging.getLogger("vllm.wisparse")


def register() -> None:
    """The entry point of the group ``vllm.general_plugins``. An unknown vLLM that has nothing to register with only
    logs a warning, as it may be serving another model. One that has refuses a bundle when it is opened."""
    import vllm

    try:
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
        from vllm.transformers_utils.config import get_config_parser, register_config_parser

        from .config import WisparseConfig
        from .settings import NAME

        if NAME not in QUANTIZATION_METHODS:
            register_quantization_config(NAME)(WisparseConfig)
        parser = type(get_config_parser("hf"))
        if not getattr(parser, "knows_bundles", False):
            register_config_parser("hf")(with_bundles(parser))
    except (ImportError, AttributeError) as reason:
        where = f"process {os.getpid()}, {sys.executable}"
        try:
            from .settings import require_known_version

            require_known_version(vllm.__version__)
        except ImportError:
            pass
        except UsageError as unknown:
            log.warning("no bundle runs sparse here: %s", unknown)
            return
        # vLLM would go on and call the method unknown.
        raise ImportError(
            f"WiSparse's plug-in for vLLM {vllm.__version__} cannot be imported ({where}): {reason}; install wisparse "
            "with its dependencies there, or run without it: VLLM_PLUGINS=''"
        ) from reason


def with_bundles(parser: Any) -> type:
    """vLLM's parser of ``config.json``, which also recognises bundles."""
    from vllm.transformers_utils.repo_utils import file_or_path_exists

    from wisparse.formats.manifest import MANIFEST, SIDECAR

    from .settings import NAME, why_experts_are_refused

    class Parser(parser):
        knows_bundles = True

        def parse(
            self, model: str | Path, trust_remote_code: bool, revision: str | None = None, *rest: Any, **more: Any
        ) -> tuple[dict[str, Any], Any]:
            """Names us as the method of a bundle's config; refusals come later, where vLLM does not try again."""
            found, config = super().parse(model, trust_remote_code, revision, *rest, **more)
            files = MANIFEST, SIDECAR
            # A folder of ours whose config.json lost its entry is opened as a bundle too, and refused there.
            if "wisparse" not in found and not all((Path(model) / name).is_file() for name in files):
                return found, config
            if not any(file_or_path_exists(model, name, revision) for name in files):
                # transformers copies our entry into whatever it saves from a bundle, which is a dense checkpoint.
                log.warning("%s: config.json has an entry of WiSparse but no masks lie beside it: a dense model", model)
                return found, config
            stored = found.get("quantization_config")
            entry: dict[str, Any] = {"quant_method": NAME}
            if isinstance(stored, dict):
                entry |= {"stored": stored, "refused": why_experts_are_refused(found, stored)}
            config.quantization_config = found["quantization_config"] = entry
            return found, config

    return Parser
