"""From token ids to text: the bytes of each token, joined by one incremental UTF-8 decoder."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

from wisparse.formats.errors import BundleError

# GPT-2's alphabet, in which byte-level vocabularies are written: a printable character for each byte.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_OF = {chr(byte): byte for byte in _PRINTABLE}
_BYTE_OF |= {chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}
# A token of one byte in SentencePiece's vocabularies.
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
CANNOT_RUN = "the tokenizers library cannot run it"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@contextlib.contextmanager
def library_errors(action: str) -> Iterator[None]:
    """Convert errors of the tokenizers library, bare Exceptions and panics, to BundleError."""
    try:
        yield
    except BaseException as error:
        # PanicException, a BaseException, cannot be imported.
        if type(error) in (Exception, ValueError) or type(error).__name__ == "PanicException":
            raise BundleError(f"tokenizer.json: {action}: {error!s:.200}") from error
        raise


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer, pre-tokenizer or decoder, a sequence's one by one."""
    pending = [] if component is None else [json.loads(component.__getstate__())]
    for step in pending:
        pending += step.get("normalizers") or step.get("pretokenizers") or step.get("decoders") or ()
        if step["type"] != "Sequence":
            yield step


class TokenBytes(dict[int, bytes]):
    """The bytes of each token within a text, computed at the first use; empty for unknown ids.

    Two kinds of vocabularies spell bytes: byte-level ones (if the pre-tokenizer is ``ByteLevel``, whatever the decoder is,
    or the decoder) and SentencePiece's (a decoder of ``Replace``, ``ByteFallback``, ``Fuse`` and ``Strip``). For others
    ``spelled`` is false: a token's text depends on its neighbours, and its bytes here are those after itself.
    ``stripped``: most spaces that are dropped from the beginning of a text. ``added``: the tokens beside the model's
    vocabulary, by id.
    """

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._library = library
        self.added = library.get_added_tokens_decoder()
        self.special = frozenset(index for index, token in self.added.items() if token.special)
        steps = list(_steps(library.decoder))
        encoding = [*_steps(library.normalizer), *_steps(library.pre_tokenizer)]
        kinds = [step["type"] for step in steps]
        self._byte_level = any(step["type"] == "ByteLevel" for step in encoding) or kinds == ["ByteLevel"]
        self.stripped = 0
        if not self._byte_level and kinds[-2:] == ["Fuse", "Strip"] and steps[-1]["content"] == " ":
            self.stripped = 0 if steps[-1]["stop"] else steps.pop()["start"]
        self._byte_fallback = "ByteFallback" in kinds
        replaced = [(step["pattern"].get("String", ""), step["content"]) for step in steps if step["type"] == "Replace"]
        self._replaced = dict(replaced)
        self.spelled = self._byte_level or (
            bool(replaced or self._byte_fallback)
            and all(len(old) == 1 for old, _ in replaced)
            and all(step["type"] in ("Replace", "ByteFallback", "Fuse") for step in steps)
        )

    def __missing__(self, token: int) -> bytes:
        text = self._library.id_to_token(token)
        data = b"" if text is None else self._bytes(token, text)
        self[token] = data
        return data

    def _bytes(self, token: int, text: str) -> bytes:
        if token in self.special:
            return text.encode()
        if self._byte_level:
            data = bytes(_BYTE_OF.get(character, 0) for character in text)
            # Added tokens are texts, even of letters of the alphabet: "café".
            literal = not _BYTE_OF.keys() >= {*text} or (
                token in self.added and "\ufffd" in data.decode(errors="replace")
            )
            return text.encode() if literal else data
        if not self.spelled:
            with library_errors(CANNOT_RUN):
                once, twice = (self._library.decode([token] * count, skip_special_tokens=False) for count in (1, 2))
            return twice[len(once) :].encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes.fromhex(match[1])
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return text.encode()


class Detokenizer:
    """Decodes a sequence token by token; the parts concatenate to the text of all its tokens. Of special tokens only the
    ``visible`` ones are part of it. Bytes that are no UTF-8 become replacement characters."""

    def __init__(self, token_bytes: TokenBytes, visible: frozenset[int] = frozenset()) -> None:
        self._bytes, self._hidden = token_bytes, token_bytes.special - visible
        self._utf8, self._strip = _Utf8Decoder("replace"), token_bytes.stripped

    def add(self, token_id: int) -> str:
        """The text up to this token that was not returned yet; empty while a character is incomplete."""
        if token_id in self._hidden:
            return ""
        text = self._utf8.decode(self._bytes[token_id])
        return self._stripped(text) if self._strip else text

    def finish(self) -> str:
        """The remaining text: a replacement character for an incomplete character."""
        return self._utf8.decode(b"", True)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text


class LibraryDetokenizer(Detokenizer):
    """The same by the tokenizers library, for decoders whose tokens do not spell bytes (WordPiece's, CTC's, Metaspace).
    Text between two visible special tokens is decoded separately."""

    def __init__(self, token_bytes: TokenBytes, visible: frozenset[int], library: tokenizers.Tokenizer) -> None:
        super().__init__(token_bytes, visible)
        self._library = library
        self._begin()

    def _begin(self) -> None:
        self._stream, self._ids, self._length = DecodeStream(skip_special_tokens=True), list[int](), 0

    def add(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        if token_id in self._bytes.special:
            before = self.finish()
            self._begin()
            return before + self._bytes[token_id].decode()
        self._ids.append(token_id)
        try:
            with library_errors(CANNOT_RUN):
                chunk = self._stream.step(self._library, token_id) or ""
        except BundleError:  # it cannot go on where a token changes the text before itself
            chunk = self.finish()
            self._begin()
        self._length += len(chunk)
        return chunk

    def finish(self) -> str:
        with library_errors(CANNOT_RUN):
            text = self._library.decode(self._ids)
        rest, self._length = text[self._length :], len(text)
        return rest
