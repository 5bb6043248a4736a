"""Heads that draft: what they compute, in whatever coordinates the bundle is, and that answers are those without."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bundle_maker import cpu_decoder, run, tokens_of
from runtime_models import make_checkpoint, save_random
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_bundle import resign, tiny_recipe
from torch.nn import functional

import wisparse
from wisparse.converter.config import full_config
from wisparse.converter.rotation import Rotation, rotated
from wisparse.formats.bundle import SIDECAR, Bundle, ProjectionMask, scale_shapes
from wisparse.formats.checkpoint import Checkpoint
from wisparse.formats.errors import BundleError, ResourceError, UnsupportedModelError, UsageError
from wisparse.formats.manifest import RotationRecord
from wisparse.formats.write import write_bundle
from wisparse.runtime.decoding.decoder import Decoder
from wisparse.runtime.decoding.heads import HeadFiles, MtpFiles
from wisparse.runtime.decoding.sampling import SamplingParams
from wisparse.runtime.generation import speculation
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.generation.speculation import SpeculativeConfig

H, INNER, HEADS, KV, WIDTH, VOCAB, DRAFTED = 64, 96, 4, 2, 16, 101, 60
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": H, "intermediate_size": INNER,
    "num_attention_heads": HEADS, "num_key_value_heads": KV, "num_hidden_layers": 1, "vocab_size": VOCAB,
    "draft_vocab_size": DRAFTED, "rope_theta": 10000.0, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}  # fmt: skip
# Run so by test_kernels_triton.py.
BACKENDS = ["triton"] if os.environ.get("TRITON_INTERPRET") == "1" else ["torch", "numba"]


def make_head(folder: Path, embedding: bool = False, **changes: Any) -> Path:
    generator = torch.Generator().manual_seed(3)
    shapes = {"fc": (H, 3 * H), "lm_head": (DRAFTED, H)} | ({"embed_tokens": (VOCAB, H)} if embedding else {})
    sizes = {"q": (H, 2 * H), "k": (KV * WIDTH, 2 * H), "v": (KV * WIDTH, 2 * H), "o": (H, H)}
    shapes |= {f"midlayer.self_attn.{name}_proj": size for name, size in sizes.items()}
    shapes |= {"midlayer.mlp.gate_proj": (INNER, H), "midlayer.mlp.up_proj": (INNER, H)}
    shapes["midlayer.mlp.down_proj"] = (H, INNER)
    tensors = {f"{k}.weight": torch.randn(v, generator=generator) * v[-1] ** -0.5 for k, v in shapes.items()}
    norms = ["norm", *(f"midlayer.{one}" for one in ("hidden_norm", "input_layernorm", "post_attention_layernorm"))]
    tensors |= {f"{name}.weight": torch.rand(H, generator=generator) + 0.5 for name in norms}
    kept = torch.randperm(VOCAB, generator=generator)[:DRAFTED].sort().values
    tensors["d2t"], tensors["t2d"] = kept - torch.arange(DRAFTED), torch.zeros(VOCAB, dtype=torch.bool)
    tensors |= changes.pop("add", {})
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """A model with masks that drop nothing, as it is and in other coordinates."""
    folder, generator = tmp_path_factory.mktemp("heads"), torch.Generator().manual_seed(1)
    plain = Checkpoint.open(make_checkpoint("llama", folder / "source"), complete=full_config)
    turns = [torch.linalg.qr(torch.randn(n, side, side, generator=generator))[0] for n, side in ((1, H), (6, WIDTH))]
    turned = rotated(plain, Rotation(turns[0][0], tuple(turns[1].split(KV))), torch.device("cpu"))
    found = {}
    for name, checkpoint, record in (("plain", plain, None), ("rotated", turned, RotationRecord("pca", 0.0, 1))):
        masks = {p.name: ProjectionMask(torch.ones(p.in_features), 0.0, 0.0) for p in checkpoint.config.projections()}
        recipe = tiny_recipe(checkpoint.config, {0.0: masks}, default=0.0, rotation=record)
        found[name] = Bundle.open(write_bundle(checkpoint, recipe, {0.0: masks}, folder / name))
    return found


def expected_draft(source: Path, head: Path, ids: list[int], count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    w = load_file(head / "model.safetensors")
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        rotary = model.model.rotary_emb(states[2], torch.arange(len(ids) - 1)[None])
        last = model.model.layers[2](states[2], position_embeddings=rotary)
    states = [states[1][0], states[2][0], last[0] if last.dim() == 3 else last]
    hidden, found = functional.linear(torch.cat(states, -1), w["fc.weight"]), list(ids)
    table = w.get("embed_tokens.weight", model.get_input_embeddings().weight.detach())

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * w[f"{name}.weight"]

    angles = torch.outer(torch.arange(64.0), 10000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH))
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        y = functional.linear(x, w[f"midlayer.self_attn.{name}_proj.weight"]).view(len(x), -1, WIDTH).transpose(0, 1)
        crossed = torch.cat((-y[..., WIDTH // 2 :], y[..., : WIDTH // 2]), -1)
        y = y if name == "v" else y * cos[: len(x)] + crossed * sin[: len(x)]
        return y if name == "q" else y.repeat_interleave(HEADS // KV, 0)

    for _ in range(count):
        x = torch.cat((norm(table[found[1:]], "midlayer.input_layernorm"), norm(hidden, "midlayer.hidden_norm")), -1)
        out = functional.scaled_dot_product_attention(*(heads(x, name)[None] for name in "qkv"), is_causal=True)[0]
        y = hidden + functional.linear(out.transpose(0, 1).reshape(len(x), -1), w["midlayer.self_attn.o_proj.weight"])
        n = norm(y, "midlayer.post_attention_layernorm")
        gate, up = (functional.linear(n, w[f"midlayer.mlp.{one}_proj.weight"]) for one in ("gate", "up"))
        y = y + functional.linear(functional.silu(gate) * up, w["midlayer.mlp.down_proj.weight"])
        best = int(functional.linear(norm(y, "norm")[-1], w["lm_head.weight"]).argmax())
        found.append(best + int(w["d2t"][best]))
        hidden = torch.cat((hidden, y[-1:]))
    return found[len(ids) :]


def make_mtp(variant: str, folder: Path) -> Path:
    """A Qwen3.5 with random weights and such a head, whose block is a model of its own in ``folder / "block"``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    source = make_checkpoint(variant, folder / "source")
    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    block = load_file(save_random(AutoModelForCausalLM, config, "mtp", folder / "block") / "model.safetensors")
    outside = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name.replace("model.", "mtp.", 1): one for name, one in block.items() if name not in outside}
    experts, roles = "mtp.layers.0.mlp.experts.", ("gate", "up", "down")
    if f"{experts}0.up_proj.weight" in tensors:  # in one tensor, as they may be published
        apart = [[tensors.pop(f"{experts}{i}.{role}_proj.weight") for i in range(6)] for role in roles]
        gate, up, tensors[f"{experts}down_proj"] = map(torch.stack, apart)
        tensors[f"{experts}gate_up_proj"] = torch.cat((gate, up), dim=1)
    generator = torch.Generator().manual_seed(4)
    tensors["mtp.fc.weight"] = torch.randn(H, 2 * H, generator=generator) * H**-0.5
    for half in ("embedding", "hidden"):
        tensors[f"mtp.pre_fc_norm_{half}.weight"] = torch.rand(H, generator=generator) - 0.5
    save_file(load_file(source / "model.safetensors") | tensors, source / "model.safetensors", {"format": "pt"})
    return source


def expected_mtp(folder: Path, ids: list[int], count: int) -> list[int]:
    """By transformers: of the model the states after its last norm, and the head's block as a model of one."""
    from transformers import AutoModelForCausalLM

    load = partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    model, block = load(folder / "source"), load(folder / "block")
    w, found = load_file(folder / "source" / "model.safetensors"), list(ids)

    def norm(x: torch.Tensor, half: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + w[f"mtp.pre_fc_norm_{half}.weight"])

    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids[:-1]])).last_hidden_state[0]
        for _ in range(count):
            e = model.get_input_embeddings()(torch.tensor(found[1:]))
            x = functional.linear(torch.cat((norm(e, "embedding"), norm(hidden, "hidden")), -1), w["mtp.fc.weight"])
            last = block.model(inputs_embeds=x[None]).last_hidden_state[0, -1:]
            found.append(int(model.lm_head(last).argmax()))
            hidden = torch.cat((hidden, last))
    return found[len(ids) :]


@pytest.fixture(scope="module")
def mtp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    found = {}
    for variant in ("qwen3.5", "qwen3.5-moe")[: 1 if BACKENDS == ["triton"] else 2]:
        folder = tmp_path_factory.mktemp("mtp")
        checkpoint = Checkpoint.open(make_mtp(variant, folder), complete=full_config)
        shapes = scale_shapes(checkpoint.config)
        masks = {name: ProjectionMask(torch.ones(shape), 0.0, 0.0) for name, shape in shapes.items()}
        recipe = tiny_recipe(checkpoint.config, {0.0: masks}, default=0.0)
        found[variant] = Bundle.open(write_bundle(checkpoint, recipe, {0.0: masks}, folder / "bundle"))
    return found


def with_head(bundle: Bundle, head: Path | None, backend: str, **settings: Any) -> Decoder:
    if backend == "triton":
        from wisparse.runtime.cuda.decoder import CudaDecoder

        settings |= {"device": torch.device("cpu"), "dtype": torch.float32}
        decoder: Decoder = CudaDecoder(bundle, max_seq_len=64, **settings)
    else:
        decoder = cpu_decoder(bundle, backend, max_seq_len=64, **settings)
    decoder.attach(MtpFiles.open(bundle) if head is None else HeadFiles.open(head, bundle))
    return decoder


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["eagle3", "eagle3 embedding", "mtp"])
def test_drafts_are_the_heads(
    bundles: dict[str, Bundle], mtp: dict[str, Bundle], tmp_path: Path, backend: str, kind: str
) -> None:
    """After prompts in pieces, plain steps, verified ones and a prefix of another slot; EAGLE-3's in both coordinates."""
    head, ids = None if kind == "mtp" else make_head(tmp_path / "head", "embedding" in kind), tokens_of(30, 5)
    for bundle in (bundles if head else mtp).values():
        folder = bundle.folder.parent

        def draft(tokens: list[int], folder: Path = folder) -> list[int]:
            return expected_draft(folder / "source", head, tokens, 4) if head else expected_mtp(folder, tokens, 4)

        expected, other = {n: draft(ids[: n + 1]) for n in (12, 14, 17)}, draft([*ids[:16], 7])
        decoder = with_head(bundle, head, backend, max_batch=2, max_drafted=4)
        decoder.prefill(0, torch.tensor(ids[:12]), 12, stop=8)
        decoder.prefill(0, torch.tensor(ids[:12]), 12, start=8)
        idle = [SamplingParams()] * 2
        assert decoder.draft([ids[12]], {0: 4}, idle) == {0: expected[12]}
        decoder.verify([ids[12:14] + expected[12][:2]], idle[:1])
        decoder.truncate(0, 14)
        assert decoder.draft([ids[14]], {0: 4}, idle) == {0: expected[14]}
        for token in ids[14:17]:
            decoder.decode(torch.tensor([token]))
        assert decoder.draft([ids[17]], {0: 3}, idle) == {0: expected[17][:3]}
        shared = 10 if head else 17  # of recurrent blocks the newest state alone can be copied
        decoder.copy(0, 1, shared)
        if head is None:
            decoder.prefill(1, torch.tensor(ids[:16]), 16)
        else:
            decoder.prefill(1, torch.tensor(ids[:16]), 16, start=shared)
        assert decoder.draft([ids[17], 7], {0: 4, 1: 4}, idle) == {0: expected[17], 1: other}


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_answers_are_those_without(
    bundles: dict[str, Bundle], mtp: dict[str, Bundle], tmp_path: Path, backend: str, method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(speculation, "_MIN_SPEEDUP", 0.0)  # it drafts although that takes longer
    monkeypatch.setattr(speculation, "_CREDIT", 1e9)
    monkeypatch.setattr(speculation, "_MAX_CREDIT", 1e9)
    head, bundle = make_head(tmp_path / "head"), bundles["rotated"]
    if method == "mtp":
        head, bundle = None, mtp["qwen3.5"]
    decoder = with_head(bundle, head, backend, max_batch=2, max_drafted=4)
    answers = []
    for config in (None, SpeculativeConfig(method, 4)):
        scheduler = Scheduler(decoder, speculative=config)
        sampled = SamplingParams(1.0, 20, seed=2)
        requests = [Request(tokens_of(9 + i, i), 20, sampling=sampled if i % 2 else SamplingParams()) for i in range(4)]
        for request in requests[:-1]:
            scheduler.add(request)
        run(scheduler, requests[-1])
        answers.append([request.output_token_ids for request in requests])
    assert answers[0] == answers[1]
    assert scheduler.stats.drafts.drafts > 10


def test_heads_that_do_not_fit_are_refused(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"hidden_size": 32}, "hidden_size: expected the model's, 64"),
        ({"vocab_size": 100}, "vocab_size: expected the model's, 101"),
        ({"draft_vocab_size": 50}, "lm_head.weight: expected"),
        ({"norm_before_fc": True}, "norm_before_fc: expected false"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "three of 3 blocks"),
        ({"rope_scaling": [1]}, r"rope_scaling: expected an object, found \[1\]"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object"),
        ({"rope_parameters": 7}, "rope_parameters: expected an object"),
        ({"eagle_config": "x"}, "eagle_config: expected an object, found 'x'"),
        ({"transformer_layer_config": 7}, "transformer_layer_config: expected an object"),
        ({"draft_vocab_size": [60]}, r"draft_vocab_size: expected a positive integer, found \[60\]"),
        ({"rope_theta": None}, "rope_theta: expected"),
        ({"add": {"midlayer.self_attn.q_norm.weight": torch.ones(WIDTH)}}, "unexpected tensor"),
    ]
    for i, (changes, message) in enumerate(cases):
        with pytest.raises(UnsupportedModelError, match=message):
            HeadFiles.open(make_head(tmp_path / str(i), **changes), bundles["plain"])
    with pytest.raises(UsageError, match='folder or Hub id of the head, "model", found none'):
        SpeculativeConfig.parse({"method": "eagle3"})


def test_a_rotation_that_is_not_finite_is_refused(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(bundles["rotated"].folder, tmp_path / "broken"))
    with safe_open(folder / SIDECAR, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(folder / SIDECAR)
    tensors["rotation"][0, 1] = torch.nan
    save_file(tensors, folder / SIDECAR, metadata)
    resign(folder)
    with pytest.raises(BundleError, match="rotation: expected finite numbers, found NaN or Inf"):
        Bundle.open(folder)


def test_a_heads_memory_is_counted(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    folder = str(make_head(tmp_path / "head"))
    files = HeadFiles.open(folder, bundles["plain"])
    decoder = cpu_decoder(bundles["plain"], "torch", max_seq_len=256, max_batch=2)
    decoder.attach(files)
    with pytest.raises(ResourceError, match=r"hold 0 positions of one sequence, beside [\d,]+ bytes of the draft head"):
        wisparse.load(bundles["plain"], speculative={"method": "eagle3", "model": folder}, kv_cache_memory_bytes=1000)
    head, (weights, position) = decoder.head, files.memory(torch.float32)
    assert head is not None
    kept = [head._hidden, *(part for part in head._cache.attention[0] if part is not None)]
    assert position == sum(part.nbytes for part in kept) // (3 * 256)
    assert 0.9 < head.nbytes / weights <= 1
