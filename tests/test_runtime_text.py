"""Text at the runtime's edge: tokenizer, streaming, stop strings, chat templates as transformers renders them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from wisparse.formats import sandbox
from wisparse.formats.errors import BundleError, UsageError
from wisparse.formats.sandbox import ChatTemplate
from wisparse.runtime.text.text import Text
from wisparse.runtime.text.tokenizer import Detokenizer, StopStrings

ROOT = Path(__file__).resolve().parent.parent


def byte_level() -> Tokenizer:
    return Tokenizer.from_file(str(ROOT / "examples" / "pycode-llama-6m" / "tokenizer.json"))


def byte_fallback() -> Tokenizer:
    """Llama 2's kind: words with a leading space, bytes where no word fits, the first space dropped."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁the", "▁cat", "s", "▁"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(lambda some: tokenizer.decode(list(some)))
    return [*(detokenizer.add(token) for token in ids), detokenizer.finish()]


BYTE_LEVEL = byte_level()


@given(st.text(max_size=60))
def test_pieces_join_to_the_text_and_split_no_character(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    pieces = pieces_of(BYTE_LEVEL, ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.lists(st.integers(0, 8191), max_size=60))
def test_any_ids_join_to_what_decoding_them_at_once_gives(ids: list[int]) -> None:
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


def test_text_is_not_held_longer_than_a_character_needs() -> None:
    ids = BYTE_LEVEL.encode("añb€c𝄞d").ids
    pieces = pieces_of(BYTE_LEVEL, ids)
    assert pieces[0] == "a"
    assert pieces[-1] == ""
    assert len([piece for piece in pieces if piece]) >= 7


@pytest.mark.parametrize("token", ["</s>", "ÿ"], ids=["special tokens", "wrong bytes"])
@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_ids_that_become_no_text_take_no_more_time_the_more_they_are(kind: Callable[[], Tokenizer], token: str) -> None:
    tokenizer = kind()
    tokenizer.add_special_tokens(["</s>"])
    if kind is byte_level:
        wrong, words = tokenizer.token_to_id(token), tokenizer.encode("the cats").ids
    else:  # no bytes among the words: a run of bytes is decoded as one
        wrong = tokenizer.token_to_id(token.replace("ÿ", "<0xFF>"))
        words = [tokenizer.token_to_id(piece) for piece in ("▁the", "▁cat", "s")]
    ids = [*words, *[wrong] * 2000, *words]
    decoded = []

    def decode(some: Sequence[int]) -> str:
        decoded.append(len(some))
        return tokenizer.decode(list(some))

    detokenizer = Detokenizer(decode)
    pieces = [detokenizer.add(token) for token in ids]
    assert "".join([*pieces, detokenizer.finish()]) == tokenizer.decode(ids)
    assert pieces[-1], "the last token's text came late"
    assert sum(decoded) < 150 * len(ids)


@given(
    st.lists(
        st.tuples(st.sampled_from(["\u00ff", "\u00f0", "\u00e2", "a", "\u0120the", "</s>"]), st.integers(1, 90)),
        max_size=8,
    )
)
def test_long_runs_join_to_what_decoding_them_at_once_gives(runs: list[tuple[str, int]]) -> None:
    tokenizer = BYTE_LEVEL
    ids = [tokenizer.token_to_id(token) or 0 for token, count in runs for _ in range(count)]
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_endless_wrong_bytes_come_out_all_the_same() -> None:
    # 0xFF begins no character: a model that repeats it must not stall the stream for ever.
    token = BYTE_LEVEL.token_to_id("ÿ")
    pieces = pieces_of(BYTE_LEVEL, [token] * 50)
    assert "".join(pieces) == "\ufffd" * 50
    assert "".join(pieces[:20])


def test_byte_fallback_and_leading_spaces() -> None:
    tokenizer = byte_fallback()
    euro = [1 + byte for byte in "€".encode()]
    ids = [257, 258, 259, 260, *euro, 258]
    pieces = pieces_of(tokenizer, ids)
    assert pieces == ["the", " cat", "s", " ", "", "", "€", " cat", ""]
    assert "".join(pieces) == tokenizer.decode(ids)


@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
@settings(max_examples=300)
def test_stop_strings_across_any_borders(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    matcher = StopStrings(stops)
    out = ""
    for start, end in itertools.pairwise(borders):
        out += matcher.add(text[start:end])
        # Nothing of a stop string was ever shown.
        assert not any(stop in out for stop in stops)
    out += matcher.finish()
    # Wherever the borders were, the result is that of the whole text.
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    assert matcher.found == bool(ends)
    assert out == (text[: min(ends)[1]] if ends else text)


LLAMA3 = """{{ bos_token }}{% for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
MISTRAL = """{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""
WORK = """{% macro turn(m, last) %}{{ '<' ~ m.role ~ '>' + m.content | replace('x', 'yy') | indent(2) }}{% endmacro %}
{% for m in messages %}{% set ns = namespace(n=loop.index * 2) %}{{ turn(m, loop.last) }}{{ ns.n % 2 }}{{ '%03d' % 7 }}
{{ ', '.join([m.role, 'b']) }} {{ m.keys() | list | join('-') }} {{ m.content[:3] | upper | center(9) }} {{ 'x' * 3 }}
{%- for line in m.content.split('\\n') recursive %}{{ line ~ 1 ~ none ~ true }}{% endfor %}{% endfor %}
{% filter upper %}text{% endfilter %}{{ messages | map(attribute='role') | list | tojson }}{{ 7 // 2 ** 2 }}"""
TRICKS = """{% set ns = namespace(found=false) %}
{% for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}{% break %}{% endif %}
    {{ message | tojson }} {{ message.get('x', 'none') }}
    {{ {'b': '<ü>', 'a': [1, 2]} | tojson(indent=2) }}
{% endfor %}
{{ strftime_now('%Y') | length }} {{ tools is none }} {{ enable_thinking | default('unset') }} {{ unknown }}
{{ messages[::-1][0].content.split('x')[-1] | upper }}"""
CONVERSATION = [
    {"role": "user", "content": " <a> & 'b'\n"},
    {"role": "assistant", "content": "answer"},
    {"role": "user", "content": "ünï x last"},
]


@pytest.mark.parametrize("template", [LLAMA3, MISTRAL, TRICKS, WORK])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_in_transformers(template: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        conversations=[CONVERSATION],
        chat_template=template,
        add_generation_prompt=add_generation_prompt,
        tools=None,
        documents=None,
        **tokens,
    )
    found = ChatTemplate(template, tokens).render(CONVERSATION, add_generation_prompt=add_generation_prompt)
    assert found == expected[0]


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(UsageError, match="refuses these messages: Conversation roles must alternate"):
        ChatTemplate(MISTRAL, {}).render([{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 'a' * 99999999999 }}",
        "{{ [0] * 99999999999 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ (messages | length) * 9 ** (9 ** 9) }}",
        "{{ (['x' * 10 ** 7] * 1000) | string }}",
        "{{ (messages[0].role[0] * 10 ** 7).rfind('ux' + 'u' * 5000000) }}",
        "{{ ('f' * 2 ** 20) | int(0, 16) // ('e' * 2 ** 19) | int(0, 16) }}",
        "{{ ('f' * 2 ** 20) | int(0, 16) is divisibleby(('e' * 2 ** 19) | int(0, 16)) }}",
        "{{ (messages[0].role ~ ' <a ' * 10 ** 6) | striptags }}",
        "{{ (messages[0].role * 10 ** 8) | title }}",
        "{{ '%99999999999d' % 1 }}",
        "{% for i in range(99999999) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ undefined_thing.attribute }}",
        "{% for i in range(99999) %}{{ 'aaaaaaaaaa' * 1000 }}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=9) %}{% for i in range(60) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s | replace('a', 'aa') %}{% endfor %}",
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s.replace('a', 'aa') %}{% endfor %}",
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s | list | join('aa') %}{% endfor %}",
        "{{ 'a'.center(99999999999) }}",
        "{{ 'a' | center(99999999999) }}",
        "{{ messages | tojson(indent=99999999999) }}",
        "{{ '{:>99999999999}'.format('a') }}",
        "{{ '%*d' % (99999999999, 1) }}",
        "{{ '%99999999999d' | format(1) }}",
        "{{ 'a\tb'.expandtabs(99999999999) }}",
        "{{ lipsum(99999999) }}",
    ],
)
def test_a_hostile_template_ends_in_one_sentence(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 0.5)
    # Jinja works out what is constant while it compiles.
    with pytest.raises(BundleError, match=r"the chat template (fails|is no valid Jinja)") as caught:
        ChatTemplate(source, {}).render(CONVERSATION)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{% for a in b %}{% continue %}{% block c %}{% continue %}{% endblock %}{% endfor %}",  # SyntaxError
        "{{ x" + ".y" * 300_000 + " }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ 0x" + "f" * 10 + " }}{{ '\\N{' }}",
        "{% macro m(a, a) %}{% endmacro %}",
        "{{ 1" + "0" * 9999 + " }}",
        "{% set a.b.c = 1 %}",
        "{% for a in " * 200 + "b" + " %}{% endfor %}" * 200,
    ],
)
def test_a_template_that_does_not_compile(source: str) -> None:
    with pytest.raises(BundleError, match="no valid Jinja"):
        ChatTemplate(source, {})


def make_text(template: str | None = None, config: dict[str, Any] | None = None, vocab_size: int = 8192) -> Text:
    data = (ROOT / "examples" / "pycode-llama-6m" / "tokenizer.json").read_bytes()
    return Text(data, {"eos_token": "<|endoftext|>", **(config or {})}, template, vocab_size)


def test_the_template_is_found_where_it_may_stand() -> None:
    messages = [{"role": "user", "content": "x"}]
    named = [{"name": "tool_use", "template": "no"}, {"name": [7]}, {"name": "default", "template": "list"}, 7]
    assert make_text("file").render(messages) == "file"
    assert make_text("file", {"chat_template": "config"}).render(messages) == "file"
    assert make_text(None, {"chat_template": "config"}).render(messages) == "config"
    assert make_text(None, {"chat_template": named}).render(messages) == "list"
    several = make_text(None, {"chat_template": named})
    assert several.render(messages, tools=[{}]) == several.template_source == "no"
    assert make_text(None, {"chat_template": "config"}).render(messages, tools=[{}]) == "config"
    with pytest.raises(UsageError, match="no chat template"):
        make_text().render(messages)
    with pytest.raises(BundleError, match="chat_template: expected a text"):
        make_text(None, {"chat_template": 5})


def test_special_tokens_of_old_and_new_files_reach_the_template() -> None:
    text = make_text("{{ bos_token }}{{ eos_token }}", {"bos_token": {"content": "<s>", "lstrip": False}})
    assert text.render([]) == "<s><|endoftext|>"


def test_which_templates_are_for_chat() -> None:
    stops = frozenset({0})
    ends = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|endoftext|>{% endif %}"
    )
    assert make_text(ends + "\n{% endfor %}").template_ends_turns(stops)
    # Every turn closed by the same token counts as well; a token that generation does not stop at does not.
    assert make_text("{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}").template_ends_turns(stops)
    assert not make_text(ends + "{% endfor %}").template_ends_turns(frozenset({5}))
    assert not make_text((ROOT / "examples/pycode-llama-6m/chat_template.jinja").read_text()).template_ends_turns(stops)
    assert not make_text().template_ends_turns(stops)


def test_encode_leaves_the_beginning_to_the_post_processor() -> None:
    from tokenizers.processors import TemplateProcessing

    plain = make_text()
    assert plain.encode(">>> 1") == BYTE_LEVEL.encode(">>> 1").ids
    tokenizer = byte_level()
    tokenizer.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 1)])
    with_start = Text(tokenizer.to_str().encode(), {}, None, 8192)
    assert with_start.encode(">>> 1") == [1, *plain.encode(">>> 1")]
    assert with_start.encode(">>> 1", add_special_tokens=False) == plain.encode(">>> 1")


def test_special_tokens_are_left_out_of_text() -> None:
    text = make_text()
    assert text.decode([0, *text.encode("x"), 3]) == "x"
    assert text.is_special("<|user|>")
    assert not text.is_special("x")
    assert not text.is_special("nowhere to be found")


def test_a_saved_truncation_is_not_applied() -> None:
    document = json.loads((ROOT / "examples/pycode-llama-6m/tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    assert len(Text(json.dumps(document).encode(), {}, None, 8192).encode("a b c d e f g h")) > 3


def test_bad_tokenizers() -> None:
    for data in (b"", b"{}", b"\xff\xfe", b'{"version": "1.0", "model": {"type": "BPE"}}'):
        with pytest.raises(BundleError, match=r"tokenizer\.json: (not a tokenizer|expected JSON|expected UTF-8)"):
            Text(data, {}, None, 8192)
    document = json.loads(byte_level().to_str())
    document["model"]["merges"].append(["a", "no such"])
    with pytest.raises(BundleError, match=r"tokenizer\.json: not a tokenizer.*out of vocabulary"):
        Text(json.dumps(document).encode(), {}, None, 8192)
    with pytest.raises(BundleError, match="vocabulary has 10"):
        make_text(vocab_size=10).encode("hello world")
    with pytest.raises(UsageError, match="surrogate"):
        make_text().encode("\ud800")


def panicking(kind: str) -> bytes:
    """The example's tokenizer, changed so that the library's Rust part would panic while it reads or encodes."""
    document = json.loads(byte_level().to_str())
    if kind == "merges":
        document["model"]["continuing_subword_prefix"] = "##"
    elif kind == "template":
        document["post_processor"] = {
            "type": "Sequence",
            "processors": [
                {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                    "special_tokens": {},
                }
            ],
        }
    else:
        pattern = {"empty pattern": {"String": ""}, "empty match": {"Regex": "x*"}}[kind]
        replace = {"type": "Replace", "pattern": pattern, "content": "\u2581"}
        document["normalizer"] = {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, replace],
        }
    return json.dumps(document).encode()


@pytest.mark.parametrize("kind", ["merges", "template", "empty pattern", "empty match"])
def test_what_would_panic_is_refused_when_it_is_loaded(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BundleError, match=r"tokenizer\.json: (not a tokenizer|.* cannot run it)"):
        Text(panicking(kind), {}, None, 8192)
    assert capfd.readouterr().err == ""


def test_what_fails_only_when_it_runs_is_an_error_too() -> None:
    document = json.loads(byte_fallback().to_str())
    document["model"] |= {"unk_token": "<nothing>", "byte_fallback": False}
    text = Text(json.dumps(document).encode(), {}, None, 8192)
    with pytest.raises(BundleError, match="Unk token `<nothing>` not found"):
        text.encode("the dog")
