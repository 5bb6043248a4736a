"""Fields that would change the answer and that this server does not have: refused by name, never left out in silence.

Of OpenAI's protocol, and of what other servers add to it; each with the values that change nothing, beside null. A
field that is not here changes nothing about an answer (``user``, ``metadata``, …), or is nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import ApiError

__all__ = ["ANSWER", "RESPONSE", "refuse_unsupported"]

ANSWER: Mapping[str, Sequence[Any]] = {
    # OpenAI's own.
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
    # How the prompt is made.
    "add_generation_prompt": (True,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "enable_thinking": (),
    "negative_prompt": ("",),
    "prompt_logprobs": (),
    "reasoning": ({}, {"summary": "auto"}),
    "thinking": (),
    "truncate_prompt_tokens": (),
    # What the answer has to be.
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "json_schema": (),
    "structured_outputs": (),
    # Where it ends.
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "n_predict": (-1,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    # How its tokens are chosen.
    "allowed_token_ids": ([],),
    "bad_words": ([], ""),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "repeat_penalty": (1,),
    "samplers": (),
    "smoothing_factor": (0,),
    "tfs": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1, 0),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "xtc_probability": (0,),
    # By which weights.
    "adapters": (),
    "draft_model": (),
    "lora": ([],),
}
# What ``/v1/responses`` has beside: what would need an earlier answer too.
RESPONSE: Mapping[str, Sequence[Any]] = {
    "background": (False,),
    "conversation": (),
    # A thought is told as it is, so nothing has to be encrypted to come back.
    "include": ([], ["reasoning.encrypted_content"]),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}


def refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, Sequence[Any]]) -> None:
    """Refuse these fields, ``neutral`` values excepted; an object of nulls is as good as an empty one.

    Raises:
        ApiError: with the field named.
    """
    for field, values in neutral.items():
        value = body.get(field)
        if isinstance(value, dict):
            value = {name: inner for name, inner in value.items() if inner is not None}
        # True equals 1 in Python, and nothing else here means the same.
        if value is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
            continue
        raise ApiError(
            400, f"{field}: this server does not have it; leave it out", param=field, code="unsupported_parameter"
        )
