"""Tokenizer, streaming, stop strings, and chat templates as transformers renders them."""

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_bundle import write_tiny_bundle, write_tiny_model
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from tokenizers.processors import TemplateProcessing
from tool_templates import PUBLISHED

from wisparse import BundleError, ContextLengthError, UsageError, WisparseError, load
from wisparse.formats import chat_template
from wisparse.formats.bundle import Bundle
from wisparse.formats.chat_template import ChatTemplate
from wisparse.runtime.generation.logits import TokenScore
from wisparse.runtime.generation.request import Chunk
from wisparse.runtime.protocol.formatter import ChatFormatter, CompletionFormatter, Context
from wisparse.runtime.protocol.requests import ChatRequest, CompletionRequest
from wisparse.runtime.tokenizer import StopStrings, Tokenizer, check_tokenizer

MODEL = Path(__file__).resolve().parent.parent / "examples" / "pycode-llama-6m"
DATA = (MODEL / "tokenizer.json").read_bytes()
BYTE_LEVEL = Library.from_buffer(DATA)


def sentencepiece(kind: str) -> Library:
    """A vocabulary of pieces with \u2581 for a space, and bytes where no piece fits, as Gemma, Llama 2 and Mistral have it."""
    pieces = ["\u2581the", "\u2581cat", "s", "\u2581", "\u2581\u2581", "\u00e9", "</s>"]
    vocab = {piece: i for i, piece in enumerate(["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces])}
    tokenizer = Library(models.BPE(vocab=vocab, merges=[], byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    elif kind == "llama":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    if kind != "gemma":
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken("</s>", normalized=False)])
    return tokenizer


DECODERS = {"byte level": BYTE_LEVEL, **{kind: sentencepiece(kind) for kind in ("gemma", "llama", "mistral")}}


def chunks_of(tokenizer: Library, ids: list[int], visible: frozenset[int] = frozenset()) -> list[str]:
    detokenizer = Tokenizer(tokenizer.to_str().encode(), {}, None, 8192).detokenizer(visible)
    return [*(detokenizer.add(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", DECODERS)
def test_any_ids_give_the_same_text_streamed_and_at_once(kind: str) -> None:
    library, random = DECODERS[kind], Random(0)
    text, equal = Tokenizer(library.to_str().encode(), {}, None, 8192), 0
    for number in range(3000):
        ids = [random.randrange(library.get_vocab_size()) for _ in range(random.randrange(1, 20))]
        if number % 3:  # characters of up to four bytes, alone or between tokens
            spelled = library.encode("".join(random.choices("é€𝄞 the", k=6)), add_special_tokens=False).ids
            ids = spelled if number % 3 == 1 else ids[:3] + spelled + ids[3:]
        detokenizer = text.detokenizer()
        chunks = [*map(detokenizer.add, ids), detokenizer.finish()]
        whole, known = text.decode(ids), library.decode(ids)
        assert "".join(chunks) == whole
        # The library writes as many replacement characters as a run of byte tokens with a wrong byte has bytes.
        assert whole == known or (kind != "byte level" and "\ufffd" in known)
        ordinary = (token for token in ids if token not in text.special_ids.values())
        assert b"".join(map(text.token_bytes, ordinary)).decode(errors="replace").endswith(whole)
        equal += whole == known
    assert equal >= 1000


def test_a_byte_that_begins_no_character_is_one_replacement_character() -> None:
    for kind, library in DECODERS.items():
        bytes_of = [library.token_to_id(token) for token in ("ð", "Ł", "ĺ", "Ģ")] if kind == "byte level" else None
        smile = bytes_of or [1 + byte for byte in "😀".encode()]
        the = [library.token_to_id("Ġthe" if kind == "byte level" else "▁the")]
        text = Tokenizer(library.to_str().encode(), {}, None, 8192)
        for ids, expected in (
            ([*smile, smile[0], *the], "😀\ufffd the"), ([*smile, smile[1], *smile], "😀\ufffd😀"), (smile[:3], "\ufffd"),
        ):  # fmt: skip
            detokenizer, case = text.detokenizer(), (kind, ids)
            assert "".join(map(detokenizer.add, ids)) + detokenizer.finish() == text.decode(ids) == expected, case


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_parts_of_characters(kind: str, stream: bool) -> None:
    library = DECODERS[kind]
    text = Tokenizer(library.to_str().encode(), {}, None, 8192)
    (name, end), *_ = text.special_ids.items()
    written, prompt = " the🦜 the naïve 東京 the", "é🎉 the"
    encode = partial(library.encode, add_special_tokens=False)
    ids = [*encode(written).ids, *encode("🦜").ids[:-1]]
    asked = [end, *encode(prompt).ids]  # a token before the prompt that is not in its text
    detokenizer = text.detokenizer()
    scores = [TokenScore(token, -1.0, ((token, -1.0), (end, -2.0))) for token in ids]
    chunks = [Chunk(detokenizer.add(score.token_id), score.token_id, score=score) for score in scores]
    chunks[-1] = replace(chunks[-1], text=chunks[-1].text + detokenizer.finish(), finish_reason="length")
    chunks[0] = replace(chunks[0], prompt_scores=[TokenScore(token, -1.0) for token in asked[1:]])
    pieces = [[chunk] for chunk in chunks] if stream else [chunks]
    answer = "".join(chunk.text for chunk in chunks)

    context = Context("m", text, 1, len(asked), [(prompt, end)])
    request = CompletionRequest(model="m", prompt="", echo=True, logprobs=2)
    completion = CompletionFormatter(request, context)
    parts = [choice for some in pieces for choice in completion.choices(0, some, stream)]
    assert "".join(part["text"] for part in parts) == prompt + answer
    offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
    whole = prompt + answer
    assert (len(offsets), offsets[:2]) == (len(asked) + len(ids), [0, 0])
    for some, base, own in ((asked[1:], 0, prompt), (ids, len(prompt), answer)):
        begins = offsets[1 : len(asked)] if own is prompt else offsets[len(asked) :]
        for number, begin in enumerate(begins):  # the text up to a token's character, and the bytes up to the token
            before = b"".join(map(text.token_bytes, some[:number])).decode(errors="ignore")
            assert whole[base:begin] in (before, before[1:]), (number, begin)

    asking = ChatRequest(model="m", messages=[{"role": "user", "content": "a"}], logprobs=True, top_logprobs=2)
    chat = ChatFormatter(asking, replace(context, echo=()))
    told = [choice["logprobs"] or {} for some in pieces for choice in chat.choices(0, some, stream)]
    entries = [entry for one in told for entry in one.get("content", ())]
    assert bytes(byte for entry in entries for byte in entry["bytes"]).decode(errors="replace").endswith(answer)
    assert [entry["top_logprobs"][1]["token"] for entry in entries] == [name] * len(ids)


REPLACE = decoders.Replace("\u2581", " ")
BYTE_LEVEL_ENCODERS = {
    "tekken": (decoders.Sequence([REPLACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]), None),
    "metaspace": (decoders.Metaspace(), None),
    "none": (None, None),
    "normalizer": (decoders.Sequence([REPLACE, decoders.Fuse()]), normalizers.ByteLevel()),
    "own": (decoders.ByteLevel(), None),
}


@pytest.mark.parametrize("kind", BYTE_LEVEL_ENCODERS)
def test_a_byte_level_vocabulary_is_decoded_as_one_whatever_the_decoder(kind: str) -> None:
    library = Library.from_buffer(DATA)
    library.decoder, normalizer = BYTE_LEVEL_ENCODERS[kind]
    if normalizer is not None:
        library.normalizer, library.pre_tokenizer = normalizer, None
    library.add_tokens(["café", "    "])
    text = Tokenizer(library.to_str().encode(), {}, None, 8200)
    written = "The cat sat\n\tin a café, naïve 東京"
    ids = text.encode(written, add_special_tokens=False)
    chunks = chunks_of(library, ids)
    assert "".join(chunks) == text.decode(ids) == written
    assert library.token_to_id("café") in ids  # the library decodes this added token as bytes
    assert len(chunks) > len("".join(chunks).split())


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.Metaspace(), decoders.CTC()])
def test_decoders_that_need_the_neighbours_are_the_librarys(decoder: Any) -> None:
    words = ["[UNK]", "the", "##re", ".", "\u2581the", "\u2581\u2581", "é", "|", "[SEP]"]
    library = Library(models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]"))
    library.decoder, random = decoder, Random(1)
    library.add_special_tokens(["[SEP]"])
    text = Tokenizer(library.to_str().encode(), {}, None, 100)
    for _ in range(300):
        ids = [random.randrange(len(words)) for _ in range(12)]
        assert "".join(chunks_of(library, ids)) == text.decode(ids) == library.decode(ids)


def test_a_library_stream_that_cannot_go_on_begins_again() -> None:
    """A decoder that rewrites the text before a token: the stream goes on from there."""
    library = sentencepiece("gemma")
    library.decoder = decoders.Sequence([decoders.Replace("\u2581\u2581", "  "), REPLACE, decoders.ByteFallback()])
    broken = [1 + 0x64, 1 + 0xDA, 1 + 0x20]
    stream = decoders.DecodeStream()
    with pytest.raises(Exception, match="prefix"):
        [stream.step(library, token) for token in (*broken, 258)]
    assert "".join(chunks_of(library, [257, *broken, 258])).endswith(" cat")


RUNS = st.tuples(st.sampled_from(["\u00ff", "\u00f0", "\u00e2", "a", "\u0120the", "</s>"]), st.integers(1, 90))


@given(st.text(max_size=60), st.lists(st.integers(0, 8191), max_size=60), st.lists(RUNS, max_size=8))
def test_chunks_join_to_the_text_and_split_no_character(text: str, ids: list[int], runs: list[tuple[str, int]]) -> None:
    long = [BYTE_LEVEL.token_to_id(token) or 0 for token, count in runs for _ in range(count)]
    for some in (ids, long, BYTE_LEVEL.encode(text).ids):
        chunks = chunks_of(BYTE_LEVEL, some)
        assert "".join(chunks) == BYTE_LEVEL.decode(some)
    assert "\ufffd" in text or not any("\ufffd" in chunk for chunk in chunks)


def test_text_comes_as_soon_as_it_can() -> None:
    chunks = chunks_of(BYTE_LEVEL, BYTE_LEVEL.encode("añb€c𝄞d").ids)
    assert (chunks[0], chunks[-1]) == ("a", "")
    assert len([chunk for chunk in chunks if chunk]) >= 7
    token = BYTE_LEVEL.token_to_id("ÿ")  # 0xFF begins no character
    assert "".join(chunks_of(BYTE_LEVEL, [token] * 50)) == "\ufffd" * 50
    assert chunks_of(BYTE_LEVEL, [token, *BYTE_LEVEL.encode("a").ids])[1:] == ["a", ""]
    tokenizer = sentencepiece("llama")
    euro = [1 + byte for byte in "€".encode()]
    ids = [257, 258, 259, 260, *euro, 258]
    chunks = chunks_of(tokenizer, ids)
    assert chunks == ["the", " cat", "s", " ", "", "", "€", " cat", ""]
    assert "".join(chunks) == tokenizer.decode(ids)


@given(
    text=st.text("ab\n", max_size=30),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
@settings(max_examples=150)
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
    end, start = min(ends, default=(0, len(text)))
    assert (matcher.found, out) == (text[start:end] if ends else None, text[:start])


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
MISTRAL = PUBLISHED["mistral"][0]
CONVERSATION = [
    {"role": "user", "content": " <a> & 'b'\n"},
    {"role": "assistant", "content": "answer"},
    {"role": "user", "content": "ünï x last"},
]


@pytest.mark.parametrize("template", [PUBLISHED["llama-3.1"][0], MISTRAL, TRICKS, WORK])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_in_transformers(template: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    prompt = {"add_generation_prompt": add_generation_prompt}
    expected, _ = render_jinja_template([CONVERSATION], chat_template=template, **prompt, **tokens)
    assert ChatTemplate(template, tokens).render(CONVERSATION, **prompt) == expected[0]


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


BAD_TEMPLATES: dict[str, tuple[str, ...]] = {
    "fails": (
        "{{ 1 / 0 }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}", "{{ undefined_thing.attribute }}", "{% include '/etc/passwd' %}",
        "{% for i in range(99999999) %}{% endfor %}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(99999) %}{{ 'aaaaaaaaaa' * 1000 }}{% endfor %}",
    ),
    "takes more than 2 seconds": (ENDLESS, "{{ 9 ** (9 ** 9) }}"),  # the second while it is compiled
    "(crashes, or needs more than 1,024 MB of memory|fails)":
        ("{{ (messages | length) * 10**10 * 'x' }}", "{{ 'a'.center(10**10) }}", "{{ '%9999999999d' % 1 }}",
         "{{ '{:9999999999d}'.format(1) }}", "{{ 'x'.ljust(10**10) }}", "{{ '\t'.expandtabs(10**10) }}"),
    "has 2,000,000 characters, expected at most": ("x" * 2_000_000,),
    "is no valid Jinja": (
        "{% for %}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{% macro m(a, a) %}{% endmacro %}",
        "{{ 1" + "0" * 9999 + " }}",
        # A SyntaxError of Python's.
        "{% for a in b %}{% continue %}{% block c %}{% continue %}{% endblock %}{% endfor %}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", BAD_TEMPLATES)
def test_a_bad_template_is_refused_in_one_sentence(words: str) -> None:
    for source in BAD_TEMPLATES[words]:
        with pytest.raises(BundleError, match=f"the chat template {words}") as caught:
            ChatTemplate(source, {}).render(CONVERSATION)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500


def test_loading_a_bundle_tries_its_templates(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "chat_template.jinja").unlink(missing_ok=True)
    named = [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": ENDLESS}]
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    folder = write_tiny_bundle(tmp_path / "bundle", model)
    for opened in (lambda: load(folder, device="cpu", backend="torch"), lambda: check_tokenizer(Bundle.open(folder))):
        with pytest.raises(BundleError, match="the chat template takes more than 2 seconds"):
            opened()


def test_a_template_is_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", {})
    with pytest.raises(BundleError, match=r"it makes more than 200,\d+ characters"):
        template.render(CONVERSATION)
    plain, long = ChatTemplate("{{ messages[0].content }}", {}), "x" * 1_000_000
    assert plain.render([{"role": "user", "content": long}]) == long
    monkeypatch.setattr(chat_template, "_MAX_INPUT", 1000)
    with pytest.raises(UsageError, match=r"messages: expected at most 1,000 characters, found 1,000,"):
        plain.render([{"role": "user", "content": long}])
    with pytest.raises(UsageError, match="messages: expected texts, numbers, lists and mappings, found object"):
        plain.render([{"role": "user", "content": object()}])
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen = {}
    monkeypatch.setattr(chat_template.subprocess, "Popen", lambda *_, **given: seen.update(given))
    ChatTemplate("", {})
    assert "PATH" in seen["env"]
    assert "HF_TOKEN" not in seen["env"]


def make_text(
    template: str | dict[str, str] | None = None, config: dict[str, Any] | None = None, vocab_size: int = 8192
) -> Tokenizer:
    return Tokenizer(DATA, {"eos_token": "<|endoftext|>", **(config or {})}, template, vocab_size)


def with_changes(**changes: Any) -> Tokenizer:
    return Tokenizer(json.dumps(json.loads(DATA) | changes).encode(), {}, None, 8192)


NAMED = [{"name": "tool_use", "template": "no"}, {"name": [7]}, {"name": "default", "template": "list"}, 7]


def test_the_template_is_found_where_it_may_stand() -> None:
    places = [("file", None, "file", "file"), ("file", "config", "file", "file")]
    places += [(None, "config", "config", "config"), (None, NAMED, "list", "no")]
    for file, config, expected, with_tools in places:
        text = make_text(file, {"chat_template": config})
        assert text.render([{"role": "user", "content": "x"}]) == expected
        assert text.render([{"role": "user", "content": "x"}], tools=[{}]) == text.template_source == with_tools


CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PARTS = "{%% for part in m.content %%}{%% if part.type == 'text' %%}{{ part.text }}{%% endif %%}{%% endfor %%}"
FORMS = {  # of contents, as published; which of them a template takes
    "text": CHATML,  # prints a list
    "parts": CHATML.replace("{{ m.content }}", PARTS.replace("%%", "%")),  # SmolVLM's: nothing of a text
    "parts, first": CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}"),  # fails for a text
    "either": CHATML.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}" + PARTS.replace("%%", "%") + "{% endif %}",
    ),  # Qwen2-VL's and Gemma 3's
    "system as text": CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'system' %}{{ m.content }}{% else %}" + PARTS.replace("%%", "%") + "{% endif %}",
    ),
    "json": CHATML.replace("{{ m.content }}", "{{ m.content if m.content is string else m.content | tojson }}"),
}


@pytest.mark.parametrize("form", FORMS)
def test_contents_are_passed_in_the_form_that_the_template_takes(form: str) -> None:
    turns = [("system", "Be brief."), ("user", "type 'text'"), ("assistant", "yes"), ("user", "two\nlines")]
    expected = ChatTemplate(CHATML, {}).render([{"role": role, "content": text} for role, text in turns])
    template = ChatTemplate(FORMS[form], {})
    parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    mixed = [{"role": "system", "content": "Be brief."}, *parts[1:]]
    for messages in ([{"role": role, "content": text} for role, text in turns], parts, mixed):
        given = json.dumps(messages)
        assert template.render(messages) == expected
        assert json.dumps(messages) == given


def test_contents_that_no_probe_explains_are_passed_as_they_are() -> None:
    picture = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    assert "{'type': 'image'}" in ChatTemplate(CHATML, {}).render(picture)
    needs_system = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[1].content }}"
    )
    talk = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert ChatTemplate(needs_system, {}).render(talk) == "b"


def test_templates_by_name() -> None:
    files = {"default": "plain", "tool_use": "with tools", "rag": "{{ documents | length }} documents"}
    text, message = make_text(files, {"chat_template": "not this one"}), [{"role": "user", "content": "x"}]
    assert (text.render(message), text.render(message, tools=[{}])) == ("plain", "with tools")
    assert text.render(message, chat_template="rag", documents=[1, 2], tools=[{}]) == "2 documents"
    said = r"expected the name of one of the model's templates \('default', 'tool_use', 'rag'\), found 'x'"
    with pytest.raises(UsageError, match=said):
        text.render(message, chat_template="x")
    text.select_template("rag")
    assert text.render(message, documents=[1], tools=[{}]) == "1 documents"
    assert text.template_source == files["rag"]
    with pytest.raises(UsageError, match="no chat template by default: choose one of 'rag'"):
        make_text({"rag": "x"}).render(message)


TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}CLOSING{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.mark.parametrize(
    ("closing", "stops", "ends", "added"),
    [
        ("<|pad|>\n", {0}, False, 3),  # ChatML's kind, with another end in the configuration
        (" <|pad|>", {0}, False, 3),  # Llama 2's
        ("<|pad|>\n", {0, 3}, True, None),
        ("<|pad|><|endoftext|>", {0}, True, None),
        ("", {1}, True, None),  # GLM's: the next message's token ends the turn
        ("\n\n", {0}, False, None),
        ("\n### End\n<|pad|>", {0}, False, None),  # a text ends turns
    ],
)
def test_the_templates_end_of_a_turn(closing: str, stops: set[int], ends: bool, added: int | None) -> None:
    text = make_text(TURNS.replace("CLOSING", closing))
    assert text.template_ends_turns(frozenset(stops)) == ends
    assert text.end_of_turn(frozenset(stops)) == added


def test_templates_that_are_none_or_refuse() -> None:
    with pytest.raises(UsageError, match="no chat template"):
        make_text().render([])
    with pytest.raises(BundleError, match="chat_template: expected a text"):
        make_text(None, {"chat_template": 5})
    # Special tokens of old and new files reach a template.
    text = make_text("{{ bos_token }}{{ eos_token }}", {"bos_token": {"content": "<s>", "lstrip": False}})
    assert text.render([]) == "<s><|endoftext|>"
    with pytest.raises(UsageError, match="refuses these messages: roles must alternate"):
        ChatTemplate(MISTRAL, {}).render([{"role": "assistant", "content": "x"}])


def test_special_tokens() -> None:
    plain = make_text()
    assert plain.encode(">>> 1") == BYTE_LEVEL.encode(">>> 1").ids
    tokenizer = Library.from_buffer(DATA)
    tokenizer.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", 1)])
    with_start = Tokenizer(tokenizer.to_str().encode(), {}, None, 8192)
    assert with_start.encode(">>> 1") == [1, *plain.encode(">>> 1")]
    assert with_start.encode(">>> 1", add_special_tokens=False) == plain.encode(">>> 1")
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    assert len(with_changes(truncation=truncation).encode("a b c d e f g h")) > 3
    text = make_text()
    assert text.decode([0, *text.encode("x"), 3]) == "x"
    assert [token in text.special_ids for token in ("<|user|>", "x", "nowhere to be found")] == [True, False, False]
    ids = [*BYTE_LEVEL.encode(" a").ids, 1, 2, *BYTE_LEVEL.encode("b").ids, 1]
    user = BYTE_LEVEL.id_to_token(1)
    assert "".join(chunks_of(BYTE_LEVEL, ids, frozenset({1}))) == f" a{user}b{user}"
    assert "".join(chunks_of(BYTE_LEVEL, ids)) == " ab"


def test_bad_tokenizers() -> None:
    for data in (b"", b"{}", b"\xff\xfe", b'{"version": "1.0", "model": {"type": "BPE"}}'):
        with pytest.raises(BundleError, match=r"tokenizer\.json: (not a tokenizer|expected JSON|expected UTF-8)"):
            Tokenizer(data, {}, None, 8192)
    model = json.loads(BYTE_LEVEL.to_str())["model"]
    with pytest.raises(BundleError, match=r"tokenizer\.json: not a tokenizer.*out of vocabulary"):
        with_changes(model=model | {"merges": [*model["merges"], ["a", "no such"]]})
    with pytest.raises(BundleError, match="vocabulary has 10"):
        make_text(vocab_size=10).encode("hello world")
    with pytest.raises(UsageError, match="surrogate"):
        make_text().encode("\ud800")


PREPEND = {"type": "Prepend", "prepend": "\u2581"}
EMPTY = {"type": "Replace", "pattern": {"String": ""}, "content": "\u2581"}
MISSING = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "single": MISSING, "pair": MISSING, "special_tokens": {}}
PANIC = r"tokenizer\.json: (not a tokenizer|.* cannot run it)"
NO_UNKNOWN = json.loads(sentencepiece("llama").to_str())["model"] | {"unk_token": "<nothing>", "byte_fallback": False}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": json.loads(BYTE_LEVEL.to_str())["model"] | {"continuing_subword_prefix": "##"}}, PANIC),
        ({"post_processor": {"type": "Sequence", "processors": [TEMPLATE]}}, PANIC),
        ({"normalizer": {"type": "Sequence", "normalizers": [PREPEND, EMPTY]}}, PANIC),
        ({"model": NO_UNKNOWN}, "Unk token `<nothing>` not found"),
    ],
    ids=["merges", "template", "empty pattern", "unknown token"],
)
def test_what_the_library_fails_at_is_an_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        with_changes(**changes).encode("def f(x):")


@pytest.mark.parametrize("ids", [[2**32], [-1], [1, 10**30], ["x"], [None]])
def test_ids_that_no_tokenizer_has_are_a_usage_error(ids: list[Any]) -> None:
    with pytest.raises(WisparseError, match=r"token ids: expected integers from 0 to 4,294,967,295, found \["):
        make_text().decode(ids)
    assert make_text().decode([2**32 - 1]) == ""


def test_texts_and_files_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_text()
    with pytest.raises(ContextLengthError, match=r"the first .* of them are"):
        tokenizer.encode("a b " * 50_000, most=100)
    assert len(tokenizer.encode("a b " * 20, most=100)) <= 100
    monkeypatch.setattr("wisparse.runtime.tokenizer.MAX_BYTES", 1000)
    with pytest.raises(BundleError, match=r"tokenizer\.json: expected at most 1,000 bytes"):
        make_text()
