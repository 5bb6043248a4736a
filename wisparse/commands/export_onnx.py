"""``wisparse export-onnx``: a bundle as an ONNX decoder."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np
import torch

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import UsageError, WisparseError
from wisparse.formats.folder import check_target
from wisparse.formats.guard import text
from wisparse.formats.hub import fetch_bundle
from wisparse.formats.model_config import ModelConfig
from wisparse.formats.onnx.export import DOMAIN, MODEL, RotaryTables
from wisparse.kernels.reference import keep_mask, scores
from wisparse.runtime.decoding.rotary import attention_scaling, inverse_frequencies, switch_length
from wisparse.runtime.torch.decoder import TorchDecoder

from ..options import FOLDER_OR_ID, NEW_FOLDER, revision_option

# What the check writes beside an export, and removes.
PROBE = "check.onnx"

_PROMPT, _STEPS = 24, 16

# Largest difference over the largest value, that rounding explains: about ten times what was seen.
_DENSE = {"float32": 1e-4, "float16": 2e-2}
_PROJECTION = {"float32": 1e-5, "float16": 5e-3}
# Scores this close to the threshold, relative to it, may fall on either side: on CPUs, ONNX Runtime goes on with more
# digits of an activation than the float16 value it shows.
_ROUNDING = {"float32": 1e-6, "float16": 1e-3}


def rotary_tables(config: ModelConfig) -> tuple[RotaryTables, ...]:
    """The runtime's rotary frequencies, for the graph."""
    return tuple(
        RotaryTables(
            frequencies=inverse_frequencies(rope).numpy(),
            scaling=attention_scaling(rope),
            long_frequencies=inverse_frequencies(rope, long=True).numpy() if rope.rope_type == "longrope" else None,
            switch_length=switch_length(config) or 0,
        )
        for rope in config.rotaries
    )


class OnnxDecoder:
    """Runs an exported folder on the CPU, one batch at a time; ``num_threads`` 0 lets ONNX Runtime choose."""

    def __init__(self, folder: str | os.PathLike[str], name: str = MODEL, num_threads: int = 0) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.log_severity_level = 3
        path = str(Path(folder) / name)
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._pasts = [value for value in self._session.get_inputs() if value.name.startswith("past_key_values.")]
        self._outputs = [value.name for value in self._session.get_outputs()]

    def reset(self, mask: np.ndarray) -> None:
        """Start over with prompts of ``mask`` (B, L) int64, 0 where a prompt is padded on the left."""
        self._mask = np.zeros((len(mask), 0), dtype=np.int64)
        types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
        self._cache = {
            value.name: np.zeros((len(mask), value.shape[1], 0, value.shape[3]), dtype=types[value.type])
            for value in self._pasts
        }

    def forward(self, token_ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Append tokens (B, L) int64 to the sequences; gives logits (B, L, V) float32."""
        new = np.ones_like(token_ids) if mask is None else mask
        self._mask = np.concatenate((self._mask, new), axis=1)
        positions = np.maximum(self._mask.cumsum(axis=1) - 1, 0)[:, -token_ids.shape[1] :]
        feeds = {"input_ids": token_ids, "attention_mask": self._mask, "position_ids": positions}
        results = self._run(feeds, self._cache)
        logits = results.pop("logits")
        self._cache = {name.replace("present.", "past_key_values."): value for name, value in results.items()}
        return logits

    def values(self, filled: OnnxDecoder, token_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Every output of the pass that would append tokens (B, L) to the sequences of another decoder."""
        mask = np.concatenate((filled._mask, np.ones_like(token_ids)), axis=1)
        positions = (mask.cumsum(axis=1) - 1)[:, -token_ids.shape[1] :]
        return self._run({"input_ids": token_ids, "attention_mask": mask, "position_ids": positions}, filled._cache)

    def _run(self, feeds: Mapping[str, np.ndarray], cache: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return dict(zip(self._outputs, self._session.run(None, {**feeds, **cache}), strict=True))

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """``count`` greedy tokens for each prompt, decoded in one batch."""
        longest = max(map(len, prompts))
        padded = np.array([[0] * (longest - len(prompt)) + prompt for prompt in prompts], dtype=np.int64)
        mask = np.array([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], dtype=np.int64)
        self.reset(mask)
        tokens = self.forward(padded, mask)[:, -1].argmax(axis=-1)[:, None]
        while tokens.shape[1] < count:
            tokens = np.concatenate((tokens, self.forward(tokens[:, -1:])[:, -1].argmax(axis=-1)[:, None]), axis=1)
        return tokens.tolist()


def check_export(folder: Path, bundle: Bundle, dtype: str) -> dict[str, float]:
    """Compare an export with our decoder in float32; WisparseError if they differ by more than ``dtype`` explains.

    Dense logits of a prompt in two chunks are compared end to end. Sparse projections are compared node by node, each on
    its own input in a decoding step: end to end, a score within a rounding error of its threshold is kept by one and
    dropped by the other, which changes the next blocks' scores in turn. How far that goes is reported, not judged.

    Returns: ``dense_error`` and ``projection_error`` (largest difference over the largest value), ``sparse_kl`` and
    ``sparse_top1`` (of the sparse steps' logits against ours: mean KL in nats, fraction with the same first choice),
    ``masks_kl`` (the same KL between our sparse and our dense steps, to compare with).
    """
    config = bundle.config
    # LongRoPE turns all positions by other angles beyond its switch: stay on one side of it.
    length = min(_PROMPT + _STEPS, config.max_position_embeddings, switch_length(config) or _PROMPT + _STEPS)
    prompt = max(2, length - _STEPS)
    ours = TorchDecoder(bundle, device=torch.device("cpu"), dtype=torch.float32, max_seq_len=length)
    # Text that the model itself samples: on random tokens a trained model is at its least stable.
    generator, written = torch.Generator().manual_seed(0), [int(bundle.config_dict.get("bos_token_id") or 0)]
    logits = ours.prefill(0, torch.tensor(written), 1)
    while len(written) < length:
        written.append(int(torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)))
        logits = ours.decode(torch.tensor(written[-1:]))[0]
    tokens = np.array(written, dtype=np.int64)
    ids = torch.from_numpy(tokens)
    everything = ours.logits(ids, length)
    ours.prefill(0, ids[:prompt], prompt)
    sparse = torch.cat([ours.decode(ids[i : i + 1]) for i in range(prompt, length)])
    ours.close()

    theirs = OnnxDecoder(folder)
    theirs.reset(np.ones((1, prompt), dtype=np.int64))
    chunks = (tokens[None, : prompt // 2], tokens[None, prompt // 2 : prompt])
    found = torch.from_numpy(np.concatenate([theirs.forward(chunk)[0] for chunk in chunks]))
    error = float((found - everything[:prompt]).abs().max() / everything[:prompt].abs().max())
    projection_error = _check_projections(folder, bundle, dtype, theirs, tokens[None, prompt : prompt + 1])
    steps = torch.cat([torch.from_numpy(theirs.forward(tokens[None, i : i + 1])[0]) for i in range(prompt, length)])
    for what, value, limit in (
        ("the dense logits", error, _DENSE[dtype]),
        ("the sparse projections", projection_error, _PROJECTION[dtype]),
    ):
        if not value <= limit:  # a NaN fails too
            raise WisparseError(
                f"the ONNX model does not agree with our runtime: {what} differ by {value:.2g}, expected at most "
                f"{limit:.2g} in {dtype}; nothing was written"
            )
    return {
        "dense_error": error,
        "projection_error": projection_error,
        "sparse_kl": _kl(sparse, steps),
        "masks_kl": _kl(sparse, everything[prompt:]),
        "sparse_top1": float((sparse.argmax(-1) == steps.argmax(-1)).float().mean()),
    }


def _check_projections(folder: Path, bundle: Bundle, dtype: str, filled: OnnxDecoder, token: np.ndarray) -> float:
    """Largest relative error of any sparse node, given its own input, in the step that appends ``token``.

    What a channel contributes whose score is within ``_ROUNDING`` of the threshold does not count as an error.
    """
    import onnx

    # The same model with every sparse node's input and output among its outputs; the weights stay where they are.
    model = onnx.load(str(folder / MODEL), load_external_data=False)
    nodes = [node for node in model.graph.node if node.domain == DOMAIN]
    kind = model.graph.input[-1].type.tensor_type.elem_type
    for name in dict.fromkeys(value for node in nodes for value in (node.input[0], node.output[0])):
        model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    probe = folder / PROBE
    onnx.save(model, str(probe))
    try:
        values = OnnxDecoder(folder, name=probe.name).values(filled, token)
    finally:
        probe.unlink()
    errors = [0.0]
    for node in nodes:
        mask = bundle.masks[node.name]
        x = torch.from_numpy(values[node.input[0]]).flatten()
        weight = bundle.checkpoint.tensor(f"{node.name}.weight").to(x.dtype).double()
        kept = torch.where(keep_mask(x, mask.channel_scale, mask.threshold), x, x.new_zeros(()))
        expected = weight @ kept.double()
        close = (scores(x, mask.channel_scale) - mask.threshold).abs() <= _ROUNDING[dtype] * mask.threshold
        undecided = weight[:, close].abs() @ x[close].double().abs()
        difference = (torch.from_numpy(values[node.output[0]]).flatten().double() - expected).abs() - undecided
        # A projection whose channels are all dropped gives exactly nothing.
        errors.append(float(difference.max() / expected.abs().max().clamp(min=1e-30)))
    return float(np.max(errors))  # unlike max(), it lets a NaN win


def _kl(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """Mean KL(wanted || found) of logits (T, V), in nats."""
    left, right = (torch.log_softmax(logits.double(), dim=-1) for logits in (wanted, found))
    return float((left.exp() * (left - right)).sum(-1).mean())


@click.command("export-onnx")
@click.argument("bundle", type=FOLDER_OR_ID)
@click.argument("out", type=NEW_FOLDER)
@click.option("--opset", type=click.IntRange(18, 24), default=21, show_default=True, help="ONNX operator set.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float16"]),
    default="auto",
    show_default=True,
    help="Type of weights and activations; auto is the bundle's own, and float32 for bfloat16.",
)
@click.option(
    "--sparsity",
    type=float,
    help="A sparsity level of the bundle, or 0 for the dense model.  [default: the bundle's own]",
)
@click.option(
    "--check/--no-check", default=True, show_default=True, help="Run the result and compare it with our runtime."
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier export in OUT, once the new one is complete.")
@revision_option
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    bundle: str,
    out: Path,
    opset: int,
    dtype: str,
    sparsity: float | None,
    check: bool,
    overwrite: bool,
    revision: str | None,
    as_json: bool,
) -> None:
    """Write BUNDLE, a folder or a Hub id, to the folder OUT as an ONNX decoder with a KV cache.

    OUT works in ONNX Runtime, onnxruntime-genai and optimum. The sparse projections are nodes
    ai.wisparse::SparseLinear whose definition is part of the file: every ONNX runtime runs them, and one with an
    operator of that name of its own can skip the dropped channels.

    \b
    Example:
      wisparse export-onnx out out-onnx --dtype float16
    """
    for package in ("onnx", "onnxruntime") if check else ("onnx",):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"export-onnx needs the package {package}: pip install 'wisparse[onnx]'")
    from wisparse.formats.onnx.export import DTYPES, EXPORT, export_onnx

    text("OUT", str(out))  # as the onnx package can write it
    check_target(Path(os.path.abspath(out)), EXPORT, overwrite)  # before a bundle is fetched
    started = time.monotonic()
    opened = Bundle.open(fetch_bundle(bundle, revision))
    if sparsity is not None:
        opened = opened.at(sparsity)
    if dtype == "auto":
        dtype = opened.config.dtype if opened.config.dtype in DTYPES else "float32"
    agreement: dict[str, float] = {}

    def compare(folder: Path) -> None:
        agreement.update(check_export(folder, opened, dtype))

    export = export_onnx(
        opened,
        out,
        rotary_tables(opened.config),
        opset=opset,
        dtype=dtype,
        overwrite=overwrite,
        check=compare if check else None,
        check_files=(PROBE,),
    )
    seconds = time.monotonic() - started
    for note in export.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        report = {
            "folder": str(export.folder),
            "opset": export.opset,
            "dtype": export.dtype,
            "num_bytes": export.num_bytes,
            "num_sparse_projections": export.num_sparse,
            "check": agreement or None,
            "notes": list(export.notes),
            "seconds": round(seconds, 3),
        }
        click.echo(json.dumps(report, indent=2))
        return
    click.echo(
        f"{out}: opset {export.opset}, {export.dtype}, {export.num_sparse} sparse projections, "
        f"{export.num_bytes / 1e6:,.1f} MB, in {seconds:.1f} s"
    )
    if agreement:
        click.echo(
            f"agrees with our runtime: dense logits to {agreement['dense_error']:.1e}, sparse projections to "
            f"{agreement['projection_error']:.1e} of the largest value"
        )
