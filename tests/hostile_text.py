"""Chat templates and tokenizers of a stranger who means harm: programs put together at random from what hurts.

Each function takes a random generator; the same seed gives the same text. What they are made of: loops, recursion,
growing strings, lists and numbers, every filter and method that can repeat or search, formats and widths, text that
does not compile; for tokenizers steps that double, patterns that backtrack, templates that repeat, odd vocabularies.
"""

from __future__ import annotations

import base64
from random import Random
from typing import Any

_NUMBERS = ["2", "3", "17", "1000", "99999", "10**6", "10**7", "10**9", "2**63", "10**30", "9**(9**9)", "-1", "0"]
_WORDS = ["'x'", "'ab'", "' '", "'<b>'", "'\\t'", "'\\n'", "''", "'\\x1b[2J'", "'%'", "'{}'", "'f'", "'\\u202e'"]
_FILTERS = [
    "center({n})", "wordwrap({n})", "indent({n})", "replace({s}, {s})", "replace('a', {e})", "join({e})", "list", "sort",
    "unique | list", "reverse | list", "title", "capitalize", "striptags", "escape", "urlize", "urlencode", "pprint",
    "tojson(indent={n})", "tojson", "xmlattr", "batch({n}) | list", "slice({n}) | list", "groupby('x') | list", "sum",
    "map('upper') | list", "map('list') | list", "length", "int(0, 16)", "round({n})", "truncate({n})", "string",
    "upper", "dictsort", "filesizeformat", "wordcount", "first", "last", "min", "max", "trim({s})", "forceescape",
    "select('divisibleby', {n}) | list", "default({e})", "format({e})", "format(*{e})", "items | list", "abs", "float",
    "map('center', {n}) | join", "map(attribute='role') | list", "list | tojson(indent={n})", "safe",
]  # fmt: skip
_METHODS = [
    "ljust({n})", "rjust({n}, {s})", "zfill({n})", "center({n})", "expandtabs({n})", "rfind({e})", "find({e})",
    "count({e})", "split({s})", "rsplit({e})", "splitlines()", "replace({s}, {e})", "join({e})", "format({e})",
    "format({e}, {e})", "translate({e})", "encode()", "title()", "swapcase()", "partition({e})", "index({e})",
    "format_map({e})", "strip({e})", "__class__", "__init__.__globals__", "mro()", "append({e})", "bit_length()",
    "to_bytes({n}, 'big')", "as_integer_ratio()", "keys()", "items()", "isalnum()", "casefold()",
]  # fmt: skip
_FORMATS = [
    "'%{n}d' % 1", "'%*d' % ({n}, 1)", "'%.{n}f' % 1.5", "'{{:>{n}}}'.format('a')", "'{{:{{}}}}'.format(1, {n})",
    "'{{0.__class__}}'.format({e})", "('%s' * 1000) % (({e},) * 1000)", "'%(a){n}s' % {{'a': 1}}", "'%c' % {n}",
]  # fmt: skip


def _expression(random: Random, depth: int = 3) -> str:
    def fill(pattern: str) -> str:
        parts = {"n": random.choice(_NUMBERS), "s": random.choice(_WORDS)}
        return pattern.format(e=_expression(random, depth - 1) if "{e}" in pattern else "", **parts)

    plain = [
        random.choice(_WORDS),
        random.choice(_NUMBERS),
        "messages",
        "messages[0].content",
        "messages[0].role",
        "n.s",
    ]
    if depth <= 0:
        return random.choice(plain)
    inner = _expression(random, depth - 1)
    kind = random.randrange(12)
    if kind < 3:
        return f"({inner}) | {fill(random.choice(_FILTERS))}"
    if kind < 5:
        return f"({inner}).{fill(random.choice(_METHODS))}"
    if kind == 5:
        return f"({inner}) {random.choice(['+', '*', '**', '//', '%', '~', '-', '/', 'in', '=='])} ({fill('{e}')})"
    if kind == 6:
        return f"{random.choice(['[{0}]', '({0},)', '{{0: {0}}}'])}".replace("{0}", inner) + f" * {fill('{n}')}"
    if kind == 7:
        times = random.choice([f"range({fill('{n}')})", inner])
        return f"{times} | list"
    if kind == 8:
        return fill(random.choice(_FORMATS)) if random.random() < 0.7 else f"({inner}) is divisibleby({fill('{n}')})"
    if kind == 9:
        return fill(random.choice(["lipsum({n})", "cycler({e}).next()", "joiner({e})()", "strftime_now({s} * {n})",
                                   "raise_exception({e})", "dict(a={e})", "namespace(a={e}).a", "n.__class__"]))  # fmt: skip
    return f"({random.choice(_WORDS)} * {fill('{n}')})"


def _statement(random: Random, depth: int = 2) -> str:
    inner = _statement(random, depth - 1) if depth else "{{ " + _expression(random) + " }}"
    number = random.choice(["2", "10", "60", "1000", "99999"])
    letter = random.choice("abcd")
    return random.choice(
        [
            "{{ " + _expression(random) + " }}",
            f"{{% for {letter} in range({number}) %}}{inner}{{% endfor %}}",
            f"{{% for {letter} in {_expression(random, 1)} recursive %}}{{{{ loop(messages) }}}}{{% endfor %}}",
            f"{{% macro {letter}(k) %}}{{{{ {letter}(k - 1) if k else '' }}}}{{{{ {letter}(k - 1) if k else 'x' }}}}"
            f"{inner}{{% endmacro %}}{{{{ {letter}({number}) }}}}",
            f"{{% macro {letter}() %}}{inner}{{{{ {letter}() }}}}{{% endmacro %}}{{{{ {letter}() }}}}",
            f"{{% for i in range({number}) %}}{{% set n.s = n.s {random.choice('+~')} n.s %}}{{% endfor %}}{{{{ n.s }}}}",
            f"{{% for i in range({number}) %}}{{% set n.s = [n.s, n.s] %}}{{% endfor %}}{{{{ n.s | tojson }}}}",
            f"{{% for i in range({number}) %}}{{% set n.k = n.k * n.k %}}{{% endfor %}}{{{{ n.k }}}}",
            f"{{% for i in range({number}) %}}{{% set n.s = ({_expression(random, 2)}) %}}{inner}{{% endfor %}}{{{{ n.s }}}}",
            f"{{% set {letter} %}}{inner}{{% endset %}}{{{{ {letter} * {random.choice(_NUMBERS)} }}}}",
            f"{{% filter {random.choice(['upper', 'striptags', 'title', 'wordwrap', 'urlize', 'center(10**8)'])} %}}"
            f"{inner}{{% endfilter %}}",
            f"{{% call(u) {letter}() %}}{inner}{{% endcall %}}",
            f"{{% generation %}}{inner}{{% endgeneration %}}",
            f"{{% if {_expression(random, 2)} %}}{inner}{{% endif %}}",
            "{% " + random.choice(["include", "import", "extends"]) + " '/etc/passwd' %}",
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        ]
    )


def _broken(random: Random, text: str) -> str:
    """Not Jinja any more, or so deep that compilers give up."""
    size = random.choice([100, 3000, 100_000])
    at = random.randrange(len(text) + 1)
    return random.choice(
        [
            text[:at],
            text[:at] + text[at + 1 :],
            text[:at] + random.choice(["%}", "{{", "{%", "}}", "\0", "\x1b[2J", "\u202e", "'", '"', "\\N{", "#}"]) + text[at:],
            "{{ x" + random.choice([".y", "[0]", "()", "|list", "~x", "+1", "**2"]) * size + " }}",
            "{{ " + "(" * size + "1" + ")" * size + " }}",
            "{{ " + "[" * size + "]" * size + " }}",
            "{% if x %}" * size + "{% endif %}" * size,
            "{% for x in y %}" * (size // 30) + "{% endfor %}" * (size // 30),
            "{% block a %}{% endblock %}" * 2,
            "{% macro m(a, a) %}{% endmacro %}{% continue %}",
            "{% for a in b %}{% block c %}{% break %}{% endblock %}{% endfor %}",
            "{{ 1" + "0" * size + " }}",
            "{{ not " + "not " * size + "x }}",
            "{{ " + "-" * size + "1 }}",
            "{# " + "x" * size * 10,
            "{% set " + "a," * size + "b = messages %}",
        ]
    )  # fmt: skip


def hostile_template(random: Random) -> str:
    start = "{% set n = namespace(s=" + random.choice(_WORDS) + ", k=" + random.choice(["9", "3.5", "2**63"]) + ") %}"
    text = start + "".join(_statement(random) for _ in range(random.choice([1, 1, 2, 3])))
    return _broken(random, text) if random.random() < 0.15 else text


_PATTERNS = [
    "(a+)+$", "(x+x+)+y", "(.*)*b", "([a-z]+)*[0-9]", "(?=(a+))a*b\\1", "(a|aa)+$", "(", "(?<=a{1,1000}){1000}",
    "((a{1,100}){1,100}){1,100}", "\\p{Nope}", "(x*)*y", "^(([a-z])+.)+[A-Z]([a-z])+$", "\\s+(?!\\S)|\\s+", "x*", "",
    "(?:.|\\n)*?(?:.|\\n)*?(?:.|\\n)*?(?:.|\\n)*?!", "[^x]*x[^y]*y[^z]*z", "(?i:'s|'t)|\\p{L}+| ?\\p{N}+|\\s+",
    "(\\w+\\s?)*\\1$", "\\X", "(?<!a)b|" * 2000 + "c", "a{99999}", "(?:a?){50}a{50}",
]  # fmt: skip


def _replace(random: Random, *, doubling: bool | None = None) -> dict[str, Any]:
    doubling = random.random() < 0.6 if doubling is None else doubling
    letter = random.choice(["1", "a", " ", "e", "\u2581"])
    pattern = {"String": letter} if doubling or random.random() < 0.3 else {"Regex": random.choice(_PATTERNS)}
    content = letter * 2 if doubling else random.choice(["", "a", "x" * 100_000, "\u2581"])
    return {"type": "Replace", "pattern": pattern, "content": content}


def _normalizer(random: Random) -> dict[str, Any]:
    kind = random.randrange(6)
    if kind == 0:
        return {"type": random.choice(["NFC", "NFKD", "NFKC", "Nmt", "StripAccents", "Lowercase", "ByteLevel", "Evil"])}
    if kind == 1:
        return {"type": "Prepend", "prepend": random.choice(["", "1", "\u2581", "a" * 10, "x" * 1_000_000])}
    if kind == 2:
        garbage = random.choice([b"", b"\0" * 64, random.randbytes(400), b"\xff\xff\xff\x7f" + random.randbytes(99)])
        return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(garbage).decode()}
    if kind == 3:
        return {"type": "Strip", "strip_left": True, "strip_right": random.random() < 0.5}
    return _replace(random)


def _pre_tokenizer(random: Random) -> dict[str, Any]:
    kind = random.randrange(5)
    if kind < 3:
        behavior = random.choice(["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"])
        pattern = (
            {"Regex": random.choice(_PATTERNS)} if kind else {"String": random.choice(["", " ", "a", "x" * 10_000])}
        )
        return {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": random.random() < 0.5}
    if kind == 3:
        return {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": random.random() < 0.5}
    replacement = random.choice(["\u2581", "", "xx"])
    return random.choice(
        [
            {"type": "Metaspace", "replacement": replacement, "prepend_scheme": "always", "split": True},
            {"type": "Digits", "individual_digits": True},
            {"type": random.choice(["Whitespace", "UnicodeScripts", "BertPreTokenizer", "Evil"])},
            {"type": "FixedLength", "length": random.choice([0, 1, 2**63])},
            {"type": "CharDelimiterSplit", "delimiter": random.choice(["a", "", "ab"])},
        ]
    )


def _decoder(random: Random) -> dict[str, Any]:
    return random.choice(
        [
            _replace(random),
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            {"type": "Strip", "content": random.choice(["a", " ", "", "ab"]), "start": random.choice([0, 1, 2**62]),
             "stop": random.choice([0, 1, 5, 2**62])},
            {"type": "WordPiece", "prefix": random.choice(["", "##", "x" * 100_000]), "cleanup": True},
            {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
            {"type": "BPEDecoder", "suffix": random.choice(["", "a", "x" * 1000])},
            {"type": random.choice(["Fuse", "ByteFallback", "Evil"])},
        ]
    )  # fmt: skip


def _post_processor(random: Random) -> dict[str, Any]:
    single = [{"Sequence": {"id": "A", "type_id": 0}}] * random.choice([0, 1, 2, 2, 1000])
    single += [{"SpecialToken": {"id": random.choice(["<s>", "nothing"]), "type_id": 0}}] * random.choice(
        [0, 1, 100_000]
    )
    count = random.choice([0, 1, 3, 1_000_000])
    token = {"id": "<s>", "ids": [1] * count, "tokens": ["<s>"] * random.choice([count, 1])}
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {"<s>": token}}
    bert = {"type": "BertProcessing", "sep": ["</s>", 2**32 - 1], "cls": ["<s>", 1]}
    return random.choice([template, template, template, bert])


def _sequence(random: Random, key: str, make: Any) -> dict[str, Any]:
    """One part, many, or sequences of sequences."""
    part: dict[str, Any] = make(random)
    if random.random() < 0.7:
        # A thousand parts of a megabyte would only keep whoever writes them busy.
        count = min(random.choice([1, 2, 5, 30, 30, 1000]), max(1, 8_000_000 // len(str(part))))
        same = random.random() < 0.6
        part = {"type": "Sequence", key: [part] * count if same else [make(random) for _ in range(min(count, 30))]}
    size = len(str(part))
    for _ in range(random.choice([0, 0, 0, 1, 3, 40])):
        times = random.choice([1, 2, 2])
        if size < 100_000:
            part, size = {"type": "Sequence", key: [part] * times}, size * times
    return part


def _model(random: Random, model: dict[str, Any]) -> dict[str, Any]:
    vocab, letters = model["vocab"], "abcdefghij"
    words = [
        "".join(random.choices(letters, k=random.choice([1, 3, 8]))) for _ in range(random.choice([3, 1000, 30_000]))
    ]
    return random.choice(
        [
            model | {"continuing_subword_prefix": random.choice(["##", "x" * 100_000, ""])},
            model | {"end_of_word_suffix": random.choice(["</w>", "x" * 100_000])},
            model | {"dropout": random.choice([0.0, 1.0, 2.0, -1, 0.5])},
            model | {"unk_token": random.choice(["nothing", "a"]), "fuse_unk": True, "byte_fallback": True},
            model | {"merges": random.choice([model["merges"] * 5, [["a", "b"]], ["a b c"], [["a", "a"]] * 9999, []])},
            model | {"vocab": vocab | {random.choice(["x" * 5_000_000, "", "a"]): random.choice([300, 2**32 - 1, 2**31, -1])}},
            model | {"type": random.choice(["Unigram", "WordLevel", "WordPiece", "Evil", None])},
            {"type": "Unigram", "unk_id": random.choice([0, None, 10**9]), "byte_fallback": random.random() < 0.5,
             "vocab": [[word, random.choice([0.0, -1.0, -1e300, 1e300])] for word in ["<unk>", *words]]},
            {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *([chr(97 + k) * 300_000, -1.0] for k in range(9))]},
            {"type": "WordLevel", "vocab": {word: index for index, word in enumerate(["<unk>", *words])}, "unk_token": "<unk>"},
            {"type": "WordPiece", "vocab": {word: index for index, word in enumerate(["<unk>", *words])}, "unk_token": "<unk>",
             "continuing_subword_prefix": random.choice(["##", "x" * 100_000]),
             "max_input_chars_per_word": random.choice([100, 2**62, 0])},
        ]
    )  # fmt: skip


def _added(random: Random) -> list[dict[str, Any]]:
    flags = {name: random.random() < 0.4 for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    kind = random.randrange(4)
    if kind == 0:
        contents = [random.choice(["", "a", " ", "\n", "\u2581", "x" * 1_000_000, "\x1b[2J"])]
    elif kind == 1:
        contents = ["a" * size for size in range(1, random.choice([10, 3000]))]
    elif kind == 2:
        contents = [f"<|{index}|>" for index in range(random.choice([1000, 100_000]))]
    else:
        contents = ["hi", "e", "def", "1"]
    first = random.choice([0, 300, 10_000, 2**31, 2**32 - 5])
    return [{"id": first + index, "content": content} | flags for index, content in enumerate(contents)]


def hostile_tokenizer(random: Random, document: dict[str, Any]) -> str:
    """Change a tokenizer's parsed file; returns which parts."""
    kinds = random.sample(
        ["normalizer", "pre_tokenizer", "decoder", "post_processor", "model", "added_tokens", "deep"],
        k=random.choice([1, 1, 1, 2, 3]),
    )
    for kind in kinds:
        if kind == "normalizer":
            document[kind] = _sequence(random, "normalizers", _normalizer)
        elif kind == "pre_tokenizer":
            document[kind] = _sequence(random, "pretokenizers", _pre_tokenizer)
        elif kind == "decoder":
            document[kind] = _sequence(random, "decoders", _decoder)
        elif kind == "post_processor":
            document[kind] = _sequence(random, "processors", _post_processor)
        elif kind == "model":
            document[kind] = _model(random, document["model"])
        elif kind == "added_tokens":
            document[kind] = document["added_tokens"] + _added(random)
        else:
            deep: Any = None
            for _ in range(random.choice([20, 100, 450])):
                deep = [deep] if random.random() < 0.5 else {"type": "Sequence", "normalizers": [deep]}
            document[random.choice(["normalizer", "padding", "version", "more"])] = deep
    return "+".join(kinds)
