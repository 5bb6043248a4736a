"""The runtime computes what transformers computes: dense logits, and sparse ones under the same masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from bundle_maker import make_bundle
from runtime_models import VARIANTS, make_checkpoint
from torch import Tensor

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import ContextLengthError, UsageError
from wisparse.kernels.reference import keep_mask
from wisparse.runtime.decoder import make_decoder
from wisparse.runtime.generation import PREFILL_POLICIES, sparse_from
from wisparse.runtime.torch_decoder import TorchDecoder


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Bundle of a variant, made once per run; its source is the folder ``source`` beside it."""
    made: dict[str, Path] = {}

    def make(variant: str) -> Path:
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            source = make_checkpoint(variant, folder / "source")
            made[variant] = make_bundle(source, folder / "bundle")
        return made[variant]

    return make


def torch_decoder(folder: Path, max_seq_len: int | None = None, max_batch: int = 1) -> TorchDecoder:
    bundle = Bundle.open(folder)
    return make_decoder(
        bundle,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_seq_len=max_seq_len or bundle.config.max_position_embeddings,
        max_batch=max_batch,
        backend="torch",
    )


def hugging_face(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_tokens(count: int, vocab_size: int = 101, seed: int = 0) -> Tensor:
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


@contextmanager
def masked(model: torch.nn.Module, bundle: Bundle, first_sparse: Callable[[], int]) -> Iterator[None]:
    """The bundle's masks on a transformers model: positions from ``first_sparse()`` on, for inputs (1, T, K)."""

    def hook(name: str) -> Callable[..., tuple[Tensor]]:
        mask = bundle.masks[name]

        def before(module: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            (x,) = args
            start = first_sparse()
            tail = x[:, start:]
            keep = keep_mask(tail, mask.channel_scale, mask.threshold)
            return (torch.cat((x[:, :start], torch.where(keep, tail, 0.0)), dim=1),)

        return before

    handles = [
        model.get_submodule(name).register_forward_pre_hook(hook(name))
        for name, mask in bundle.masks.items()
        if mask.sparsity > 0
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def greedy_by_transformers(folder: Path, tokens: Tensor, policy: str, count: int) -> list[int]:
    """Greedy continuation: the whole sequence anew for every token, so no cache of theirs is trusted."""
    model, bundle = hugging_face(folder), Bundle.open(folder)
    start = sparse_from(policy, len(tokens))
    ids = tokens.tolist()
    with masked(model, bundle, lambda: start):
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(tokens) :]


@torch.inference_mode()
def greedy_by_decoder(decoder: TorchDecoder, tokens: Tensor, policy: str, count: int, slot: int = 0) -> list[int]:
    ids = [int(decoder.prefill(slot, tokens, sparse_from(policy, len(tokens))).argmax())]
    while len(ids) < count:
        row = torch.full((slot + 1,), -1)
        row[slot] = ids[-1]
        ids.append(int(decoder.decode(row)[slot].argmax()))
    return ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_logits_equal_transformers(variant: str, tiny_bundle: Callable[[str], Path]) -> None:
    folder = tiny_bundle(variant)
    tokens = random_tokens(48)
    decoder = torch_decoder(folder)
    model = hugging_face(folder)
    for length in (1, 20, 48):  # short and long side of LongRoPE's switch at 32, beyond every window
        with torch.inference_mode():
            expected = model(tokens[None, :length], use_cache=False).logits[0]
        found = decoder.logits(tokens[:length], length)
        assert expected.abs().max() > 1, "logits this small would hide any difference"
        assert (found - expected).abs().max() < 1e-4
        assert (decoder.prefill(0, tokens[:length], length) - expected[-1]).abs().max() < 1e-4


@pytest.mark.parametrize("policy", PREFILL_POLICIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_sparse_greedy_tokens_equal_transformers(variant: str, policy: str, tiny_bundle: Callable[[str], Path]) -> None:
    folder = tiny_bundle(variant)
    tokens = random_tokens(9, seed=1)
    expected = greedy_by_transformers(folder, tokens, policy, 16)
    assert greedy_by_decoder(torch_decoder(folder), tokens, policy, 16) == expected
