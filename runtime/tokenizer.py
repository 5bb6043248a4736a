"""Text to token ids and back: tokenizer.json, the chat template, stop strings, and the ids that end a text."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from wisparse.formats import guard
from wisparse.formats.bundle import Bundle
from wisparse.formats.chat_template import ChatTemplate
from wisparse.formats.errors import BundleError, ContextLengthError, UsageError

_FILE = "tokenizer.json"
# For scale: Gemma's, with 262,144 tokens and 515,000 merges, has 33 MB.
_MAX_BYTES = 96 << 20
# A character of text is a token at least this often, so longer texts are tried in part first.
_CHARACTERS_PER_TOKEN = 8
# How many tokens at the end of a text can become others, and fewer, when the text goes on.
_UNSETTLED = 1024
# Characters of a closing turn that are looked at: it is a token or two.
_CLOSING = 1000


@contextlib.contextmanager
def _library_errors(action: str) -> Iterator[None]:
    """Failures of the library as BundleError; of its own it raises bare Exceptions, and panics."""
    try:
        yield
    except BaseException as error:
        # The class of panics, a BaseException, is in no module that could be imported.
        if type(error) in (Exception, ValueError) or type(error).__name__ == "PanicException":
            raise BundleError(f"{_FILE}: {action}: {error!s:.200}") from error
        raise


class Tokenizer:
    """A bundle's tokenizer and chat template; ``template_source`` is that of the template that is given tools,
    ``special_ids`` those of the tokens that ``decode`` leaves out."""

    def __init__(
        self, tokenizer_json: bytes, tokenizer_config: Mapping[str, Any], template: str | None, vocab_size: int
    ) -> None:
        if len(tokenizer_json) > _MAX_BYTES:
            raise BundleError(f"{_FILE}: expected at most {_MAX_BYTES:,} bytes, found {len(tokenizer_json):,}")
        with _library_errors("not a tokenizer of the tokenizers library"):
            self._library = tokenizers.Tokenizer.from_buffer(tokenizer_json)
            # Left over from training, either would change a prompt silently.
            self._library.no_truncation()
            self._library.no_padding()
        self._vocab_size = vocab_size
        added = self._library.get_added_tokens_decoder()
        self.special_ids = {token.content: index for index, token in added.items() if token.special}
        # Older files hold an object with the text under ``content``.
        texts = {key: one.get("content") if isinstance(one, dict) else one for key, one in tokenizer_config.items()}
        self.special_tokens = {
            key: text for key, text in texts.items() if key.endswith("_token") and isinstance(text, str)
        }
        given = tokenizer_config.get("chat_template") if template is None else template
        if not isinstance(given, list):  # a text is the default one, a list has names
            given = [] if given is None else [{"name": "default", "template": given}]
        known = (one for one in given if isinstance(one, dict) and one.get("name") in ("default", "tool_use"))
        named: dict[str, Any] = {one["name"]: one.get("template") for one in known}
        for found in named.values():
            if not isinstance(found, str):
                raise BundleError(f"tokenizer_config.json: chat_template: expected a text, found {found!r:.80}")
        templates = {name: ChatTemplate(source, self.special_tokens) for name, source in named.items()}
        self.template = templates.get("default")
        # Some models have a template of its own for conversations with tools.
        self._tool_template = templates.get("tool_use", self.template)
        self.template_source: str | None = named.get("tool_use", named.get("default"))

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> Tokenizer:
        """Read tokenizer.json, tokenizer_config.json and chat_template.jinja."""
        tokenizer_json = bundle.read_bytes(_FILE)
        if tokenizer_json is None:
            raise BundleError(
                f"{guard.shown(bundle.folder)}: no tokenizer.json; save the source's fast tokenizer into it and convert "
                "again, or give token ids instead of text"
            )
        jinja = bundle.read_bytes("chat_template.jinja")
        try:
            source = None if jinja is None else jinja.decode()
        except UnicodeDecodeError as error:
            raise BundleError(f"chat_template.jinja: not UTF-8: {error}") from error
        if jinja is None:
            source = read_json(bundle, "chat_template.json").get("chat_template")
        if source is not None and not isinstance(source, str):
            raise BundleError(f"chat_template.json: expected a text, found {source!r:.80}")
        return cls(tokenizer_json, read_json(bundle, "tokenizer_config.json"), source, bundle.config.vocab_size)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised."""
        guard.text("prompt", text)  # the library takes a pair of texts too
        size = len(text) if most is None else _CHARACTERS_PER_TOKEN * (most + _UNSETTLED)
        while size < len(text):
            found = len(self._encode(text[:size], add_special_tokens))
            if most is not None and found > most + _UNSETTLED:
                raise ContextLengthError(
                    f"the prompt has {len(text):,} characters, the first {size:,} of them are {found:,} tokens "
                    f"already, and the context holds {most:,}: shorten it, or load with a larger max_seq_len if "
                    "the model allows one"
                )
            size *= 4
        ids = self._encode(text, add_special_tokens)
        if ids and max(ids) >= self._vocab_size:
            raise BundleError(f"{_FILE} gives id {max(ids)}, but the model's vocabulary has {self._vocab_size}")
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        with _library_errors("the tokenizers library cannot run it"):
            # Without the offsets of the tokens in the text: that takes less than half as long.
            (found,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer does not know give nothing."""
        ids = list(token_ids)
        try:
            with _library_errors("the tokenizers library cannot run it"):
                return self._library.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            wrong = guard.quoted([one for one in ids if not hasattr(one, "__index__") or not 0 <= one < 2**32])
            raise UsageError(f"token ids: expected integers from 0 to {2**32 - 1:,}, found {wrong}") from error

    def detokenizer(self, visible_special_tokens: frozenset[int] = frozenset()) -> Detokenizer:
        """A decoder for one growing sequence; these special tokens are part of its text."""
        return Detokenizer(self._library, set(self.special_ids.values()), visible_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Id of a token that is a whole vocabulary entry; None if there is no such."""
        return self._library.token_to_id(token)

    def special_id(self, name: str) -> int | None:
        """Id of ``bos_token``, ``eos_token``, ...; None if the model has none."""
        return self.token_id(self.special_tokens.get(name, ""))

    def render(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """The conversation through the chat template; see :meth:`ChatTemplate.render`."""
        template = self._tool_template if more.get("tools") else self.template
        if template is None:
            raise UsageError("this model has no chat template: give it plain text to continue")
        return template.render(messages, **more)

    def check(self) -> None:
        """Wait for the trials of the chat templates; BundleError if one does not compile or takes too much."""
        for template in (self.template, self._tool_template):
            if template is not None:
                template.check()

    def template_ends_turns(self, stops: frozenset[int]) -> bool:
        """Whether the template closes an assistant's turn with a token that ends generation: an instruction-tuned model's
        does, a base model that ships a template (Qwen's do) ends texts with another token."""
        if self.template is None:
            return False
        self.check()
        marker = "wisparse"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
        try:
            _, _, closing = self.template.render(turns, add_generation_prompt=False).rpartition(marker)
        except (BundleError, UsageError):
            return True  # it wants something else; the prompt's own rendering will say so
        return not stops.isdisjoint(self.encode(closing[:_CLOSING], add_special_tokens=False))


class Detokenizer:
    """Decodes a growing sequence in chunks that join to the text of the whole, special tokens left out. Text between
    two visible special tokens is decoded by itself."""

    def __init__(self, library: tokenizers.Tokenizer, special: Collection[int], visible: Collection[int]) -> None:
        self._library, self._special, self._visible = library, special, visible
        self._stream, self._ids, self._length = DecodeStream(skip_special_tokens=True), list[int](), 0

    def add(self, token_id: int) -> str:
        """The text that this id completes; often all of its own, empty while a character is incomplete."""
        if token_id in self._visible:
            before = self.finish()
            self._stream, self._ids, self._length = DecodeStream(skip_special_tokens=True), [], 0
            with _library_errors("the tokenizers library cannot run it"):
                return before + self._library.decode([token_id], skip_special_tokens=False)
        if token_id in self._special:
            return ""
        self._ids.append(token_id)
        with _library_errors("the tokenizers library cannot run it"):
            chunk = self._stream.step(self._library, token_id) or ""
        self._length += len(chunk)
        return chunk

    def finish(self) -> str:
        """What is still held back: bytes that never became a character, as replacement characters."""
        with _library_errors("the tokenizers library cannot run it"):
            text: str = self._library.decode(self._ids)
        held, self._length = text[self._length :], len(text)
        return held


def partial_marker(text: str, marker: str) -> int:
    """Length of the end of ``text`` that may be the beginning of ``marker``."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)


class StopStrings:
    """Cuts a text off before the first stop string, wherever the chunks' borders fall. Of several stop strings the one
    that is complete first wins, the longest of those that end together."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found: str | None = None

    def add(self, chunk: str) -> str:
        """The text that is certain not to belong to a stop string; nothing once one was found."""
        if self.found is not None:
            return ""
        if not self._stops:
            return chunk
        text = self._held + chunk
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            end, start = min(ends)
            self.found, self._held = text[start:end], ""
            return text[:start]
        given = len(text) - max(partial_marker(text, stop) for stop in self._stops)
        self._held = text[given:]
        return text[:given]

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held


def check_tokenizer(bundle: Bundle) -> None:
    """Try a bundle's tokenizer and chat template, if it has them."""
    if bundle.read_bytes(_FILE) is None:
        return
    tokenizer = Tokenizer.from_bundle(bundle)
    tokenizer.check()
    prompt = "hi"
    if tokenizer.template is not None:
        with contextlib.suppress(UsageError):  # it may want other messages
            prompt = tokenizer.render([{"role": "user", "content": prompt}])
    tokenizer.decode(tokenizer.encode(prompt))


def stop_ids(bundle: Bundle, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids that end a text: the union of what config, generation config and tokenizer call end-of-text."""
    found: set[int] = set()
    file = "generation_config.json"
    for name, config in (("config.json", bundle.config_dict), (file, read_json(bundle, file))):
        value = config.get("eos_token_id")
        ids = [item for item in (value if isinstance(value, list) else [value]) if item is not None]
        if any(type(item) is not int for item in ids):
            raise BundleError(f"{name}: eos_token_id: expected token ids, found {value!r:.80}")
        found.update(ids)
    token = None if tokenizer is None else tokenizer.special_id("eos_token")
    return frozenset(found if token is None else found | {token})


def read_json(bundle: Bundle, name: str) -> dict[str, Any]:
    data = bundle.read_bytes(name)
    return {} if data is None else guard.parse_json(data, name, BundleError)
