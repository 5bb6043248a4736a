"""The source model, loaded by transformers: weights, tokenizer, projections by name. It computes statistics
and losses; the bundle's weights are copied from the source's files."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wisparse.formats.architectures import RENAMED
from wisparse.formats.bundle import SMALL_FILES
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, ResourceError, UnsupportedModelError, WisparseError, first_line
from wisparse.formats.guard import list_files, open_regular, read_bounded, shown
from wisparse.formats.machine import choose_device
from wisparse.formats.model_config import LM_HEAD, ModelConfig
from wisparse.formats.tensor_file import INDEX, TensorFile
from wisparse.formats.tensors import PER_LAYER_EMBEDDING, expected_tensors
from wisparse.formats.write import copied_files

from .config import full_config
from .experts import ExpertProjection, find_experts
from .flow import input_device
from .tokenizer import load_tokenizer, quiet_transformers

_MAX_TEXT_BYTES = 16 << 20


def small_digests(folder: Path, error: type[WisparseError]) -> dict[str, str]:
    """sha256 by name of the files, other than weights, that a conversion reads or copies."""
    contents = dict(copied_files(folder, error))
    for name in list_files(folder, 100_000, error, deep=True):
        if name in ("config.json", "README.md", INDEX):
            contents[name] = read_bounded(folder, name, max(_MAX_TEXT_BYTES, SMALL_FILES.get(name, 0)), error)
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(contents.items())}


def weight_digests(checkpoint: Checkpoint) -> dict[str, str]:
    def digest(name: str) -> str:
        place = checkpoint.files[name].folder, name, checkpoint.error, checkpoint.files[name].identity
        with open_regular(*place) as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        open_regular(*place).close()  # fails if the file was changed
        return sha256

    names = [*checkpoint.files]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(digest, names), strict=True))


class StoredEmbedding(nn.Module):
    """Gemma 4's per-layer embedding, which has most of the model's parameters: a look-up reads the tokens' rows from the
    checkpoint's file."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        super().__init__()
        self.checkpoint, self.dtype = checkpoint, dtype
        self.scale = float(torch.tensor(checkpoint.config.per_layer_size**0.5, dtype=dtype))
        checkpoint.require_finite(PER_LAYER_EMBEDDING)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.checkpoint.rows(PER_LAYER_EMBEDDING, ids.flatten().cpu()).to(ids.device, self.dtype)
        return rows.view(*ids.shape, -1) * self.scale


def _without_embedding(config_class: type, stored: StoredEmbedding) -> Any:
    """transformers' causal LM class with ``stored`` as per-layer embedding, which is then not loaded."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    base: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]

    def make(self: Any, config: Any, **kwargs: Any) -> None:
        base.__init__(self, config, **kwargs)
        self.get_decoder().embed_tokens_per_layer = stored

    return type(base.__name__, (base,), {"__init__": make, "__module__": base.__module__})


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A model that is built here has no memory for its parameters: transformers initialises tied ones before it ties them."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _allocate(model: nn.Module, device: torch.device) -> None:
    """Move ``model`` to ``device``, with memory for its parameters; tied ones stay tied."""
    memory = {one: nn.Parameter(torch.empty_like(one, device=device), False) for one in model.parameters()}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, memory[parameter])
    model.to(device)


_ROWS = 4096  # of a weight that are dequantised together
# The first version that can leave all weights of a model in its files.
_ACCELERATE = (1, 15)


@dataclass(frozen=True)
class SourceModel:
    """transformers' model and tokenizer, in evaluation mode, without gradients and without a cache."""

    model: Any
    config: ModelConfig
    tokenizer: Any
    projections: Mapping[str, Any]  # nn.Linear or `ExpertProjection` by full name, in `ModelConfig.projections`' order
    device: torch.device  # of the token ids
    dtype: torch.dtype  # of the computation, not of the bundle
    planes: int = 1  # of each projection's channels, see `planes`

    def weight(self, name: str) -> Tensor:
        """A projection's weight (N, K), or (E, N, K); offloaded weights are copied to the device."""
        module = self.projections[name]
        if not module.weight.is_meta:
            return module.weight
        if isinstance(module, ExpertProjection):
            offloaded = module.part(module.experts._hf_hook.weights_map.__getitem__)
        else:
            offloaded = module._hf_hook.weights_map["weight"]
        return offloaded.to(self.device, module.weight.dtype)


def weights_of(model: Any, config: ModelConfig) -> dict[str, Tensor]:
    """A model's parameters by their names in a checkpoint; each expert's are views of transformers' stacked ones."""
    tensors: dict[str, Tensor] = dict(model.named_buffers())  # Gemma 4's factors of blocks
    tensors |= model.named_parameters(remove_duplicate=False)
    modules = find_experts(model, config)
    for projection in config.projections():
        if projection.experts:
            weights = modules[projection.name].weight
            tensors |= {f"{part}.weight": weight for part, weight in zip(projection.parts, weights, strict=True)}
            if projection.bias:
                biases = modules[projection.name].bias
                assert biases is not None
                tensors |= {f"{part}.bias": bias for part, bias in zip(projection.parts, biases, strict=True)}
    for index, block in enumerate(config.blocks):
        router = "" if block.experts is None else f"model.layers.{index}.{block.experts.router}"
        if router and router not in tensors:  # some checkpoints name the router otherwise than transformers
            names = (f"model.layers.{index}.mlp.gate.weight", router.replace("router.layer.", "router."))
            tensors[router] = next(tensors[name] for name in names if name in tensors)
        layout = config.architecture.experts
        if block.experts is not None and layout is not None and layout.stacked_names is not None:
            stacked = zip(layout.stacked_names, ("experts.gate_up_proj", "experts.down_proj"), strict=True)
            inside = f"model.layers.{index}.{layout.module}."
            tensors |= {inside + name: tensors[inside + own] for name, own in stacked}
        if "sinks" in config.architecture.modules:
            sinks = config.architecture.modules["sinks"]
            tensors[f"model.layers.{index}.{sinks}"] = tensors[f"model.layers.{index}.self_attn.sinks"]
        bias = None if block.experts is None else block.experts.choice_bias
        if bias is not None and f"model.layers.{index}.{bias}" not in tensors:
            old = f"model.layers.{index}.{re.sub('^(mlp|block_sparse_moe)[.]', 'mlp.gate.', bias)}"
            tensors[f"model.layers.{index}.{bias}"] = tensors[old if old in tensors else old.replace(".gate", "")]
    return tensors


def lacks_accelerate() -> str | None:
    """Why accelerate cannot distribute a model over devices, and what to do; None if it can."""
    install = f"pip install 'accelerate>={'.'.join(map(str, _ACCELERATE))}'"
    try:
        installed = version("accelerate")
    except PackageNotFoundError:
        return f"it needs the package accelerate: {install}"
    if tuple(map(int, re.findall(r"\d+", installed)[:2])) < _ACCELERATE:
        return f"accelerate {installed} is too old: {install}"
    return None


def choose_dtype(source_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in: the source's on a GPU, float32 on a CPU, where bfloat16 is slow and noisy."""
    if device.type == "cpu":
        return torch.float32
    dtype = getattr(torch, source_dtype, None)
    return dtype if dtype in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16


@contextmanager
def float32_by_onednn() -> Iterator[None]:
    """Within the context, float32 products on a CPU are oneDNN's where it computes them in float32. Its AVX-512 kernels are
    twice as fast on AMD's CPUs as MKL's, which takes AVX2 there."""
    onednn: Any = torch.backends.mkldnn  # without types
    setting = onednn.matmul
    before = setting.fp32_precision
    # torch has oneDNN multiply float32 only if it may round to bfloat16, which it does on CPUs with tiles (AMX) alone.
    setting.fp32_precision = "bf16"
    try:
        x = torch.rand(256, 256, generator=torch.Generator().manual_seed(0))
        if not torch.allclose(x @ x, (x.double() @ x.double()).float(), rtol=1e-5):
            setting.fp32_precision = before
        yield
    finally:
        setting.fp32_precision = before


def load_source(
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "auto",
    *,
    max_memory: Mapping[int | str, int] | None = None,
    bundle: bool = False,
    weights: TensorFile | None = None,
) -> SourceModel:
    """Load a Hugging Face checkpoint from a local folder; no code from the folder is executed. ``max_memory``:
    accelerate's limits in bytes by GPU and for ``cpu``, for a model larger than one device. Blocks are placed on the
    GPUs, then in memory; the rest stays in the files. ``weights``: see `Checkpoint.open`."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    folder = Path(folder)
    device = choose_device(device)
    # Validates every header, with better messages than transformers'.
    how: dict[str, Any] = {"error": BundleError} if bundle else {"complete": full_config, "weights": weights}
    checkpoint = Checkpoint.open(folder, **how)
    config = checkpoint.config
    dtype = dtype or choose_dtype(config.dtype, device)
    tokenizer = load_tokenizer(folder)
    placement: dict[str, Any] = {}
    if max_memory is not None:
        placement = {"device_map": "auto", "max_memory": dict(max_memory)}
    elif device.type == "cuda" and lacks_accelerate() is None:
        # Loads shard by shard to the GPU: host memory does not have to hold the model.
        placement = {"device_map": {"": device}}
    # torch's scaled_dot_product_attention has neither a soft cap nor sinks.
    attention = "eager" if config.attention_softcap is not None or config.architecture.sinks else "sdpa"
    missing: list[str] = []
    try:
        with quiet_transformers():
            # `full_config`'s: a multimodal model's config.json is not that of its text model.
            plain = {key: value for key, value in checkpoint.config_dict.items() if key != "quantization_config"}
            hf_config = CONFIG_MAPPING[config.model_type].from_dict(plain)
            if config.model_type == "muse_glimmer_text":
                importlib.import_module("wisparse.converter.muse_glimmer")
            loader: Any = AutoModelForCausalLM
            from_config = loader.from_config
            if config.per_layer_size:
                loader = _without_embedding(type(hf_config), StoredEmbedding(checkpoint, dtype))
                from_config, hf_config.vocab_size_per_layer_input = loader._from_config, 1  # of the embedding replaced
            if checkpoint.quantised or checkpoint.is_made:
                if max_memory is not None:
                    large = f"{shown(folder)}: the dequantised weights do not fit into the memory of {device}"
                    advice = "choose a larger device, or convert the unquantised model"
                    raise ResourceError(f"{large}, and quantised ones cannot stay in their files; {advice}")
                with _parameters_on_meta():
                    model: Any = from_config(hf_config, dtype=dtype, attn_implementation=attention)
                # Tensor by tensor: the dequantised weights are in memory once.
                _allocate(model, device)
                parameters = weights_of(model, config)
                with torch.no_grad():
                    for name in expected_tensors(config) if checkpoint.quantised else checkpoint.tensors:
                        if name != PER_LAYER_EMBEDDING:
                            row = 0
                            for piece in checkpoint.row_pieces(name, _ROWS):
                                parameters[name][row : row + len(piece)].copy_(piece)
                                row += len(piece)
            else:
                loaded: Any = loader.from_pretrained(
                    folder,
                    config=hf_config,
                    dtype=dtype,
                    attn_implementation=attention,
                    trust_remote_code=False,
                    local_files_only=True,
                    use_safetensors=True,
                    key_mapping={f"^{re.escape(stored)}": plain for stored, plain in RENAMED.items()},
                    output_loading_info=True,
                    **placement,
                )
                model, info = loaded
                missing = sorted(info["missing_keys"])
            if config.per_layer_size:
                model.config.vocab_size_per_layer_input = config.vocab_size
    except WisparseError:
        raise
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        advice = "choose a larger device, or --device cpu"
        raise ResourceError(f"{shown(folder)} does not fit into the memory of {device}; {advice}") from error
    except Exception as error:
        # transformers and safetensors raise many types of errors for files that they cannot load.
        raise UnsupportedModelError(f"{shown(folder)}: the weights cannot be loaded: {first_line(error)}") from error
    if config.tie_word_embeddings and LM_HEAD in checkpoint.tensors:  # transformers unties a head of another dtype
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    if missing:  # transformers initialises missing tensors with random numbers, and only warns
        lack = f"{len(missing)} tensor(s) are missing from the weights, e.g. {missing[0]}"
        raise UnsupportedModelError(f"{shown(folder)}: {lack}; download the checkpoint again")
    if not placement:
        model.to(device)
    model.eval()
    model.requires_grad_(False)
    model.config.use_cache = False
    for name, parameter in model.named_parameters():
        # The two extremes need no temporary tensor; NaN is both.
        if not parameter.is_meta and not torch.stack(torch.aminmax(parameter)).isfinite().all():
            wrong = f"{name} holds NaN or Inf, so no statistic of this model means anything"
            raise UnsupportedModelError(f"{shown(folder)}: {wrong}; use an intact checkpoint")
    experts = find_experts(model, config)
    names = [projection.name for projection in config.projections()]
    projections = {name: experts[name] if name in experts else model.get_submodule(name) for name in names}
    return SourceModel(model, config, tokenizer, projections, input_device(model), dtype)


def cache_argument(model: Any) -> str:
    """The cache's argument of a model's forward: ``cache`` since transformers 5.24, before that ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
