"""Bundles without an end-of-text token, so that every answer has the same length; for ``gpu_first.py``, which runs this
in a process of its own, as that gives the GPU's memory back:

    PYTHONPATH=. python benchmarks/gpu_bundle.py --shape llama-3.1-8b --folder out      # random weights, 50%, 17 GB
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "pycode-llama-6m"
SPARSITY = 0.5


def endless_source(folder: Path, vocab_size: int | None = None) -> Path:
    """The example's files without an end-of-text token; with ``vocab_size`` only its tokenizer, made that large by words
    of its own."""
    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        document = json.loads((EXAMPLE / name).read_text("utf-8"))
        kept = {key: value for key, value in document.items() if not key.startswith("eos_token")}
        if vocab_size is None or name == "tokenizer_config.json":
            (folder / name).write_text(json.dumps(kept), "utf-8")
    shutil.copy(EXAMPLE / "chat_template.jinja", folder)
    tokenizer = json.loads((EXAMPLE / "tokenizer.json").read_text("utf-8"))
    if vocab_size is None:
        shutil.copy(EXAMPLE / "model.safetensors", folder)
    else:
        words = tokenizer["model"]["vocab"]
        words.update({f"Ġword{index}": index for index in range(len(words), vocab_size)})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    return folder


def make_random(shape: str, num_blocks: int | None, out: Path, device: str) -> None:
    """A bundle of a published shape: random weights, thresholds calibrated on the device as ``gpu_decode.py`` does."""

    import torch
    from gpu_models import SHAPES, calibrate, random_bundle

    from wisparse.formats.bundle import ProjectionMask
    from wisparse.formats.checkpoint import TensorInfo
    from wisparse.formats.errors import BundleError
    from wisparse.formats.manifest import CalibrationRecord, ProjectionRecipe, Recipe, SparsityLevel
    from wisparse.formats.model_config import expected_tensors
    from wisparse.formats.write import write_bundle
    from wisparse.runtime.cuda.decoder import CudaDecoder

    random = random_bundle(shape, num_blocks=num_blocks)
    config = random.config
    config_dict = {**SHAPES[shape], "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "dtype": "bfloat16"}
    config_dict["num_hidden_layers"] = config.num_blocks
    decoder = CudaDecoder(random, device=torch.device(device), dtype=torch.bfloat16, max_seq_len=512)
    settings = calibrate(decoder, [SPARSITY])[SPARSITY]
    thresholds = {id(group): values.tolist() for group, values in settings}
    masks = {}
    for index, block in enumerate(decoder.weights.blocks):
        names = iter(projection.name for projection in config.projections(index))
        for group in block.linears:
            for scale, threshold in zip(group.scales, thresholds[id(group)], strict=True):
                masks[next(names)] = ProjectionMask(scale.cpu(), threshold, SPARSITY)
    decoder.close()

    class Source:
        """What ``write_bundle`` asks of a checkpoint; each tensor is made when it is written."""

        def __init__(self, folder: Path) -> None:
            self.config, self.config_dict, self.folder = config, config_dict, folder
            self.error, self.quantised, self.rotation = BundleError, {}, None
            self.tensors = {
                name: TensorInfo(name, "none", name, size, "BF16") for name, size in expected_tensors(config).items()
            }

        def chunks(self, name: str, chunk_bytes: int):
            yield from random.checkpoint.tensor(name, device).flatten().cpu().split(chunk_bytes // 2)

    entries = tuple(ProjectionRecipe(n, m.sparsity, 0.5, m.threshold, m.sparsity) for n, m in masks.items())
    recipe = Recipe(
        base_model=f"random/{shape}", base_revision=None, method="wisparse", default=SPARSITY,
        levels=(SparsityLevel(SPARSITY, entries, (SPARSITY,) * config.num_blocks),),
        calibration=CalibrationRecord("self", 1, 256, 256, 0, "ab" * 32),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        source = Source(endless_source(Path(folder, "source"), config.vocab_size))
        write_bundle(source, recipe, {SPARSITY: masks}, out)  # type: ignore[arg-type]


def environment() -> dict[str, str]:
    """The package from this checkout, wherever the script was started."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--blocks", type=int, help="fewer blocks than the shape has, to try it out")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    make_random(arguments.shape, arguments.blocks, arguments.folder, arguments.device)


if __name__ == "__main__":
    main()
