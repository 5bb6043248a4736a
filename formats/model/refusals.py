"""Models that are refused, by what they are: a name alone (mixtral is not a misspelt mistral) would mislead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["why_refused"]

_FAMILIES = (
    (
        "a mixture-of-experts model, which reads only some of its weights at a token already",
        r".*moe.*|mixtral|deepseek_v[2-9].*|dbrx|gpt_oss|llama4.*|qwen3_next|qwen4_exp.*|kimi.*|"
        r"dots\d.*|minimax.*|grok.*|arctic|jamba|aria_text|axk\d|bailing_hybrid|flex_olmo|hy_v\d|inkling.*|kolibri.*|"
        r"laguna|longcat.*|mellum|mimo_v2.*|solar_open|zaya",
    ),
    (
        "an encoder, which writes no text",
        r".*bert.*|electra|mpnet|xlm-roberta.*|nomic.*|deberta.*|gte|bge.*|big_bird|roformer|data2vec-text|xmod|ernie",
    ),
    (
        "an encoder-decoder model, not a decoder alone",
        r".*t5.*|.*bart|marian|pegasus.*|m2m_100|nllb.*|led|fsmt|prophetnet|encoder-decoder",
    ),
    (
        "a recurrent or state-space model, whose blocks are no attention and MLP",
        r".*mamba.*|rwkv.*|zamba.*|bamba|recurrent_gemma|nemotron_h|xlstm|hyena|retnet|lfm[23]|.*hybrid|falcon_h1",
    ),
    (
        "a model of speech, sound or pictures",
        r"whisper|wav2vec2.*|hubert|speecht5|musicgen.*|bark|vits|clip.*|siglip.*|vit.*|dinov.*|sam.*|swin.*",
    ),
    (
        "a model of pictures and text together",
        r".*_vl.*|.*vision.*|llava.*|mllama|idefics.*|paligemma.*|internvl.*|mistral3|pixtral|blip.*|fuyu|kosmos.*|"
        r"gemma3n?|gemma4_unified|phi4_multimodal|git|got_ocr2|.*omni.*|chameleon|emu3|qwen3_5",
    ),
    (
        "a dense decoder whose blocks are put together in another way (docs/bring-your-own-architecture.md says what "
        "a new row of the table can be)",
        r"gpt.*|openai-gpt|ctrl|cpmant|opt|bloom|mpt|falcon|codegen|phi|gemma(3n_text|4_[au].*)|vaultgemma|stablelm.*|"
        r"starcoder.*|olmo|cohere.*|granite_swa|internlm.*|baichuan.*|minicpm.*|nemotron|persimmon|xglm|biogpt|qwen|chatglm|"
        r"apertus|arcee|bitnet|diffllama|cwm|nanochat|hyperclovax|jais.*|youtu|blt|iquestcoder|doge",
    ),
)
_EXPERTS, _PICTURES = _FAMILIES[0], _FAMILIES[5]
# Where a wrapper's config keeps that of its text model.
_INSIDE = ("text_config", "thinker_config", "llm_config", "ffn_config")


def why_refused(config: Mapping[str, Any], model_type: Any, supported: Iterable[str]) -> str:
    """Why a model of another type is refused: what its config says it is, else its family, else that none is known."""
    supported = tuple(supported)
    known = ", ".join(supported)
    if not isinstance(model_type, str):
        return f"config.json: model_type: expected one of {known}, found {model_type!r:.80}"
    kind = None
    if _has_experts(config) or re.fullmatch(_EXPERTS[1], model_type):
        kind = _EXPERTS[0]
    elif config.get("is_encoder_decoder") is True:
        kind = _FAMILIES[2][0]
    elif isinstance(config.get("vision_config"), dict):
        kind = _PICTURES[0]
    else:
        kind = next((words for words, names in _FAMILIES if re.fullmatch(names, model_type)), None)
    if kind is not None:
        return f"model_type {model_type!r:.80} is {kind}; known ones: {known}"
    close = difflib.get_close_matches(model_type[:80], supported, n=1, cutoff=0.75)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return f"model_type {model_type!r:.80}{hint}; known ones: {known}"


def _has_experts(config: Mapping[str, Any], depth: int = 3) -> bool:
    """Whether the config, or that of the text model inside, counts experts: ``num_experts``, ``n_routed_experts``, …"""
    for key, value in config.items():
        counts = value if isinstance(value, list) else [value]
        if key.endswith("experts") and any(type(count) is int and count > 1 for count in counts):
            return True
    inside = (config[key] for key in _INSIDE if isinstance(config.get(key), Mapping)) if depth else ()
    return any(_has_experts(one, depth - 1) for one in inside)
