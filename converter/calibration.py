"""The calibration text, on which statistics and thresholds rest: read from documents, or written by the model."""

from __future__ import annotations

import hashlib
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wisparse.formats.chat_template import ChatTemplate
from wisparse.formats.errors import BundleError, CalibrationError, UsageError, printable
from wisparse.formats.machine import available_bytes
from wisparse.formats.model_config import ModelConfig

from .documents import Document, dataset_documents, is_dataset_id, path_documents
from .flow import input_device
from .processes import SILENT, Progress, Stage
from .source import cache_argument

_log = logging.getLogger("wisparse")

# The paper's mixture (its section 5.1); the names are those of the data sets' present homes on the Hub.
PAPER_DATASETS = (
    "mit-han-lab/pile-val-backup:validation",
    "sahil2801/CodeAlpaca-20k:train",
    "meta-math/MetaMathQA:train",
)

# A passage has about this many characters per token of a sequence: one long file must not fill every sequence.
_CHARACTERS_PER_TOKEN = 6
# Of the first tokens that a model writes: the temperature falls from the first number to 1 over the second.
_HOT, _HOT_TOKENS = 2.0, 10
# A question that never ends would leave no room for an answer.
_LONGEST_QUESTION = 128
_PLACEHOLDER = "placeholder"


@dataclass(frozen=True)
class CalibrationTokens:
    """Token sequences (S, L) int64 and which of their tokens count (S, L) bool: not padding, nor the first of each."""

    input_ids: Tensor
    keep: Tensor
    source: str  # what they were made from, without any path of this machine
    seed: int  # of their order or sampling

    @property
    def num_samples(self) -> int:
        return self.input_ids.shape[0]

    @property
    def seq_len(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_tokens(self) -> int:
        """How many tokens count."""
        return int(self.keep.sum())

    @cached_property
    def digest(self) -> str:
        """sha256 of the shape and the token ids, as ``sha256:<hex>``."""
        ids = self.input_ids.to("cpu", torch.int64).contiguous()
        hashed = hashlib.sha256(f"{tuple(ids.shape)}".encode() + ids.numpy().astype("<i8").tobytes())
        return f"sha256:{hashed.hexdigest()}"

    def joined(self, other: CalibrationTokens) -> CalibrationTokens:
        """These sequences and others of the same length."""
        ids, keep = torch.cat((self.input_ids, other.input_ids)), torch.cat((self.keep, other.keep))
        return replace(self, input_ids=ids, keep=keep)

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]], source: str, seed: int) -> CalibrationTokens:
        """From full rows of one length; the first token of each is excluded."""
        input_ids = torch.tensor(rows, dtype=torch.int64)
        keep = torch.ones_like(input_ids, dtype=torch.bool)
        keep[:, 0] = False
        return cls(input_ids, keep, source, seed)


def load_calibration(
    spec: str | Sequence[str],
    tokenizer: Any,
    model: Any = None,
    num_samples: int = 16,
    seq_len: int = 512,
    seed: int = 0,
    progress: Progress = SILENT,
) -> CalibrationTokens:
    """Calibration tokens (num_samples, seq_len) from ``self``, ``paper``, a Hub data set, or one or more paths.
    ``tokenizer`` and ``model`` are transformers'; the model is needed for ``self`` only."""
    specs = [spec] if isinstance(spec, str) else list(spec)
    if specs == ["self"]:
        return write_calibration(model, tokenizer, [(num_samples, seq_len, seed)], progress)[0]
    source = describe_spec(specs)
    with progress.stage("Calibration", num_samples) as stage:
        if specs == ["paper"]:
            # Equal parts: the remainder goes to the first ones.
            rows: list[list[int]] = []
            for index, name in enumerate(PAPER_DATASETS):
                share = num_samples // len(PAPER_DATASETS) + (index < num_samples % len(PAPER_DATASETS))
                if share:
                    rows += pack(dataset_documents(name, seed), tokenizer, share, seq_len, seed, name)
            random.Random(seed).shuffle(rows)
        else:
            paths = [spec for spec in specs if not is_dataset_id(spec)]
            for word in ("self", "paper"):
                if word in paths and not Path(word).exists():
                    raise CalibrationError(f"calibration {word!r} stands alone; it cannot be mixed with other sources")
            documents = [path_documents(paths, seed)] if paths else []
            documents += [dataset_documents(spec, seed) for spec in specs if is_dataset_id(spec)]
            rows = pack(chain.from_iterable(documents), tokenizer, num_samples, seq_len, seed, source)
        stage.advance(num_samples)
    return CalibrationTokens.from_rows(rows, source, seed)


def describe_spec(spec: Sequence[str]) -> str:
    """A spec as it is recorded in the recipe: names, never paths of this machine."""
    names = (one if one in ("self", "paper") or is_dataset_id(one) else Path(one).resolve().name for one in spec)
    return ", ".join(names)


def pack(
    documents: Iterable[Document], tokenizer: Any, num_samples: int, seq_len: int, seed: int, source: str
) -> list[list[int]]:
    """Cut documents into passages, put these into a seeded order, and fill ``num_samples`` rows of ``seq_len`` tokens.
    What is left of a passage when its row is full is used only if the passages run out. So a large source is sampled
    from all over, and a source that is just long enough suffices."""
    # What the tokenizer puts in front of a text: usually the beginning-of-text token, or nothing.
    plain, full = tokenizer.encode("a", add_special_tokens=False), tokenizer.encode("a")
    starts = (i for i in range(len(full) - len(plain) + 1) if full[i : i + len(plain)] == plain)
    prefix = full[: next(starts, 0)]
    separator = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    body = seq_len - len(prefix)
    if body < 1:
        raise CalibrationError(f"--seq-len {seq_len}: expected more than the {len(prefix)} tokens a text begins with")
    passages = list(_passages(documents, tokenizer, num_samples, seq_len))
    random.Random(seed).shuffle(passages)
    rows: list[list[int]] = []
    row: list[int] = []
    leftovers: list[list[int]] = []
    found = 0
    encoded = (tokenizer.encode(passage, add_special_tokens=False) for passage in passages)
    for again, pieces in ((False, encoded), (True, leftovers)):
        for tokens in pieces:
            if not again:
                if prefix and tokens[: len(prefix)] == prefix:  # a chat template wrote it already
                    tokens = tokens[len(prefix) :]
                found += len(tokens)
            while tokens:
                joined = (separator if row else []) + tokens
                tokens = joined[body - len(row) :]
                row += joined[: body - len(row)]
                if len(row) == body:
                    rows.append(prefix + row)
                    row = []
                    if len(rows) == num_samples:
                        return rows
                if tokens and not again:
                    leftovers.append(tokens)
                    break
    lack = f"{num_samples} samples of {seq_len} tokens need {num_samples * body} tokens, found {found}"
    advice = "give more text, or lower --num-samples or --seq-len"
    raise CalibrationError(f"calibration text {source} is too short: {lack}; {advice}")


def _passages(documents: Iterable[Document], tokenizer: Any, num_samples: int, seq_len: int) -> Iterator[str]:
    """Passages cut at the last line's end in their second half, if there is one."""
    length = max(256, seq_len * _CHARACTERS_PER_TOKEN)
    # Enough to choose from; a corpus of gigabytes is not read to its end for a few thousand tokens.
    enough = max(1 << 24, 16 * num_samples * length)
    read = 0
    render = conversation_renderer(tokenizer)
    for document in documents:
        if isinstance(document, str):
            text = document
        elif render is None:
            text = "\n\n".join(str(message["content"]) for message in document)
        else:
            try:
                text = render(document)
            except TemplateError as error:
                # A template is a program of the model's author and may refuse roles or orders in any way it likes.
                refuses = "the model's chat template refuses a conversation of the calibration data"
                raise CalibrationError(f"{refuses}: {error!s:.200}") from error
        read += len(text)
        start = 0
        while start < len(text):
            end = min(start + length, len(text))
            if end < len(text):
                end = text.rfind("\n", start + length // 2, end) + 1 or end
            if text[start:end].strip():
                yield text[start:end]
            start = end
        if read >= enough:
            return


class TemplateError(Exception):
    """A chat template refuses the messages, or fails; says which."""


def conversation_renderer(tokenizer: Any) -> Callable[..., str] | None:
    """Messages to text by a tokenizer's chat template, or TemplateError; None without a template."""
    found = tokenizer.chat_template
    # Several are kept by name; the one that is meant without a name is called so.
    source = found.get("default") if isinstance(found, dict) else found
    if not source:
        return None
    variables = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    template = cache(partial(ChatTemplate, source, variables))

    def render(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> str:
        try:
            return template().render(messages, add_generation_prompt=add_generation_prompt)
        except (BundleError, UsageError) as error:
            raise TemplateError(printable(str(error.__cause__ or error))) from error

    return render


@torch.no_grad()  # not inference_mode: a search may ask for gradients over these very tokens
def write_calibration(
    model: Any, tokenizer: Any, texts: Sequence[tuple[int, int, int]], progress: Progress
) -> list[CalibrationTokens]:
    """Let ``model`` write texts of (num_samples, seq_len, seed), all of them side by side."""
    device, config = input_device(model), model.config
    generation = getattr(model, "generation_config", None)
    # Qwen has no beginning-of-text token; its documents begin after an end-of-text token.
    begins = [tokenizer.bos_token_id, config.bos_token_id, getattr(generation, "bos_token_id", None)]
    begins.append(tokenizer.eos_token_id)
    first = next((one for one in begins if isinstance(one, int) and 0 <= one < config.vocab_size), None)
    if first is None:
        lack = "the model has neither a beginning-of-text nor an end-of-text token to begin with"
        raise CalibrationError(f"calibration 'self': {lack}; give text instead: --calibration PATH")
    ends: set[int] = set()
    for value in (tokenizer.eos_token_id, config.eos_token_id, getattr(generation, "eos_token_id", None)):
        ends.update(value if isinstance(value, list) else [value] if value is not None else [])
    turns = _turns(tokenizer, first, ends)
    rows: list[_Row] = []
    for num_samples, seq_len, seed in texts:
        generator = torch.Generator(device=device).manual_seed(seed)
        for index in range(num_samples):
            question, answer = turns if turns and index < num_samples // 2 else ([first], None)
            rows.append(_Row(seq_len, ends, question, answer, generator))
    longest = max(row.seq_len for row in rows)
    # Keys and values at most about 4 GB, 8 where memory is plenty. Heads may differ from block to block.
    most = (8 if available_bytes(device) > 24 << 30 else 4) << 30
    numbers = 2 * ModelConfig.from_dict(config.to_dict()).kv_size
    batch = max(1, min(len(rows), most // (numbers * longest * next(model.parameters()).element_size())))
    # One thread for a small model on a CPU: its steps are so short that threads would mostly wait for each other.
    threads = torch.get_num_threads()
    if model.device.type == "cpu" and sum(parameter.numel() for parameter in model.parameters()) < 100e6:
        torch.set_num_threads(1)
    try:
        with progress.stage("Writing calibration text", -(-len(rows) // batch) * longest) as stage:
            for start in range(0, len(rows), batch):
                _write(model, rows[start : start + batch], stage)
    finally:
        torch.set_num_threads(threads)
    written = iter(row.tokens for row in rows)
    return [CalibrationTokens.from_rows(list(islice(written, count)), "self", seed) for count, _, seed in texts]


@dataclass
class _Row:
    """A row of the batch, and what it writes next: a forced token (an opening), or whatever the model draws."""

    seq_len: int
    ends: Set[int]
    question: list[int]
    answer: list[int] | None
    generator: torch.Generator | None = None
    tokens: list[int] = field(default_factory=list)
    free: int = 0  # tokens drawn since the last opening

    def __post_init__(self) -> None:
        self.forced, self.asking = deque(self.question), self.answer is not None

    def accept(self, drawn: int) -> int:
        """The next token: the forced one, or ``drawn``."""
        if self.forced:
            return self.forced.popleft()
        turn_over, longest = drawn in self.ends, min(_LONGEST_QUESTION, max(1, self.seq_len // 4))
        if self.asking and self.answer is not None:
            # Some templates close a turn with a marker that is no end-of-text token: the first token of what follows.
            if turn_over or drawn == self.answer[0] or self.free >= longest:
                self.forced.extend(self.answer)
                self.asking, self.free = False, 0
                return self.forced.popleft()
        elif turn_over:
            self.forced.extend(self.question)
            self.asking, self.free = self.answer is not None, 0
            if drawn == self.question[0]:
                self.forced.popleft()
            return drawn
        self.free += 1
        return drawn


def _write(model: Any, rows: list[_Row], stage: Stage) -> None:
    device, seq_len = input_device(model), max(row.seq_len for row in rows)
    cache: dict[str, Any] = {cache_argument(model): _preallocated_cache(model.config, seq_len)}
    groups = [(one, len(list(some))) for one, some in groupby(row.generator for row in rows)]
    noise = torch.empty(0)
    drawn = [0] * len(rows)  # never used: every row begins with a forced token
    for position in range(seq_len):
        tokens = [row.accept(token) for row, token in zip(rows, drawn, strict=True)]
        for row, token in zip(rows, tokens, strict=True):
            if position < row.seq_len:
                row.tokens.append(token)
        stage.advance()
        if position + 1 < seq_len:
            step = torch.tensor(tokens, device=device).unsqueeze(1)
            logits = model(input_ids=step, **cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            heat = [max(1.0, _HOT - (_HOT - 1.0) * row.free / _HOT_TOKENS) for row in rows]
            logits = logits.float()
            if max(heat) > 1.0:
                logits = logits / torch.tensor(heat, device=device).unsqueeze(1)
            # argmax(p / -log u) is a sample from p, without a running sum, which is not reproducible on a GPU.
            if not len(noise):
                noise = torch.empty_like(logits)
            for part, (generator, _) in zip(noise.split([count for _, count in groups]), groups, strict=True):
                part.uniform_(generator=generator)
            drawn = logits.softmax(dim=-1).div_(noise.log_().neg_()).argmax(dim=-1).tolist()


def _preallocated_cache(config: Any, seq_len: int) -> Any:
    """transformers' cache with room for ``seq_len`` tokens from the start; its own copies all of it at every token."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    class Preallocated(DynamicLayer):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            begin = self.get_seq_length()
            end = begin + key_states.shape[-2]
            if not self.is_initialized:
                self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
                self.room = [new.new_empty(*new.shape[:2], seq_len, new.shape[3]) for new in (key_states, value_states)]
            for room, new in zip(self.room, (key_states, value_states), strict=True):
                room[:, :, begin:end] = new
            self.keys, self.values = (room[:, :, :end] for room in self.room)
            return self.keys, self.values

    cache = DynamicCache(config=config)
    # Layers with a sliding window keep their own kind: they need no more room than the window.
    cache.layers = [Preallocated() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _turns(tokenizer: Any, first: int, ends: Set[int]) -> tuple[list[int], list[int]] | None:
    """The template's tokens that open a user turn, and those between the question and its answer; None without one, and
    where it does not close an assistant's turn with an end-of-text token: a base model that ships a template was never
    trained on its tokens, and what it writes after them is noise."""
    render = conversation_renderer(tokenizer)
    if render is None:
        return None
    asked = {"role": "user", "content": _PLACEHOLDER}
    answered = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]
    try:
        before, found, after = render([asked], add_generation_prompt=True).partition(_PLACEHOLDER)
        closing = render(answered).rpartition(_PLACEHOLDER)[2]
    except TemplateError as error:
        # It wants something else than a user turn (a system prompt, tools), or does not work: documents alone will do.
        _log.warning("the model writes documents and no conversations: its chat template says %.200s", error)
        return None
    question, answer, end = (tokenizer.encode(text, add_special_tokens=False) for text in (before, after, closing))
    if not found or not question or not answer or ends.isdisjoint(end):
        return None
    return (question if question[0] == first else [first, *question]), answer
