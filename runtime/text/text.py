"""The edge where text becomes token ids and back: tokenizer, chat template, the ids that end a text.

Uses the ``tokenizers`` library only. Whether a beginning-of-text token is put before a prompt is for ``tokenizer.json``
to say (its post-processor), as in transformers' own TokenizersBackend.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wisparse.formats.errors import BundleError, ContextLengthError, UsageError
from wisparse.formats.guard import integer, parse_json, quoted, shown, text
from wisparse.formats.sandbox import ChatTemplate, together

from .tokenizer import Detokenizer, read_tokenizer

if TYPE_CHECKING:
    from wisparse.formats.bundle import Bundle

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int]

_FORMS = "a text, messages with a role, token ids, or a list of these"


def as_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """The prompts that ``prompt`` holds, and whether it is a single one.

    Token ids may be numpy's or torch's: a vector of integers is a prompt, a matrix is a list of them.

    Raises:
        UsageError: something else, or different things in one list.
    """
    prompt = _plain(prompt)
    if isinstance(prompt, str):
        return [text("prompt", prompt)], True
    kinds = _kinds(prompt, "prompt")
    if kinds != "prompts":
        return [_single(prompt, kinds, "prompt")], True
    prompts: list[Prompt] = []
    for index, one in enumerate(prompt):
        where = f"prompt[{index}]"
        one = _plain(one)
        if isinstance(one, str):
            prompts.append(text(where, one))
        elif (kind := _kinds(one, where)) == "prompts":
            raise UsageError(f"{where}: expected a text, messages or token ids, found a list of lists: {quoted(one)}")
        else:
            prompts.append(_single(one, kind, where))
    return prompts, False


def stop_texts(stop: Any) -> list[str]:
    """The texts before which an answer ends: none, one, or several of them.

    Raises:
        UsageError: something else, or an empty text.
    """
    if stop is None:
        return []
    several = [stop] if isinstance(stop, str) else stop
    if not isinstance(several, (list, tuple, set, frozenset)):
        raise UsageError(f"stop: expected a text, or a list of texts, found {quoted(stop)}")
    return [text("stop", one, empty=False) for one in several]


def _plain(value: Any) -> Any:
    """Arrays of numpy and tensors of torch as lists of Python's numbers."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value


def _kinds(prompt: Any, where: str) -> str:
    """What a list holds: ``ids``, ``messages`` or ``prompts``, one of them throughout."""
    if isinstance(prompt, Mapping):
        raise UsageError(f"{where}: expected {_FORMS}, found one message: put it into a list")
    if isinstance(prompt, (bytes, bytearray, memoryview)) or not isinstance(prompt, Sequence):
        raise UsageError(f"{where}: expected {_FORMS}, found {quoted(prompt)}")
    if not prompt:
        raise UsageError(f"{where}: expected {_FORMS}, found an empty list")
    first = _kind(prompt[0])
    for index, one in enumerate(prompt):
        kind = _kind(one)
        if kind is None:
            raise UsageError(f"{where}[{index}]: expected {_FORMS}, found {quoted(one)}")
        if kind != first:
            raise UsageError(f"{where}: expected one kind of thing in a list, found {first} and then {quoted(one)}")
    assert first is not None
    return first


def _kind(value: Any) -> str | None:
    """What a list is that has ``value`` in it; None for what no prompt holds."""
    if isinstance(value, Mapping):
        return "messages"
    if isinstance(value, (str, Sequence)) or getattr(value, "shape", ()) != ():
        return "prompts"
    return "ids" if hasattr(value, "__index__") and not isinstance(value, bool) else None


def _single(prompt: Sequence[Any], kind: str, where: str) -> Prompt:
    if kind == "ids":
        return [integer(f"{where}[{index}]", one, 0) for index, one in enumerate(prompt)]
    for index, message in enumerate(prompt):
        _check_message(message, f"{where}[{index}]")
    return list(prompt)


def _check_message(message: Message, where: str) -> None:
    """A message has a role, and a content unless it holds something else, such as the calls of tools."""
    if not isinstance(message.get("role"), str):
        raise UsageError(f"{where}: expected a message with a role (str) and a content, found {quoted(dict(message))}")
    content = message.get("content")
    if isinstance(content, list) or (content is None and message.keys() - {"role", "content"}):
        return  # the model's chat template knows parts and calls, or refuses them
    text(f"{where}: content", content)


# How many tokens at the end of a text can become others, and fewer, when the text goes on.
_UNSETTLED = 1024
# What closes a turn is a token or two.
_CLOSING = 1000


class Text:
    """A bundle's tokenizer and chat template.

    Attributes:
        template: None if there is none.
        template_source: of the one that is given tools.
    """

    def __init__(
        self,
        tokenizer_json: bytes,
        tokenizer_config: Mapping[str, Any],
        template: str | None,
        vocab_size: int,
    ) -> None:
        self._tokenizer = read_tokenizer(tokenizer_json)
        self._vocab_size = vocab_size
        self.special_tokens = _special_tokens(tokenizer_config)
        named = _templates_of(tokenizer_config) if template is None else {"default": template}
        source = named.get("default")
        self.template = None if source is None else ChatTemplate(source, self.special_tokens)
        # Some models have a template of its own for conversations with tools.
        self.template_source = named.get("tool_use", source)
        self._tool_template = self.template
        if self.template_source is not None and self.template_source != source:
            self._tool_template = ChatTemplate(self.template_source, self.special_tokens)

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> Text:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raises:
            BundleError: missing or damaged.
        """
        tokenizer_json = bundle.read_bytes("tokenizer.json")
        if tokenizer_json is None:
            raise BundleError(
                f"{shown(bundle.folder)}: no tokenizer.json; save the source's fast tokenizer into it and convert "
                "again, or give token ids instead of text"
            )
        template = bundle.read_bytes("chat_template.jinja")
        legacy = _read_json(bundle, "chat_template.json").get("chat_template")
        try:
            source = template.decode() if template is not None else legacy
        except UnicodeDecodeError as error:
            raise BundleError(f"chat_template.jinja: not UTF-8: {error}") from error
        if source is not None and not isinstance(source, str):
            raise BundleError(f"chat_template.json: expected a text, found {source!r:.80}")
        return cls(tokenizer_json, _read_json(bundle, "tokenizer_config.json"), source, bundle.config.vocab_size)

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised.

        Args:
            text: any text.
            add_special_tokens: let the post-processor add its own (beginning of text, say); not for a rendered chat
                template, which has them.
            most: what the context holds. A text that is far too long for it is not tokenised to its end.

        Raises:
            ContextLengthError: far more than ``most`` tokens; a few more may still be returned.
            BundleError: the tokenizer gives an id that the model has no embedding for, or cannot run.
        """
        try:
            size = len(text) if most is None else 8 * (most + _UNSETTLED)
            while size < len(text):
                found = len(self._tokenizer.encode(text[:size], add_special_tokens))
                if most is not None and found > most + _UNSETTLED:
                    raise ContextLengthError(
                        f"the prompt has {len(text):,} characters, the first {size:,} of them are {found:,} tokens "
                        f"already, and the context holds {most:,}: shorten it, or load with a larger max_seq_len if "
                        "the model allows one"
                    )
                size *= 4
            ids = self._tokenizer.encode(text, add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise UsageError(
                "the prompt is not valid text: expected a str without halves of surrogate pairs"
            ) from error
        if ids and max(ids) >= self._vocab_size:
            raise BundleError(f"tokenizer.json gives id {max(ids)}, but the model's vocabulary has {self._vocab_size}")
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer does not know give nothing."""
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def detokenizer(self, spoken: frozenset[int] = frozenset()) -> Detokenizer:
        """A fresh decoder for one growing sequence; special tokens among ``spoken`` are part of its text."""
        return Detokenizer(functools.partial(self._decode_spoken, spoken) if spoken else self.decode)

    def _decode_spoken(self, spoken: frozenset[int], token_ids: Sequence[int]) -> str:
        """Text of token ids, with some special tokens; what stands between two of these is decoded by itself."""
        parts = []
        start = 0
        for index, token in enumerate(token_ids):
            if token in spoken:
                parts.append(self.decode(token_ids[start:index]))
                parts.append(self.decode([token], skip_special_tokens=False))
                start = index + 1
        return "".join(parts) + self.decode(token_ids[start:])

    def token_id(self, token: str) -> int | None:
        """Id of a token that is a whole vocabulary entry; None if there is no such."""
        return self._tokenizer.token_to_id(token)

    def is_special(self, token: str) -> bool:
        """Whether ``decode`` leaves this token out."""
        found = self.token_id(token)
        return found is not None and self.decode([found]) == "" != self.decode([found], skip_special_tokens=False)

    def render(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """The conversation through the chat template; see :meth:`ChatTemplate.render`.

        Raises:
            UsageError: there is no template, or it refuses the messages.
        """
        template = self._tool_template if more.get("tools") else self.template
        if template is None:
            raise UsageError("this model has no chat template: give it plain text to continue")
        return template.render(messages, **more)

    def template_ends_turns(self, stops: frozenset[int]) -> bool:
        """Whether the template closes an assistant's turn with a token that ends generation.

        An instruction-tuned model has to, or its answers would not end. A base model that ships a template none the
        less (Qwen's do) does not: it ends texts with another token, and a prompt is best continued as it stands.
        """
        if self.template is None:
            return False
        marker = "wisparse"
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
        try:
            _, _, closing = self.template.render(turns, add_generation_prompt=False).rpartition(marker)
        except (BundleError, UsageError):
            return True  # it wants something else; the prompt's own rendering will say so
        return not stops.isdisjoint(self.encode(closing[:_CLOSING], add_special_tokens=False))


@together()
def check_text(bundle: Bundle) -> None:
    """Try a bundle's tokenizer and chat template, if it has them.

    Raises:
        BundleError: one of them cannot be read, fails, or needs more time or memory than it may.
    """
    if bundle.read_bytes("tokenizer.json") is None:
        return
    text = Text.from_bundle(bundle)
    prompt = "hi"
    if text.template is not None:
        with contextlib.suppress(UsageError):  # it may want other messages
            prompt = text.render([{"role": "user", "content": prompt}])
    text.decode(text.encode(prompt))


def stop_ids(bundle: Bundle, text: Text | None) -> frozenset[int]:
    """The ids that end a text: the union of what config, generation config and tokenizer call end-of-text.

    Raises:
        BundleError: something that is no token id.
    """
    found: set[int] = set()
    for name, config in (
        ("config.json", bundle.config_dict),
        ("generation_config.json", _read_json(bundle, "generation_config.json")),
    ):
        value = config.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if item is None:
                continue
            if isinstance(item, bool) or not isinstance(item, int):
                raise BundleError(f"{name}: eos_token_id: expected token ids, found {value!r:.80}")
            found.add(item)
    if text is not None and "eos_token" in text.special_tokens:
        token = text.token_id(text.special_tokens["eos_token"])
        if token is not None:
            found.add(token)
    return frozenset(found)


def _read_json(bundle: Bundle, name: str) -> dict[str, Any]:
    data = bundle.read_bytes(name)
    return {} if data is None else parse_json(data, name, BundleError)


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like; older files hold an object with the text under ``content``."""
    tokens = {}
    for key, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if key.endswith("_token") and isinstance(value, str):
            tokens[key] = value
    return tokens


def _templates_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The templates inside ``tokenizer_config.json``, by name: a text is the default one, a list has names."""
    given = config.get("chat_template")
    entries = given if isinstance(given, list) else [] if given is None else [{"name": "default", "template": given}]
    found = {}
    for entry in entries:
        if isinstance(entry, dict) and entry.get("name") in ("default", "tool_use"):
            template = entry.get("template")
            if not isinstance(template, str):
                raise BundleError(f"tokenizer_config.json: chat_template: expected a text, found {template!r:.80}")
            found[entry["name"]] = template
    return found
