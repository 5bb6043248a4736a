"""The worker process that compiles grammars. ``grammar.py`` starts it as a script; it imports neither WiSparse nor torch. It
loads the tokenizer once and forks for each grammar; the limits on processor time, memory and stack apply to the fork.
``grammar.py`` calls ``build`` again for the accepted grammars."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_DEPTH = 200
# Each can be a parser state at one token, and the time grows with their square: 30 ms for 10,000, 0.6 s for 60,000.
MAX_PARTS = 10_000
# llguidance recurses once for each rule, reference or optional property. The server's threads have at least 2 MiB of stack.
STACK_BYTES = 1 << 20
_FUEL = 300_000  # llguidance's limit of work on regular expressions; about a third of a second
# Parser items for one token; ordinary schemas need less than 2,000, and the time grows with the square.
_STEP_ITEMS = 10_000
# Of an accepted grammar these many forced tokens are followed, and then these many choices.
_FORCED, _TRIED = 256, 8
# JSON on one line, as json.dumps writes it: with flexible white space, a small model may never stop writing it.
JSON_SPACE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Exceeded limit by the signal that ended a fork; llguidance aborts if an allocation fails.
_CAUSES = {"SIGXCPU": "time", "SIGABRT": "memory", "SIGKILL": "memory", "SIGSEGV": "stack", "SIGBUS": "stack"}
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|(?:#|//)[^\n]*|\[(?:\\.|[^\]\\\n])*\]')
_REFERENCE = re.compile(r'"\$ref": "([^"]*)"')
_RULE = re.compile(r"^[ \t]*[?!]?([\w-]+)[^\n:]*:(?::=)?", re.MULTILINE)
_NAME = re.compile(r"[\w-]+")


class Vocabulary:
    """A tokenizer as llguidance sees it: the bytes of each token. Special tokens and those that end an answer are no text: a
    text equal to theirs is spelled by others."""

    def __init__(
        self,
        tokens: list[bytes],
        special: list[int],
        stop_ids: list[int],
        encode: Callable[[str], list[int]] | None = None,
    ) -> None:
        """``encode``: tokens that the model would write for a text; None: the longest ones."""
        from llguidance import LLTokenizer, TokenizerWrapper

        self.tokens, self.special_token_ids, self._encode = tokens, sorted({*special, *stop_ids}), encode
        self.bos_token_id, self.eos_token_id = None, stop_ids[0]
        self._special = frozenset(self.special_token_ids)
        self.library = LLTokenizer(TokenizerWrapper(self), eos_token=stop_ids)

    def __call__(self, text: str) -> list[int]:
        """llguidance calls it for text that a grammar forces."""
        ids = [] if self._encode is None else self._encode(text)
        if self._special.isdisjoint(ids) and b"".join([self.tokens[one] for one in ids]) == text.encode():
            return ids
        longest: list[int] = self.library.greedy_tokenize(text)
        return longest


def build(tokenizer: Any, converted: str) -> Any:
    """A matcher whose first mask is computed; check ``is_error``."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=_FUEL, step_max_items=_STEP_ITEMS, verbose_errors=False)
    matcher = LLMatcher(tokenizer, converted, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def one_line(error: object) -> str:
    """llguidance's message on one line, without a backtrace."""
    return " ".join(re.split("<backtrace>|<non-verbose/>", str(error))[0].split())[:300]


def depth(source: str, schema: bool) -> int:
    """The longest chain of references between rules, or definitions of a JSON schema; a cycle counts once."""
    try:
        uses = _references(json.loads(source)) if schema else _rules(source)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return 0  # llguidance reports the error
    depths: dict[str, int] = {}
    # A depth-first search with a stack, from the start rule: a cycle is cut where the search enters it.
    stack = [(name, False) for name in (*uses, "#", "root", "start") if name in uses]
    while stack:
        name, visited = stack.pop()
        if visited:
            depths[name] = 1 + max((depths[used] for used in uses[name]), default=0)
        elif name not in depths:
            depths[name] = 0
            stack += [(name, True), *((used, False) for used in uses[name])]
    return max(depths.values(), default=0)


def count_parts(source: str) -> int:
    """Number of rule references, ``?`` and ``*`` in a Lark or GBNF grammar."""
    rules = _LITERAL.sub(" ", source)
    return rules.count("?") + rules.count("*") + sum(map(len, _rules(source).values()))


def _rules(source: str) -> dict[str, list[str]]:
    """By rule of a Lark or GBNF grammar, the rules that it references."""
    parts = _RULE.split(_LITERAL.sub(" ", source))[1:]
    uses: dict[str, list[str]] = {name: [] for name in parts[::2]}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        uses[name] += [used for used in _NAME.findall(body) if used in uses]
    return uses


def _references(schema: Any) -> dict[str, list[str]]:
    """By definition of a JSON schema, and for the schema itself as ``#``, the definitions that it references."""
    definitions = {"#": {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}}
    for key in ("$defs", "definitions"):
        definitions |= {f"#/{key}/{name}": definition for name, definition in schema.get(key, {}).items()}
    references = {name: _REFERENCE.findall(json.dumps(definition)) for name, definition in definitions.items()}
    return {name: [used for used in uses if used in definitions] for name, uses in references.items()}


def _allowed(matcher: Any) -> Iterator[int]:
    for index, bits in enumerate(matcher.compute_bitmask()):
        yield from (8 * index + bit for bit in range(8) if bits >> bit & 1)


def _soon_fails(matcher: Any, stop_ids: list[int]) -> str:
    """The error of an answer that ends a few tokens after the beginning that the grammar forces; empty if there is none."""
    for _ in range(_FORCED):
        tokens = [token for token in itertools.islice(_allowed(matcher), _TRIED) if token not in stop_ids]
        if matcher.is_error():
            return str(matcher.get_error())
        if len(tokens) != 1:
            break
        matcher.consume_token(tokens[0])
    else:
        return ""
    for token in tokens:
        copy = matcher.deep_copy()
        copy.consume_token(token)
        copy.compute_bitmask()
        if copy.is_error():
            return str(copy.get_error())
    return ""


def _compile(tokenizer: Any, source: str, schema: bool) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        if (found := depth(source, schema)) > MAX_DEPTH:
            return {"exceeded": "depth", "found": found}
        if not schema and (found := count_parts(source)) > MAX_PARTS:
            return {"exceeded": "parts", "found": found}
        if schema:
            converted = LLMatcher.grammar_from_json_schema(source, defaults=JSON_SPACE)
        else:
            converted = LLMatcher.grammar_from_lark(any_to_lark(source))
        matcher = build(tokenizer, converted)
        error = matcher.get_error() if matcher.is_error() else _soon_fails(matcher.deep_copy(), tokenizer.eos_tokens)
        if error:
            return {"error": one_line(error)}
        matcher.deep_copy()
        del matcher  # recurses too
    except MemoryError:
        return {"exceeded": "memory"}
    except BaseException as error:  # llguidance's errors and panics have no class of their own
        return {"error": one_line(error)}
    unit = 1 if sys.platform == "darwin" else 1024
    return {"converted": converted, "bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit}


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _run_limited(tokenizer: Any, job: socket.socket, task: Mapping[str, Any]) -> None:
    """Compile under limits. RLIMIT_AS counts address space, and macOS does not enforce it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic's message
    os.nice(5)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_CPU, task["seconds"])
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            at_rest = int(file.read().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, at_rest + task["bytes"])
    replies: list[dict[str, Any]] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: replies.append(_compile(tokenizer, task["source"], task["schema"])))
    thread.start()
    thread.join()
    job.sendall(json.dumps(replies[0]).encode())


def _serve(tokenizer: Any, job: socket.socket) -> None:
    """Compile one grammar in a fork; if a limit kills the fork, send the reply for it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    task = json.loads(b"".join(iter(lambda: job.recv(1 << 16), b"")))
    if not (process := os.fork()):
        _run_limited(tokenizer, job, task)
        return
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        job.sendall(json.dumps({"exceeded": _CAUSES.get(name, "unknown"), "found": name}).encode())


def main(control: socket.socket) -> None:
    """Fork for each socket received through ``control``, until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    tokens, special, stop_ids = json.load(sys.stdin)
    tokenizer = Vocabulary([token.encode("latin-1") for token in tokens], special, stop_ids).library
    while files := socket.recv_fds(control, 1, 1)[1]:
        with socket.socket(fileno=files[0]) as job:
            if not os.fork():
                try:
                    _serve(tokenizer, job)
                finally:
                    os._exit(0)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
