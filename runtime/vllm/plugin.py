"""vLLM's entry point, which makes ``--quantization wisparse`` known and recognises bundles; and how a bundle is run in
vLLM, in which versions and on how many GPUs it can be: what needs no vLLM to decide."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wisparse.formats.errors import UsageError
from wisparse.formats.manifest import MANIFEST, SIDECAR

log = logging.getLogger("vllm.wisparse")

# 0.26 and 0.32 were run; where they differ the code says so.
FIRST, BEFORE = (0, 26), (0, 33)
NAME = "wisparse"
POLICIES = ("dense", "all")  # "half" needs whole prompts, and vLLM reads them in chunks
ENVIRONMENT = {"prefill": "WISPARSE_VLLM_PREFILL", "sparsity": "WISPARSE_VLLM_SPARSITY"}


def register() -> None:
    """The entry point of the group ``vllm.general_plugins``. An unknown vLLM that has nothing to register with only
    logs a warning, as it may be serving another model. One that has refuses a bundle when it is opened."""
    import vllm

    try:
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
        from vllm.transformers_utils.config import get_config_parser, register_config_parser

        from .config import WisparseConfig

        if NAME not in QUANTIZATION_METHODS:
            register_quantization_config(NAME)(WisparseConfig)
        parser = type(get_config_parser("hf"))
        if not getattr(parser, "knows_bundles", False):
            register_config_parser("hf")(_with_bundles(parser))
    except (ImportError, AttributeError):
        try:
            require_known_version(vllm.__version__)
        except UsageError as reason:
            log.warning("no bundle runs sparse here: %s", reason)
            return
        raise


def _with_bundles(parser: Any) -> type:
    """vLLM's parser of ``config.json``, which also recognises bundles."""
    from vllm.transformers_utils.repo_utils import file_or_path_exists

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
            entry = {"quant_method": NAME}
            if isinstance(stored, dict):
                entry["stored"] = str(stored.get("quant_method"))
            config.quantization_config = found["quantization_config"] = entry
            return found, config

    return Parser


def require_known_version(found: str) -> None:
    """Raise UsageError unless ``found``, vLLM's ``__version__``, is in the declared range."""
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or not FIRST <= (int(match[1]), int(match[2])) < BEFORE:
        first, before = (f"{major}.{minor}" for major, minor in (FIRST, BEFORE))
        raise UsageError(
            f"vLLM: expected a version from {first} to before {before}, found {found}; install one "
            "(pip install 'wisparse[vllm]') or run the dense model: VLLM_PLUGINS='' vllm serve …"
        )


def require_cards(size: int, model: Any) -> None:
    """Raise UsageError unless a model of this config can be split into ``size`` parts by tensor parallelism."""
    for key in ("num_attention_heads", "hidden_size", "intermediate_size"):
        value = getattr(model, key)
        if value % size:
            raise UsageError(f"tensor_parallel_size: expected a divisor of {key} ({value}), found {size}")
    heads = getattr(model, "num_key_value_heads", None) or size
    if heads % size and size % heads:
        raise UsageError(
            f"tensor_parallel_size: expected a divisor or a multiple of num_key_value_heads ({heads}), found {size}"
        )


@dataclass(frozen=True)
class Settings:
    """How a bundle is run."""

    prefill: str  # dense: prompt tokens are not masked; all: every token is
    sparsity: float  # of a sparsity level, or 0

    @classmethod
    def read(cls, additional: Any, environment: Mapping[str, str], default: float) -> Settings:
        """From vLLM's ``additional_config`` and the environment; default: the default level's sparsity."""
        additional = additional if isinstance(additional, Mapping) else {}
        for key in map(str, additional):  # other keys are other plug-ins', but these were meant for us
            nearly = key != NAME and difflib.get_close_matches(key.lower(), [NAME], cutoff=0.8)
            if key in ENVIRONMENT or nearly:
                right = '{"wisparse": {"sparsity": …}}'
                raise UsageError(f"additional_config: expected {right} or the like, found the key {key!r:.80}")
        entry = additional.get(NAME) or {}
        if not isinstance(entry, Mapping):
            raise UsageError(f"additional_config: wisparse: expected an object, found {entry!r:.80}")
        given = {key: environment[name] for key, name in ENVIRONMENT.items() if environment.get(name)} | {**entry}
        unknown = next((str(key) for key in given if key not in ENVIRONMENT), None)
        if unknown is not None:
            raise UsageError(f"additional_config: wisparse: expected {' or '.join(ENVIRONMENT)}, found {unknown!r:.80}")
        prefill, sparsity = given.get("prefill", "dense"), given.get("sparsity", default)
        if prefill not in POLICIES:
            raise UsageError(f"prefill: expected one of {', '.join(POLICIES)} in vLLM, found {prefill!r:.80}")
        try:
            if isinstance(sparsity, bool):
                raise ValueError
            return cls(prefill, float(sparsity))
        except (TypeError, ValueError):
            raise UsageError(f"sparsity: expected a number, found {sparsity!r:.80}") from None
