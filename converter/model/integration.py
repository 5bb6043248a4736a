"""transformers' own door: ``from_pretrained(bundle, quantization_config=WisparseConfig())`` loads a sparse model.

Importing this module registers the method, as transformers wants it done; ``from wisparse import WisparseConfig`` does
that, and ``import wisparse`` alone does not. A bundle's ``config.json`` does not name the method: programs that do not
know it would refuse the bundle, which they can load dense.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from wisparse.formats.guard import arguments
from wisparse.formats.prefill import PREFILL_POLICIES

from .sparsify import sparsify

__all__ = ["WisparseConfig", "WisparseQuantizer"]

_METHOD = "wisparse"


class WisparseConfig(QuantizationConfigMixin):
    """Load a bundle sparse.

    Args:
        prefill: which tokens of a prompt are sparse, as in ``wisparse.sparsify``.
    """

    def __init__(self, prefill: str = "dense", **_: Any) -> None:
        arguments.choice("prefill", prefill, PREFILL_POLICIES)
        self.quant_method: Any = _METHOD
        self.prefill = prefill


class WisparseQuantizer(HfQuantizer):
    """Lets transformers load the dense weights as always, then puts the masks on.

    What comes out is a plain model with hooks, not a "quantised" one: ``to(dtype)`` and ``save_pretrained`` work.
    """

    requires_calibration = False

    def preprocess_model(self, model: Any, dtype: Any = None, **kwargs: Any) -> None:
        # Where transformers found the weights. From the Hub, that is our cache entry as well.
        files = kwargs.get("checkpoint_files")
        self._folder = Path(files[0]).parent if files else None
        super().preprocess_model(model, dtype=dtype, **kwargs)

    def postprocess_model(self, model: Any, **kwargs: Any) -> Any:
        prefill = vars(self.quantization_config)["prefill"]
        self.remove_quantization_config(model)
        folder = self._folder
        if folder is not None and (folder / "wisparse.safetensors").is_file():
            return sparsify(model, folder, prefill=prefill)
        # transformers fetched the weights only.
        name, commit = model.config.name_or_path, getattr(model.config, "_commit_hash", None)
        local = Path(name).is_dir()
        return sparsify(model, name, prefill=prefill, revision=None if local else commit)

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


if _METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
    register_quantization_config(_METHOD)(WisparseConfig)
    register_quantizer(_METHOD)(WisparseQuantizer)
