"""A stranger's ``tokenizer.json``, given to the tokenizers library.

The library's Rust part cannot be interrupted, and a few hundred bytes can keep it busy for hours: thirty replacements
that double a text, a pattern that backtracks, a template that repeats its input. So a file is looked at first. Made of
parts alone whose time and result grow with the text and no faster, as the tokenizers of all supported models are, it
runs in this process. Everything else runs in a worker that can be ended (``sandbox``), and answers a little later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

import tokenizers

from wisparse.formats.errors import BundleError
from wisparse.formats.guard import parse_json
from wisparse.formats.sandbox import Worker, WorkerError

# What a decoder prints for bytes that are no UTF-8, among them a character whose last bytes have not come yet.
_REPLACEMENT = "\ufffd"
# A UTF-8 character has at most 4 bytes, so of one that is still incomplete at most 3 are there.
_MOST_INCOMPLETE = 3
# A window of more ids that are not context is made shorter: decoding it again for each id would take quadratic time.
_LONG = 64
# How many ids are looked at instead, and how many at the end of a window may still change what comes before them.
_CONTEXT = 32
_UNSETTLED = 8


class Detokenizer:
    """Decodes a growing sequence in pieces that join to the text of the whole.

    A piece is the difference between decoding a window of ids with and without the newest ones; the window begins some
    ids back, because many tokenizers decode an id differently at the beginning (they drop a leading space there).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """``decode`` maps ids to text, special tokens left out."""
        self._decode = decode
        self._ids: list[int] = []  # the window: context, then ids whose text is not out yet
        self._context = 0  # how many of them are context
        self._out = 0  # characters after the context's that are out already
        self._silent = False  # all after the context gives no text so far
        self._long = _LONG

    def add(self, token_id: int) -> str:
        """The text that this id completes; often all of its own, empty while a character is incomplete."""
        self._ids.append(token_id)
        return self._emit(final=False)

    def finish(self) -> str:
        """What is still held back: bytes that never became a character, as replacement characters."""
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        # Special tokens, say: as long as the newest ids give nothing, no more are looked at.
        fresh_ids = len(self._ids) - self._context
        if not final and self._silent and fresh_ids > _LONG and not self._decode(self._ids[-_CONTEXT:]):
            return ""
        fresh = self._decode(self._ids)[len(self._decode(self._ids[: self._context])) :]
        held = 0
        if not final:
            while held < min(_MOST_INCOMPLETE, len(fresh)) and fresh[-1 - held] == _REPLACEMENT:
                held += 1
        piece = fresh[self._out : len(fresh) - held]
        self._out += len(piece)
        if not held and fresh:
            # Everything is out: what was fresh becomes the context of what follows.
            self._ids = self._ids[self._context :]
            self._context, self._out, self._long = len(self._ids), 0, _LONG
        elif held and fresh_ids > self._long:
            self._shorten(fresh, held)
        self._silent = not fresh
        return piece

    def _shorten(self, fresh: str, held: int) -> None:
        """Let the window begin later, although its last characters are held: bytes without end that are no UTF-8."""
        ids = self._ids[-_CONTEXT - _UNSETTLED :]
        context, whole = self._decode(ids[:_CONTEXT]), self._decode(ids)
        rest = whole[len(context) :]
        if whole.startswith(context) and fresh.endswith(rest) and len(rest) >= held:
            self._ids, self._context, self._out, self._long = ids, _CONTEXT, len(rest) - held, _LONG
        else:
            self._long = 2 * (len(self._ids) - self._context)  # the place was no border between characters


class StopStrings:
    """Cuts a text off before the first stop string, wherever the pieces' borders fall.

    Of several stop strings the one that is complete first wins, the longest of those that end together.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that is certain not to belong to a stop string; nothing any more once one was found."""
        if self.found:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        ends = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        keep = self._open(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, at the end of the text: it did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[len(text) - length :]) for stop in self._stops):
                return length
        return 0


_NAME = "tokenizer.json"
_MEGABYTES = 1200
# For scale: Gemma's, with 262,144 tokens and 515,000 merges, has 33 MB and 2.5 million values.
_MOST_BYTES = 48 << 20
_MOST_VALUES = 4_000_000

# What a plain tokenizer's parts may be.
_MOST_PARTS = 16
_MOST_TOKEN = 512
_MOST_ADDED = 20_000
_MOST_GROWTH = 64.0
# Parts without settings that matter, and how many characters they can make of one.
_GROWTH = {
    "NFC": 3.0,
    "NFD": 4.0,
    "NFKC": 18.0,
    "NFKD": 18.0,
    "Lowercase": 3.0,
    "ByteLevel": 4.0,
    "Digits": 1.0,
    "Punctuation": 1.0,
    "Whitespace": 1.0,
    "WhitespaceSplit": 1.0,
    "ByteFallback": 1.0,
    "Fuse": 1.0,
    "Metaspace": 2.0,
}
# Patterns that never look at a character more than a few times. GPT-2, Llama 3, Qwen2, o200k, DeepSeek and digits.
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_PATTERNS = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(
            _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
            for digits in (r"\p{N}", r"\p{N}{1,3}", r"\p{N}{1,2}")
        ),
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{endings}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{endings}"
            rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
            for endings in (_ENDINGS + "?", "")
            for digits in (r"\p{N}", r"\p{N}{1,3}")
        ),
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
        *(r"\p{N}", r"\p{N}{1,3}", r"\d", r"\d{1,3}", r"[0-9]", r"[0-9]{1,3}", r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+"),
    }
)


class Tokenizer(Protocol):
    """Text to token ids and back; every method raises BundleError where the file is at fault."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of a text. TypeError, UnicodeEncodeError: ``text`` is none."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ids; ids that it does not know give nothing."""

    def token_to_id(self, token: str) -> int | None:
        """Id of a whole vocabulary entry."""


def read_tokenizer(data: bytes) -> Tokenizer:
    """The tokenizer that ``data`` describes, without truncation and padding.

    Raises:
        BundleError: it is none, or one that cannot encode.
    """
    if len(data) <= _MOST_BYTES and is_plain(parse_json(data, _NAME, BundleError, _MOST_VALUES)):
        return _InProcess(data)
    return _InWorker(data)


class _InProcess:
    """In this process."""

    def __init__(self, data: bytes) -> None:
        with _WHILE_READING:
            self._library = tokenizers.Tokenizer.from_buffer(data)
            # Left over from training, either would change a prompt silently.
            self._library.no_truncation()
            self._library.no_padding()

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("expected a str")  # the library takes a pair of texts too
        with _WHILE_RUNNING:
            # Without the places of the tokens in the text: that takes less than half as long.
            (found,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        with _WHILE_RUNNING:
            text: str = self._library.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._library.token_to_id(token)
        return found


class _InWorker:
    """In a worker; tried once, so that one that never works is refused when it is loaded."""

    def __init__(self, data: bytes) -> None:
        try:
            self._worker = Worker("tokenizer", _MEGABYTES, source=data.decode())
        except UnicodeDecodeError as error:
            raise BundleError(f"{_NAME}: expected UTF-8, found a wrong byte at {error.start}") from error
        except WorkerError as error:
            raise BundleError(f"{_NAME}: not a tokenizer of the tokenizers library: {error}") from error
        self.decode(self.encode("def f(x):\n    return 'A b' + 1", True), True)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        text.encode()  # half of a surrogate pair is the caller's fault
        most = 1024 + 8 * len(text)
        ids: list[int] = self._ask("encode", text=text, add_special_tokens=add_special_tokens, most=most)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        most = (1 << 16) + _MOST_TOKEN * len(token_ids)
        ids = list(token_ids)
        text: str = self._ask("decode", token_ids=ids, skip_special_tokens=skip_special_tokens, most=most)
        return text

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._ask("token_to_id", token=token)
        return found

    def _ask(self, do: str, **values: Any) -> Any:
        try:
            return self._worker.ask(do, **values)
        except WorkerError as error:
            raise BundleError(f"{_NAME}: the tokenizers library cannot run it: {error}") from error


class _Faults:
    """Whatever goes wrong inside the library is the fault of the file; a class, as it is entered for every token.

    Raises:
        BundleError: the library failed, or panicked.
    """

    def __init__(self, action: str, *more: type[Exception]) -> None:
        self._action, self._more = action, more

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        # It raises the bare class for damage, and for what it finds out only while it runs; the class of its panics, a
        # BaseException, is in no module that could be imported.
        if type(error) is Exception or type(error).__name__ == "PanicException" or isinstance(error, self._more):
            raise BundleError(f"{_NAME}: {self._action}: {error!s:.200}") from error


_WHILE_READING = _Faults("not a tokenizer of the tokenizers library", ValueError)
_WHILE_RUNNING = _Faults("the tokenizers library cannot run it")


def is_plain(document: Any) -> bool:
    """Whether a tokenizer's time and results are bounded by a small multiple of its input, whatever that is.

    Args:
        document: the parsed ``tokenizer.json``.
    """
    match document:
        case {"model": {"type": "BPE", "vocab": dict(vocab), "merges": list()} as model}:
            added = document.get("added_tokens") or []
            return (
                not model.get("continuing_subword_prefix")
                and not model.get("end_of_word_suffix")
                and max(map(len, vocab), default=0) <= _MOST_TOKEN
                and isinstance(added, list)
                and len(added) <= _MOST_ADDED
                and all(_plain_token(token) for token in added)
                and _growth(document.get("normalizer")) <= _MOST_GROWTH
                and _growth(document.get("pre_tokenizer")) <= _MOST_GROWTH
                and _growth(document.get("decoder")) <= _MOST_GROWTH
                and _adds_little(document.get("post_processor"))
            )
    return False


def _plain_token(token: Any) -> bool:
    match token:
        case {"content": str(content)}:
            return 0 < len(content) <= _MOST_TOKEN
    return False


def _growth(component: Any) -> float:
    """How many times longer a text can become in a normalizer, pre-tokenizer or decoder; infinite if unknown."""
    match component:
        case {"type": "Sequence", "normalizers": [*parts]}:
            pass
        case {"type": "Sequence", "pretokenizers": [*parts]} | {"type": "Sequence", "decoders": [*parts]}:
            pass
        case _:
            parts = [component]
    return math.prod(map(_growth_of_part, parts)) if len(parts) <= _MOST_PARTS else math.inf


def _growth_of_part(part: Any) -> float:
    match part:
        case None:
            return 1.0
        # Never by nothing: an added token that it leaves nothing of would be found everywhere.
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old and new:
            return max(1.0, len(new) / len(old)) if len(old) <= _MOST_PARTS else math.inf
        case {"type": "Prepend", "prepend": str(text)} if text:
            return 1.0 + len(text)
        case {"type": "Split", "pattern": {"Regex": str(pattern)}} if pattern in _PATTERNS:
            return 1.0
        case {"type": "Split", "pattern": {"String": str(text)}} if 0 < len(text) <= _MOST_PARTS:
            return 1.0
        case {"type": "Strip", "content": str(text), "start": 0 | 1, "stop": 0} if len(text) == 1:
            return 1.0
        case {"type": str(kind)}:
            return _GROWTH.get(kind, math.inf)
    return math.inf


def _adds_little(component: Any) -> bool:
    """Whether a post-processor puts a few ids around what it is given, each of which it has."""
    match component:
        case {"type": "Sequence", "processors": [*parts]}:
            return len(parts) <= _MOST_PARTS and all(map(_part_adds_little, parts))
    return _part_adds_little(component)


def _part_adds_little(part: Any) -> bool:
    match part:
        case None | {"type": "ByteLevel"}:
            return True
        case {"type": "TemplateProcessing", "single": [*single], "pair": [*pair], "special_tokens": dict(tokens)}:
            pieces = [*single, *pair]
            sequences = sum("Sequence" in piece for piece in single if isinstance(piece, dict))
            return sequences == 1 and len(pieces) <= _MOST_PARTS and all(_plain_piece(one, tokens) for one in pieces)
    return False


def _plain_piece(piece: Any, tokens: dict[str, Any]) -> bool:
    match piece:
        case {"Sequence": dict()}:
            return True
        case {"SpecialToken": {"id": str(name)}}:
            match tokens.get(name):
                case {"ids": [*ids]}:
                    return len(ids) <= _MOST_PARTS
    return False
