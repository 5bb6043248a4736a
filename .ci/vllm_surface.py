"""What the plug-in touches of vLLM, and what of it differs between two versions.

    python .ci/vllm_surface.py FOLDER              a site-packages folder or an unpacked wheel, with vllm/ in it
    python .ci/vllm_surface.py FOLDER OTHER        a diff; exit status 1 if anything is missing in OTHER

The files are parsed, not imported. Names are those that runtime/vllm imports, subclasses, overrides, wraps or calls.
"""

from __future__ import annotations

import ast
import difflib
import sys
from pathlib import Path

CLASS_OF_QUANT = "model_executor/layers/quantization/base_config.py"
# File under vllm/: functions, classes, methods (Class.method), and names that only have to be there.
SURFACE = {
    "plugins/__init__.py": ["load_plugins_by_group", "load_general_plugins"],
    "transformers_utils/config.py": ["get_config_parser", "register_config_parser"],
    "transformers_utils/repo_utils.py": ["file_or_path_exists"],
    "config/__init__.py": ["get_current_vllm_config"],
    "distributed/parallel_state.py": ["get_tensor_model_parallel_rank", "get_pp_group"],
    "model_executor/layers/quantization/__init__.py": [
        "QUANTIZATION_METHODS", "register_quantization_config", "get_quantization_config",
    ],
    CLASS_OF_QUANT: [
        "QuantizeMethodBase", "QuantizationConfig", *(
            f"QuantizationConfig.{name}" for name in (
                "get_name", "get_supported_act_dtypes", "get_min_capability", "get_config_filenames", "from_config",
                "override_quantization_method", "maybe_update_config", "get_quant_method", "apply_vllm_mapper",
            )
        ),
    ],
    "model_executor/layers/linear.py": [
        "LinearBase", "LinearMethodBase", "LinearMethodBase.create_weights", "LinearMethodBase.apply",
        "UnquantizedLinearMethod", "UnquantizedLinearMethod.create_weights", "register_weight_loader_v2_supported_method",
    ],
    "model_executor/layers/vocab_parallel_embedding.py": [
        "ParallelLMHead", "ParallelLMHead.tie_weights", "VocabParallelEmbedding.weight_loader", "UnquantizedEmbeddingMethod",
    ],
    "model_executor/parameter.py": [
        f"{name}.__init__" for name in (
            "BasevLLMParameter", "_ColumnvLLMParameter", "RowvLLMParameter", "PerTensorScaleParameter",
            "PackedColumnParameter", "PackedvLLMParameter",
        )
    ] + ["ModelWeightParameter", "ChannelQuantScaleParameter"],
    "model_executor/layers/quantization/compressed_tensors/compressed_tensors.py": [
        "CompressedTensorsConfig.get_quant_method", "CompressedTensorsLinearMethod.create_weights",
        "CompressedTensorsLinearMethod.process_weights_after_loading", "CompressedTensorsLinearMethod.apply",
    ],
    "model_executor/layers/quantization/auto_gptq.py": ["AutoGPTQConfig.get_quant_method", "AutoGPTQConfig.maybe_update_config"],
    "model_executor/layers/quantization/auto_awq.py": ["AutoAWQConfig.get_quant_method", "AutoAWQConfig.maybe_update_config"],
    "model_executor/model_loader/base_loader.py": ["process_weights_after_loading", "BaseModelLoader.load_model"],
    "v1/worker/gpu_model_runner.py": ["GPUModelRunner._prepare_inputs"],
    "v1/worker/gpu/model_runner.py": ["GPUModelRunner.prepare_inputs"],
    "v1/worker/gpu/input_batch.py": ["InputBatch"],
    "v1/worker/gpu/states.py": ["RequestState"],
    "v1/metrics/loggers.py": ["StatLoggerBase", "StatLoggerBase.__init__", "StatLoggerBase.record", "load_stat_logger_plugin_factories"],
}  # fmt: skip
# Methods whose bodies we stand for: ``runtime/vllm/blocks.py`` computes what they do.
BODIES = {
    "model_executor/models/llama.py": ["LlamaMLP.forward", "LlamaDecoderLayer.forward", "LlamaModel.forward"],
    "model_executor/models/mistral.py": ["MistralMLP.forward", "MistralDecoderLayer.forward", "MistralModel.forward"],
    "model_executor/models/qwen2.py": ["Qwen2MLP.forward", "Qwen2DecoderLayer.forward", "Qwen2Model.forward"],
    "model_executor/models/qwen3.py": ["Qwen3DecoderLayer.forward"],
    "model_executor/layers/layernorm.py": ["RMSNorm.__init__"],
}
# Attributes that are read by name only.
READ = {
    CLASS_OF_QUANT: ["online_quantization_config"],
    "v1/worker/gpu_model_runner.py": ["input_batch", "num_computed_tokens_cpu", "num_prompt_tokens"],
    "v1/worker/gpu/input_batch.py": ["num_computed_tokens_np", "num_scheduled_tokens", "idx_mapping_np"],
    "v1/worker/gpu/states.py": ["prompt_len"],
    "config/parallel.py": ["enable_dbo", "prefill_context_parallel_size", "tensor_parallel_size"],
    "config/vllm.py": ["additional_config", "quant_config", "lora_config", "offload_config"],
    "config/offload.py": ["cpu_offload_gb", "offload_group_size"],
    "config/speculative.py": ["enable_adaptive_verification"],
    "envs.py": ["VLLM_BATCH_INVARIANT"],
    "config/compilation.py": ["cudagraph_capture_sizes"],
    "config/scheduler.py": ["max_num_batched_tokens"],
    "config/model.py": ["head_dtype"],
    "model_executor/layers/logits_processor.py": ["lm_head.quant_method.apply"],
    "model_executor/layers/activation.py": ["SiluAndMul"],
    "model_executor/layers/linear.py": ["tp_rank"],
}


def surface(folder: Path) -> list[str]:
    """A line for each name: its signature, its bases, or that it is missing."""
    lines = []
    for file, names in SURFACE.items():
        path = folder / "vllm" / file
        tree = ast.parse(path.read_text("utf-8")) if path.is_file() else ast.Module([], [])
        lines += [f"{file}: {name}{found(tree, name)}" for name in names]
    for file, names in BODIES.items():
        path = folder / "vllm" / file
        tree = ast.parse(path.read_text("utf-8")) if path.is_file() else ast.Module([], [])
        for name in names:
            lines += [f"{file}: {name}: {line}" for line in body(tree, name)]
    for file, names in READ.items():
        path = folder / "vllm" / file
        text = path.read_text("utf-8") if path.is_file() else ""
        lines += [f"{file}: {name}{'' if name in text else ': missing'}" for name in names]
    return lines


def found(tree: ast.Module | ast.ClassDef, name: str) -> str:
    first, _, rest = name.partition(".")
    for node in ast.walk(tree) if isinstance(tree, ast.Module) else tree.body:
        if isinstance(node, ast.ClassDef) and node.name == first:
            return found(node, rest) if rest else f"({', '.join(map(ast.unparse, node.bases))})"
        if isinstance(node, ast.FunctionDef) and node.name == first:
            return f"({ast.unparse(node.args)})"
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == first for target in targets):
            return ""
        if isinstance(node, ast.ImportFrom) and any((one.asname or one.name) == first for one in node.names):
            return f" from {node.module}"
    return ": missing"


def body(tree: ast.Module | ast.ClassDef, name: str) -> list[str]:
    """The statements of a method, without comments."""
    first, _, rest = name.partition(".")
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == first:
            return body(node, rest)
        if isinstance(node, ast.FunctionDef) and node.name == first:
            return ast.unparse(node).splitlines()
    return ["missing"]


def main(folders: list[str]) -> int:
    if len(folders) not in (1, 2):
        print(__doc__)
        return 2
    before, *after = (surface(Path(folder)) for folder in folders)
    if not after:
        print("\n".join(before))
        return int(any(line.endswith(": missing") for line in before))
    print("\n".join(difflib.unified_diff(before, after[0], *folders, lineterm="", n=0)))
    return int(any(line.endswith(": missing") for line in after[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
