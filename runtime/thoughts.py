"""The thoughts of reasoning models: how families mark them, a parser that separates them from the answer, and a budget."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from wisparse.formats.errors import UsageError

from .tokenizer import partial_marker

# Names of the template variable that switches thoughts on and off.
_SWITCHES = ("enable_thinking", "thinking")
# What a conversation is rendered with anyway, and arguments of transformers' ``apply_chat_template`` that are no variables.
_NOT_VARIABLES = {"self", "messages", "conversation", "add_generation_prompt", "continue_final_message"}
_NOT_VARIABLES |= {"chat_template", "tokenize", "return_dict", "return_tensors", "padding", "truncation"}
_NOT_VARIABLES |= {"max_length", "tokenizer_kwargs"}


class LogitsMask(Protocol):
    """Restricts an answer's next token. See `generation.grammar.Constraint`."""

    def mask(self, logits: Tensor) -> None: ...

    def take(self, token: int) -> None: ...


class ThoughtParser(Protocol):
    """Separates the thought from the answer, token by token. ``begun``: see `ThoughtFormat.begins`; ``tokens``: of the
    thought, including its markers; ``closed``: whether the thought has ended, or there is none."""

    begun: bool | None
    tokens: int
    closed: bool

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        """What a token's text adds to the thought, and to the answer. ``last``: nothing follows."""


@dataclass(frozen=True)
class ThoughtFormat:
    """Markers of a thought; ``opens`` may be the prompt's end. Special tokens among ``markers`` have to be visible."""

    opens: str
    closes: str
    markers: tuple[str, ...]
    # The end of what stands before the answer, if it is not that of the thought.
    header: re.Pattern[bytes] | None = None

    @property
    def end(self) -> str:
        """The text that ends a thought."""
        return self.closes

    def parser(self, begun: bool | None) -> ThoughtParser:
        return TagParser(self.opens, self.closes, begun)

    def begins(self, prompt: str) -> bool | None:
        """Whether a prompt opens the thought. False: it closes one; None: the answer may open it."""
        ends = prompt.rstrip().endswith
        return True if ends(self.opens) else False if ends(self.closes) else None


class HarmonyFormat(ThoughtFormat):
    """gpt-oss: messages of an answer have channels. ``analysis`` is the thought, ``final`` and preambles on ``commentary`` the
    answer, ``commentary to=functions.NAME`` a call, which is written as `HERMES` of ``protocol.tools`` has it."""

    end = "<|end|>"

    def parser(self, begun: bool | None) -> ThoughtParser:
        return HarmonyParser(begun)


def _tags(opens: str, closes: str, *markers: str) -> ThoughtFormat:
    return ThoughtFormat(opens, closes, markers or (opens, closes))


HARMONY = HarmonyFormat(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>"),
    re.compile(rb"<\|channel\|>final[^<]*(<\|constrain\|>[^<]*)?<\|message\|>$"),
)
# Qwen3, QwQ, DeepSeek R1, GLM-4.5, SmolLM3, EXAONE 4, Hunyuan, ERNIE; Magistral; Seed-OSS; Gemma 4.
FORMATS = (
    _tags("<think>", "</think>"),
    _tags("[THINK]", "[/THINK]"),
    _tags("<seed:think>", "</seed:think>"),
    _tags("<|channel>thought", "<channel|>", "<|channel>", "<channel|>"),
)


def find_format(template: str, token_id: Callable[[str], int | None]) -> ThoughtFormat | None:
    """The format of a chat template and a vocabulary; None: the model marks no thoughts."""
    if token_id("<|channel|>") is not None and token_id("<|message|>") is not None:
        return HARMONY
    known = (
        one
        for one in FORMATS
        if token_id(one.markers[0]) is not None or one.opens in template or one.closes in template
    )
    return next(known, None)


def switch_of(reads: Set[str]) -> str | None:
    """The variable that switches thoughts on and off, of those that a chat template reads, or None."""
    return next((name for name in _SWITCHES if name in reads), None)


class TagParser:
    """A thought between two markers at the beginning of the answer; each part without surrounding white space."""

    def __init__(self, opens: str, closes: str, begun: bool | None) -> None:
        self._opens, self._closes, self.begun = opens, closes, begun
        self._text = ""  # not returned yet
        self._opened = bool(begun)
        self._strips = True  # only white space since the thought or the answer began
        self.closed = False
        self._num_tokens = self.tokens = 0

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        if self.closed:
            text = text.lstrip() if self._strips else text
            self._strips = self._strips and not text
            return "", text
        self._num_tokens += 1
        self._text += text
        if not self._opened:
            stripped = self._text.lstrip()
            if not stripped.startswith(self._opens):
                if self._opens.startswith(stripped) and not last:
                    return "", ""
                self.closed, self._strips = True, False  # there is no thought
                return "", self._text
            self._opened, self._text = True, stripped[len(self._opens) :]
        self.tokens = self._num_tokens
        thought, closes, rest = self._text.partition(self._closes)
        if not closes and not last:
            thought = thought[: len(thought) - partial_marker(thought, self._closes)]
        added = thought.rstrip()
        self._text = self._text[len(added) :]
        added = added.lstrip() if self._strips else added
        self._strips = self._strips and not added
        if not closes:
            return added, ""
        self.closed = self._strips = True
        return added, self.add(rest)[1]


class HarmonyParser:
    """See `HarmonyFormat`."""

    _ENDS = re.compile(r"<\|(?:end|start|channel|call|return)\|>")
    _RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")
    _ANALYSIS = re.compile(r"<\|channel\|>\s*analysis\b")

    def __init__(self, begun: bool | None) -> None:
        self.begun = begun
        self._text = HARMONY.opens if begun else ""  # not parsed yet
        self._header: str | None = None  # of the message whose body is read; None: between messages
        self.closed, self.tokens = False, 0

    def add(self, text: str, last: bool = False) -> tuple[str, str]:
        self.tokens += not self.closed
        self._text += text
        thought, answer = "", ""
        while self._text:
            if self._header is None:
                header, marker, rest = self._text.partition("<|message|>")
                begins = self._text.lstrip()
                plain = not begins.startswith(("<|", "to=")) and not any(
                    one.startswith(begins) for one in ("<|", "to=")
                )
                plain = plain or (last and not marker and not begins.startswith("<|"))
                if not marker and not plain and not last:
                    break
                self._header, self._text = (header, rest) if marker else ("", self._text if plain else "")
                answer += self._call("begin")
                self.closed = self.closed or not self._thinks
            ends = self._ENDS.search(self._text)
            kept = 0 if ends or last else max(partial_marker(self._text, f"<|{name}|>") for name in _ENDING)
            end = ends.start() if ends else len(self._text) - kept
            body, self._text = self._text[:end], self._text[end:]
            thought, answer = (thought + body, answer) if self._thinks else (thought, answer + body)
            if not ends:
                break
            answer += self._call("end")
            self._header = None
            self._text = re.sub(r"^<\|(?:end|call|return)\|>", "", self._text)
        if last and self._header is not None:
            answer += self._call("end")
            self._header = None
        return thought, answer

    @property
    def _thinks(self) -> bool:
        header = self._header or ""
        return self._ANALYSIS.search(header) is not None and self._RECIPIENT.search(header) is None

    def _call(self, what: str) -> str:
        name = self._RECIPIENT.search(self._header or "")
        if name is None:
            return ""
        return f'<tool_call>\n{{"name": "{name[1]}", "arguments": ' if what == "begin" else "}\n</tool_call>"


_ENDING = ("end", "start", "channel", "call", "return")


class ThinkingConstraint:
    """A grammar that begins with the answer, and a limit of the thought's tokens: then its closing tokens are forced."""

    def __init__(
        self,
        form: ThoughtFormat,
        opens: Sequence[int],
        closes: Sequence[int],
        spell: Callable[[int], bytes],
        *,
        begun: bool | None,
        budget: int | None = None,
    ) -> None:
        """``opens``, ``closes``: token ids of the markers; ``spell``: a token's bytes, as the end of a thought may be a part
        of tokens; ``begun``: see `ThoughtFormat.begins`."""
        self._opens, self._closes, self._budget = list(opens), list(closes), budget
        self._end, self._header, self._spell = form.end.encode(), form.header, spell
        self.grammar: LogitsMask | None = None
        # "before": the answer or a thought may begin; "header": that of the answer has to follow.
        self._state = "before" if begun is None else "thinking" if begun else "answer"
        self._recent: list[int] = []  # tokens that may be a part of a marker
        self._tail = b""  # the newest bytes, which may be a part of the thought's end, or of the header
        self._forced: list[int] = []
        self._count = 0  # of the thought

    def mask(self, logits: Tensor) -> None:
        if self._state == "before" and self.grammar is not None:
            self._mask_beginning(logits, self.grammar)
        elif self._state == "answer" and self.grammar is not None:
            self.grammar.mask(logits)
        elif self._state == "thinking":
            if self._budget is not None and self._count >= self._budget and not self._forced:
                self._forced = self._closes[self._matched() :]
            if self._forced:
                _allow_only(self._forced[0], logits)

    def _mask_beginning(self, logits: Tensor, grammar: LogitsMask) -> None:
        opening = self._opens[len(self._recent)]
        if self._header is None and not self._recent:
            wanted, kept = int(logits.argmax()), logits[opening].clone()
            grammar.mask(logits)
            # Among the few tokens that a grammar allows, one that the model did not want would begin a thought by chance.
            # What the grammar itself may begin with is no marker.
            if wanted != opening or logits[opening] > -torch.inf:
                self._state = "answer"
            else:
                logits[opening] = kept
        elif self._header is None or not self._recent:
            _allow_only(opening, logits)

    def _matched(self) -> int:
        """How many of the closing tokens the newest tokens are."""
        lengths = range(len(self._closes) - 1, 0, -1)
        return next((n for n in lengths if self._recent[-n:] == self._closes[:n]), 0)

    def take(self, token: int) -> None:
        if self._state == "answer":
            if self.grammar is not None:
                self.grammar.take(token)
            return
        self._tail = (self._tail + self._spell(token))[-_MAX_HEADER:]
        self._recent = [*self._recent, token][-max(len(self._opens), len(self._closes)) :]
        if self._state == "before":
            if self._recent == self._opens:
                self._state, self._recent, self._tail = "thinking", [], b""
            elif self._recent != self._opens[: len(self._recent)]:
                self._state = "answer" if self._header is None else "header"
                if self._header is None and self.grammar is not None:
                    self.grammar.take(token)
        elif self._state == "thinking":
            self._count += 1
            if self._forced:
                del self._forced[0]
                ended = not self._forced
            else:
                ended = self._end in self._tail
            if ended:
                self._state = "answer" if self._header is None else "header"
        if self._state == "header" and self._header is not None and self._header.search(self._tail):
            self._state = "answer"


_MAX_HEADER = 200  # bytes of a thought's end or an answer's header


def _allow_only(token: int, logits: Tensor) -> None:
    kept = logits[token].clone()
    logits.fill_(-torch.inf)
    logits[token] = torch.where(kept > -torch.inf, kept, 0.0)


def not_variable(given: Mapping[Any, Any]) -> Any | None:
    """A key that cannot be a further variable of a chat template, or None."""
    return next((key for key in given if not isinstance(key, str) or key in _NOT_VARIABLES), None)


def template_variables(
    reads: Set[str], thinking: bool | None, effort: str | None, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The variables for a chat template that reads those of these names; UsageError if it has no switch for thoughts."""
    found = dict(given or {})
    if (wrong := not_variable(found)) is not None:
        raise UsageError(f"chat_template_kwargs: expected further variables of the template, found {wrong!r:.80}")
    if thinking is not None:
        switch = switch_of(reads)
        if switch is None:
            raise UsageError("thinking: this model's chat template has no switch for thoughts: leave it out")
        found.setdefault(switch, thinking)
    if effort is not None:
        found.setdefault("reasoning_effort", effort)
    return found
