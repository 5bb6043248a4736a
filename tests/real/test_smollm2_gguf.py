"""SmolLM2-135M-Instruct from its GGUF file: the weights, settings and token ids of transformers' reader, whose pre-tokenizer
and epsilon `smollm2.write_checkpoint` mends."""

import pytest
import smollm2
import torch
from gguf_files import texts

from wisparse.converter.gguf_source import gguf_weights, open_checkpoint, open_source
from wisparse.converter.source import load_source
from wisparse.formats.checkpoint import Checkpoint

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def test_the_file_is_the_checkpoint() -> None:
    pytest.importorskip("gguf")
    try:
        file, theirs = smollm2.fetch(), smollm2.checkpoint()
    except smollm2.NotAvailable as reason:
        pytest.skip(str(reason))
    source = open_source(str(file), None, None)
    mine, rounded = open_checkpoint(source), Checkpoint.open(theirs)
    assert mine.config == rounded.config
    assert [*mine.tensors] == [*rounded.tensors]
    for name in mine.tensors:
        assert torch.equal(mine.tensor(name).bfloat16(), rounded.tensor(name)), name
    loaded = load_source(source.folder, torch.float32, "cpu", weights=gguf_weights(source))
    other = load_source(theirs, torch.float32, "cpu")
    assert loaded.tokenizer.chat_template == other.tokenizer.chat_template
    for text in [*texts(), "<|im_start|>user\nHi 12<|im_end|>"]:
        assert loaded.tokenizer(text)["input_ids"] == other.tokenizer(text)["input_ids"], text
