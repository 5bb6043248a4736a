"""Prompts kept on disk: the same tokens as without them, whatever a file holds."""

import errno
import json
import os
import random
import stat
import struct
import zlib
from pathlib import Path
from unittest import mock

import pytest
import torch
from bundle_maker import VariantBundles, cpu_decoder, run, scarce, small_chunks, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from wisparse.formats.bundle import Bundle
from wisparse.formats.errors import WisparseError
from wisparse.runtime.generation import prompt_files
from wisparse.runtime.generation.prompt_files import PromptFile, PromptFolder, fingerprint, save
from wisparse.runtime.generation.request import Request
from wisparse.runtime.generation.scheduler import Scheduler
from wisparse.runtime.generation.speculation import SpeculativeConfig

TEXT = tokens_of(40)
MANY = 1 << 30


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    return VariantBundles(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_files, "_FEWEST_TOKENS", 8)


@pytest.mark.parametrize(
    ("variant", "backend", "how"),
    [
        *((variant, backend, {}) for variant in ("llama", "qwen3.5", "lfm2") for backend in ("torch", "numba")),
        ("gemma3", "numba", {"kv_cache_dtype": "int8"}), ("deepseek-v2", "numba", {"kv_cache_dtype": "int8"}), ("qwen3.5", "torch", {"kv_cache_dtype": "fp8"}),
        ("qwen3.5", "numba", {"dtype": torch.bfloat16}), ("lfm2", "numba", {"max_drafted": 3}),
    ],
)  # fmt: skip
def test_prompts_serve_after_a_restart(
    bundles: dict[str, Bundle], variant: str, backend: str, how: dict[str, object], tmp_path: Path
) -> None:
    bundle = bundles[variant]
    drafts = SpeculativeConfig() if "max_drafted" in how else None

    def started(folder: Path = tmp_path) -> tuple[Scheduler, PromptFolder]:
        scheduler = Scheduler(small_chunks(bundle, backend, 2, **how), bundle, drafts)
        return scheduler, PromptFolder(folder, scheduler, bundle, MANY)

    scheduler, folder = started()
    run(scheduler, Request([*TEXT, 7, 8], 9)), run(scheduler, Request(tokens_of(20, 3), 9, prefill="all", sparsity=0.3))
    folder.save()
    files = sorted(tmp_path.iterdir())
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 2
    fresh = Scheduler(small_chunks(bundle, backend, 2, **how), bundle)
    for scheduler in (started()[0], Scheduler(small_chunks(bundle, backend, 2, **how), bundle, drafts)):
        on_disk = 40 if scheduler.saved else 0
        for request, cached in (
            (Request([*TEXT, 9], 9), on_disk), (Request([*TEXT, 7, 8, 9], 9, sparsity=0.3), 40),
            # Computed at another level, or sparse from another position on: read again.
            (Request([*tokens_of(20, 3), 5], 9, prefill="all", sparsity=0.6), 0),
            (Request([*tokens_of(20, 3), 5], 9, prefill="all", sparsity=0.3), 16 if on_disk else 0),
        ):  # fmt: skip
            fresh.start_over()
            expected = Request(request.prompt_token_ids, 9, prefill=request.prefill, sparsity=request.sparsity)
            run(fresh, expected)
            assert run(scheduler, request).output_token_ids == expected.output_token_ids
            assert request.cached_tokens == cached
    # The next turn's file replaces the one it goes on from; files of other models stay, up to the size.
    scheduler, folder = started()
    run(scheduler, Request([*TEXT, 7, 8, 9, *tokens_of(9, 5)], 1))
    with mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "no space left")):
        folder.save()
    assert sorted(tmp_path.iterdir()) == files, "nothing is lost where nothing can be written"
    folder.save()
    assert len(list(tmp_path.iterdir())) == 2
    other = tmp_path / f"wisparse-{'0' * 16}-{'1' * 16}.safetensors"
    other.write_bytes(b"x")
    os.utime(other, (1, 1))
    (tmp_path / "mine.safetensors").write_text("not ours")
    folder.save()
    assert other.exists()
    PromptFolder(tmp_path, scheduler, bundle, 1).save()
    assert [file.name for file in tmp_path.iterdir()] == ["mine.safetensors"]


@pytest.mark.parametrize("variant", ["llama", "qwen3.5"])
def test_prompts_are_loaded_while_memory_is_short(
    bundles: dict[str, Bundle], variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundles[variant]
    first, folder = Scheduler(small_chunks(bundle, max_batch=3), bundle), tmp_path / "missing" / "below"
    prompts = PromptFolder(folder, first, bundle, MANY)
    prompts.save()
    assert not folder.parent.exists(), "there is nothing to save"
    for seed in range(3):
        run(first, Request(tokens_of(20, seed), 1))
    prompts.save()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    scheduler = Scheduler(scarce(bundle, "torch", monkeypatch), bundle)
    PromptFolder(folder, scheduler, bundle, MANY)
    requests = [scheduler.add(Request([*tokens_of(20, seed), 5], 40)) for seed in range(3)]
    run(scheduler)
    assert scheduler.stats.preemptions
    assert [request.cached_tokens for request in requests] == [16] * 3
    for request in requests:
        alone = run(Scheduler(small_chunks(bundle), bundle), Request(request.prompt_token_ids, 40))
        assert request.output_token_ids == alone.output_token_ids


@pytest.fixture(scope="module")
def saved(bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scheduler, str]:
    bundle, folder = bundles["qwen3.5"], tmp_path_factory.mktemp("saved")
    scheduler = Scheduler(small_chunks(bundle), bundle)
    run(scheduler, Request([*TEXT, 7, 8], 9))
    path, digest = folder / "whole.safetensors", fingerprint(bundle, scheduler.decoder)
    save(path, scheduler, 0, digest, {"messages": []})
    return path, scheduler, digest


def serves(path: Path, saved: tuple[Path, Scheduler, str]) -> object:
    """True if a file is used; empty if it is refused by one line that names it, else the error."""
    _, scheduler, digest = saved
    scheduler.start_over()
    try:
        found = PromptFile.open(path)
        found.check(scheduler.decoder, digest)
        for length in found.prefix.states:
            found.load(scheduler.decoder.cache, 0, length)
    except WisparseError as error:
        return [] if path.name in str(error) and "\n" not in str(error) else [error]
    return True


@given(st.randoms(use_true_random=False), st.sampled_from(["cut", "flip", "zero", "longer"]))
@settings(max_examples=60)
def test_damaged_files_are_refused(saved: tuple[Path, Scheduler, str], how: random.Random, kind: str) -> None:
    data = bytearray(saved[0].read_bytes())
    at = how.randrange(len(data))
    if kind == "cut":
        del data[at:]
    elif kind == "longer":
        data += bytes(1 + at)
    elif kind == "flip":
        data[at] ^= 1 << how.randrange(8)
    else:
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    path = saved[0].with_name("damaged.safetensors")
    path.write_bytes(data)
    assert not serves(path, saved) or data == saved[0].read_bytes()


def test_files_of_strangers_are_checked(
    saved: tuple[Path, Scheduler, str], bundles: dict[str, Bundle], caplog: pytest.LogCaptureFixture
) -> None:
    whole, scheduler, digest = saved
    assert serves(whole, saved)
    data = whole.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path = whole.with_name("changed.safetensors")

    def changed(change: object) -> bool:
        header = json.loads(data[8 : 8 + length])
        prompt = json.loads(header["__metadata__"]["prompt"])
        change(header, prompt)  # type: ignore[operator]
        text = json.dumps(prompt)
        header["__metadata__"] |= {"prompt": text, "crc32": str(zlib.crc32(text.encode()))}
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        return serves(path, saved)

    def retyped(header: dict, name: str, dtype: str, shape: list[int]) -> None:
        header[name] |= {"dtype": dtype, "shape": shape}

    first = "cache.1.keys"
    shape = json.loads(data[8 : 8 + length])[first]["shape"]
    assert changed(lambda header, prompt: None)
    for change in (
        lambda header, prompt: header["__metadata__"].update(format="wisparse-prompt-9"),
        lambda header, prompt: header["__metadata__"].update(fingerprint="0" * 64),
        lambda header, prompt: retyped(header, first, "I32", shape),
        lambda header, prompt: retyped(header, first, "F32", shape[::-1]),
        lambda header, prompt: retyped(header, "tokens", "F32", [84]),
        lambda header, prompt: header.update({"cache.9.keys": header.pop(first)}),
        lambda header, prompt: header.update({"state.x.0.inputs": header.pop("state.8.0.inputs")}),
        lambda header, prompt: header.update({"state.64.0.inputs": header.pop("state.8.0.inputs")}),
        lambda header, prompt: prompt.pop("sparse_from"),
        lambda header, prompt: prompt.pop("conversation"),
        lambda header, prompt: prompt.update(sparse_from=-1),
        lambda header, prompt: prompt.update(sparsity=[]),
        lambda header, prompt: prompt.update(crc32=[]),
        lambda header, prompt: prompt["crc32"].clear(),
        lambda header, prompt: prompt.update(conversation="x"),
    ):
        assert not changed(change)
    for content in (b"", b"x" * 100, b"\x80\x04N.", struct.pack("<Q", 1 << 60)):
        path.write_bytes(content)
        assert not serves(path, saved)
    os.unlink(path)
    os.symlink("/dev/zero", path)
    assert not serves(path, saved)
    # Another model, another type of keys; a folder says so in a line for each file, and goes on.
    for bundle, how in ((bundles["lfm2"], {}), (bundles["qwen3.5"], {"kv_cache_dtype": "int8"})):
        assert fingerprint(bundle, cpu_decoder(bundle, "torch", max_seq_len=64, **how)) != digest
    name = whole.with_name(f"wisparse-{digest[:16]}-x.safetensors")
    name.write_bytes(data[:-1])
    PromptFolder(whole.parent, scheduler, bundles["qwen3.5"], MANY)
    assert (len(caplog.messages), scheduler.saved) == (1, [])
    # Damage in the keys is found when they are loaded.
    name.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    PromptFolder(whole.parent, scheduler, bundles["qwen3.5"], MANY)
    scheduler.start_over()
    assert len(scheduler.saved) == 1
    again = Request([*TEXT, 7, 8], 9)
    run(scheduler, again)
    fresh = run(Scheduler(small_chunks(bundles["qwen3.5"]), bundles["qwen3.5"]), Request([*TEXT, 7, 8], 9))
    assert (again.cached_tokens, again.output_token_ids) == (0, fresh.output_token_ids)
    assert (len(caplog.messages), scheduler.saved) == (2, [])
