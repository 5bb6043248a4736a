"""The tokenizer, its chat template, stop strings, and end-of-text ids."""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from wisparse.formats import guard
from wisparse.formats.bundle import NAMED_TEMPLATE, Bundle
from wisparse.formats.chat_template import ChatTemplate, after_answer, special_tokens
from wisparse.formats.errors import BundleError, ContextLengthError, UsageError

from .detokenizer import CANNOT_RUN, Detokenizer, LibraryDetokenizer, TokenBytes, library_errors

_FILE = "tokenizer.json"
# Gemma's, with 262,144 tokens and 515,000 merges, has 33 MB.
MAX_BYTES = 96 << 20
# A token has at most about this many characters, so a prefix of a too long text suffices to refuse it.
_CHARACTERS_PER_TOKEN = 8
# The number of tokens at the end of a prefix that may be tokenized otherwise within the longer text.
_UNSETTLED = 1024
# Characters of a turn's end that are tokenized; usually one or two tokens.
_CLOSING = 1000


class Tokenizer:
    """A bundle's tokenizer and chat templates. ``template_source``: of the template for conversations with tools;
    ``special_ids``: of the tokens that ``decode`` skips; ``special_tokens``: ``bos_token``, ``eos_token``, ..."""

    def __init__(
        self,
        tokenizer_json: bytes,
        tokenizer_config: Mapping[str, Any],
        template: str | dict[str, str] | None,
        vocab_size: int,
        special_tokens_map: Mapping[str, Any] | None = None,
    ) -> None:
        """``template``: the default one, or by name; None for those in ``tokenizer_config``."""
        if len(tokenizer_json) > MAX_BYTES:
            raise BundleError(f"{_FILE}: expected at most {MAX_BYTES:,} bytes, found {len(tokenizer_json):,}")
        with library_errors("not a tokenizer of the tokenizers library"):
            self._library = tokenizers.Tokenizer.from_buffer(tokenizer_json)
            # Settings from training, which would change prompts.
            self._library.no_truncation()
            self._library.no_padding()
        self._vocab_size = vocab_size
        self._bytes = TokenBytes(self._library)
        self.special_ids = {token.content: index for index, token in self._bytes.added.items() if token.special}
        self.special_tokens = special_tokens(tokenizer_config, special_tokens_map or {})
        given: Any = tokenizer_config.get("chat_template") if template is None else template
        if isinstance(given, list):  # of named templates
            named = [one for one in given if isinstance(one, dict) and isinstance(one.get("name"), str)]
            given = {one["name"]: one.get("template") for one in named}
        self._sources: dict[str, str] = (
            given if isinstance(given, dict) else {} if given is None else {"default": given}
        )
        for value in self._sources.values():
            if not isinstance(value, str):
                raise BundleError(f"tokenizer_config.json: chat_template: expected a text, found {value!r:.80}")
        self._templates: dict[str, ChatTemplate] = {}
        self.template = self._named("default")
        # Some models have a separate template for conversations with tools.
        self._tool_template = self._named("tool_use") or self.template

    def _named(self, name: str) -> ChatTemplate | None:
        if name not in self._templates and name in self._sources:
            self._templates[name] = ChatTemplate(self._sources[name], self.special_tokens)
        return self._templates.get(name)

    @property
    def template_reads(self) -> set[str]:
        """Names of the variables that the chat template reads."""
        return set() if self._tool_template is None else self._tool_template.reads

    @property
    def template_source(self) -> str | None:
        return None if self._tool_template is None else self._tool_template.source

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat templates."""
        tokenizer_json = bundle.read_bytes(_FILE)
        if tokenizer_json is None:
            raise BundleError(
                f"{guard.shown(bundle.folder)}: no tokenizer.json; save the source's fast tokenizer into it and convert "
                "again, or give token ids instead of text"
            )
        files = {match[1]: match[0] for match in map(NAMED_TEMPLATE.fullmatch, bundle.manifest.sha256) if match}
        sources = dict[str, str]()
        for name, file in {"default": "chat_template.jinja", **files}.items():
            data = bundle.read_bytes(file)
            try:
                sources |= {} if data is None else {name: data.decode()}
            except UnicodeDecodeError as error:
                raise BundleError(f"{file}: not UTF-8: {error}") from error
        older = None if sources else read_json(bundle, "chat_template.json").get("chat_template")
        if older is not None and not isinstance(older, str):
            raise BundleError(f"chat_template.json: expected a text, found {older!r:.80}")
        config, named = (read_json(bundle, name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
        return cls(tokenizer_json, config, sources or older, bundle.config.vocab_size, named)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of a text; special tokens in it are recognised. ``most``: refuse texts of clearly more tokens."""
        guard.text("prompt", text)  # the library would also accept a pair of texts
        size = len(text) if most is None else _CHARACTERS_PER_TOKEN * (most + _UNSETTLED)
        while size < len(text):
            count = len(self._encode(text[:size], add_special_tokens))
            if most is not None and count > most + _UNSETTLED:
                raise ContextLengthError(
                    f"the prompt has {len(text):,} characters, the first {size:,} of them are {count:,} tokens "
                    f"already, and the context holds {most:,}: shorten it, or load with a larger max_seq_len if "
                    "the model allows one"
                )
            size *= 4
        ids = self._encode(text, add_special_tokens)
        if ids and max(ids) >= self._vocab_size:
            raise BundleError(f"{_FILE} gives id {max(ids)}, but the model's vocabulary has {self._vocab_size}")
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with library_errors(CANNOT_RUN):
            # Without the tokens' offsets, in less than half the time.
            (encoding,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, that of :meth:`detokenizer`; unknown ids have no text."""
        ids = list(token_ids)
        try:
            if not self._bytes.spelled:
                with library_errors(CANNOT_RUN):
                    return self._library.decode(ids, skip_special_tokens=skip_special_tokens)
            detokenizer = self.detokenizer(frozenset() if skip_special_tokens else self._bytes.special)
            return "".join([detokenizer.add(operator.index(one)) for one in ids]) + detokenizer.finish()
        except (OverflowError, TypeError) as error:
            invalid = guard.quoted([one for one in ids if not hasattr(one, "__index__") or not 0 <= one < 2**32])
            raise UsageError(f"token ids: expected integers from 0 to {2**32 - 1:,}, found {invalid}") from error

    def detokenizer(self, visible_special_tokens: frozenset[int] = frozenset()) -> Detokenizer:
        """An incremental detokenizer; ``visible_special_tokens`` are part of its text."""
        if self._bytes.spelled:
            return Detokenizer(self._bytes, visible_special_tokens)
        return LibraryDetokenizer(self._bytes, visible_special_tokens, self._library)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token within a text, maybe a part of a character; a special token's name; empty if unknown."""
        return self._bytes[token_id]

    def vocabulary(self) -> list[bytes] | None:
        """``token_bytes`` of every id; None if a token's text depends on its neighbours."""
        return [self._bytes[token] for token in range(self._vocab_size)] if self._bytes.spelled else None

    def literal_encoder(self, not_text: Collection[int]) -> Callable[[str], list[int]]:
        """A function that encodes the middle of a text: without a space before it, and the text of a token of ``not_text``
        is spelled by other tokens."""

        def without_prefix(part: dict[str, Any] | None) -> dict[str, Any] | None:
            if part is None or part["type"] == "Prepend":
                return None
            for key in part.keys() & {"normalizers", "pretokenizers"}:
                part[key] = [kept for one in part[key] if (kept := without_prefix(one))]
            prefix: dict[str, dict[str, Any]] = {
                "Metaspace": {"prepend_scheme": "never"},
                "ByteLevel": {"add_prefix_space": False},
            }
            return {**part, **prefix.get(part["type"], {})}

        data = json.loads(self._library.to_str())
        data |= {key: without_prefix(data[key]) for key in ("normalizer", "pre_tokenizer")}
        for token in data["added_tokens"]:
            token["special"] = token["id"] in not_text
        library = tokenizers.Tokenizer.from_str(json.dumps(data))
        library.encode_special_tokens = True
        return lambda text: library.encode(text, add_special_tokens=False).ids

    def token_id(self, token: str) -> int | None:
        """Id of a vocabulary entry, or None."""
        return self._library.token_to_id(token)

    def special_id(self, name: str) -> int | None:
        """Id of ``bos_token``, ``eos_token``, ...; None if the model has none."""
        return self.token_id(self.special_tokens.get(name, ""))

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, chat_template: str | None = None, **variables: Any
    ) -> str:
        """Apply the chat template, or the one named ``chat_template``, to a conversation; see :meth:`ChatTemplate.render`."""
        template = self._tool_template if variables.get("tools") else self.template
        if chat_template is not None:
            template = self._require(chat_template)
        if template is None:
            named = f" by default: choose one of {', '.join(map(repr, self._sources))}" if self._sources else ""
            raise UsageError(
                f"this model has no chat template{named}" + ("" if named else ": give it plain text to continue")
            )
        return template.render(messages, **variables)

    def select_template(self, name: str) -> None:
        """Use the chat template of this name for all conversations, with and without tools."""
        self.template = self._tool_template = self._require(name)

    def _require(self, name: str) -> ChatTemplate:
        template = self._named(name) if isinstance(name, str) else None
        if template is None:
            known = ", ".join(map(repr, self._sources)) or "none"
            raise UsageError(
                f"chat_template: expected the name of one of the model's templates ({known}), found {name!r:.80}"
            )
        return template

    def check(self) -> None:
        """Wait for the checks of the chat templates; BundleError if one does not compile or exceeds a limit."""
        for template in (self.template, self._tool_template):
            if template is not None:
                template.check()

    @cached_property
    def _after_answer(self) -> list[list[int]] | None:
        """Token ids that the template puts after an answer: at the end, and before the next message; None without them."""
        if self.template is None:
            return None
        self.check()
        try:
            texts = after_answer(self.template.render)
        except (BundleError, UsageError):
            return None  # the template needs other messages; rendering the prompt reports that
        return [self.encode(text[:_CLOSING], add_special_tokens=False) for text in texts]

    def template_ends_turns(self, stops: frozenset[int]) -> bool:
        """Whether the template ends an assistant's turn with a stop token: true for instruction-tuned models, false for a
        base model with a template (as Qwen's), which ends texts with another token."""
        if self._after_answer is None:
            return self.template is not None
        return any(not stops.isdisjoint(ids) for ids in self._after_answer)

    def end_of_turn(self, stops: frozenset[int]) -> int | None:
        """The added token that the template writes after an answer; None if there is none, or a stop token."""
        if self._after_answer is None or self.template_ends_turns(stops):
            return None
        first = next((one for one in self._after_answer[0] if not self.token_bytes(one).isspace()), None)
        return first if first in self._bytes.added else None


def partial_marker(text: str, marker: str) -> int:
    """Length of the longest proper prefix of ``marker`` that ``text`` ends with."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)


class StopStrings:
    """Truncates a text before the first stop string, also one across chunks. Of several stop strings the first complete
    one counts, and the longest of those that end at the same character."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._pending = ""
        self.found: str | None = None

    def add(self, chunk: str) -> str:
        """The text that cannot be part of a stop string; empty after a stop string."""
        if self.found is not None:
            return ""
        if not self._stops:
            return chunk
        text = self._pending + chunk
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self.found, self._pending = text[start:end], ""
            return text[:start]
        end = len(text) - max(partial_marker(text, stop) for stop in self._stops)
        self._pending = text[end:]
        return text[:end]

    def finish(self) -> str:
        """The pending text at the end of the sequence."""
        pending, self._pending = self._pending, ""
        return pending


def check_tokenizer(bundle: Bundle) -> Tokenizer | None:
    """Render, encode and decode a prompt with a bundle's tokenizer and chat template, if it has them."""
    if bundle.read_bytes(_FILE) is None:
        return None
    tokenizer = Tokenizer.from_bundle(bundle)
    tokenizer.check()
    prompt = "hi"
    if tokenizer.template is not None:
        with contextlib.suppress(UsageError):  # it may need other messages
            prompt = tokenizer.render([{"role": "user", "content": prompt}])
    tokenizer.decode(tokenizer.encode(prompt))
    return tokenizer


def stop_ids(bundle: Bundle, tokenizer: Tokenizer | None) -> frozenset[int]:
    """End-of-text ids: the union of those of config, generation config and tokenizer."""
    stops: set[int] = set()
    file = "generation_config.json"
    for name, config in (("config.json", bundle.config_dict), (file, read_json(bundle, file))):
        value = config.get("eos_token_id")
        ids = [item for item in (value if isinstance(value, list) else [value]) if item is not None]
        if any(type(item) is not int for item in ids):
            raise BundleError(f"{name}: eos_token_id: expected token ids, found {value!r:.80}")
        stops.update(ids)
    token = None if tokenizer is None else tokenizer.special_id("eos_token")
    return frozenset(stops if token is None else stops | {token})


def read_json(bundle: Bundle, name: str) -> dict[str, Any]:
    data = bundle.read_bytes(name)
    return {} if data is None else guard.parse_json(data, name, BundleError)
