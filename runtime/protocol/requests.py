"""Requests of OpenAI's chat completions and completions as pydantic models, and its error object."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping, Sequence, Set
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from starlette.exceptions import HTTPException

from wisparse.formats.errors import ContextLengthError, PromptError, UnavailableError, UsageError, WisparseError
from wisparse.formats.guard import parse_json

from ..generation.engine import QueueFullError
from ..generation.grammar import Grammar
from ..thoughts import not_variable

T = TypeVar("T", bound=BaseModel)
log = logging.getLogger(__name__)

_UNSUPPORTED: Sequence[tuple[str, Sequence[Any]]] = (
    ("audio web_search_options chat_template enable_thinking prompt_logprobs thinking", ()),
    ("truncate_prompt_tokens guided_choice guided_grammar guided_json guided_regex json_schema", ()),
    ("structured_outputs samplers adapters draft_model", ()),
    ("functions documents stop_token_ids allowed_token_ids logits_processors lora", ([],)),
    ("continue_final_message ignore_eos include_stop_str_in_output use_beam_search", (False,)),
    ("add_generation_prompt skip_special_tokens", (True,)),
    ("min_tokens dry_multiplier dynatemp_range mirostat mirostat_mode smoothing_factor top_a xtc_probability", (0,)),
    ("best_of guidance_scale length_penalty repeat_penalty tfs tfs_z typical_p", (1,)),
    ("suffix negative_prompt", ("",)),
    ("bad_words", ([], "")),
    ("function_call", ("none", "auto")),
    ("modalities", (["text"],)),
    ("verbosity", ("medium",)),
    ("n_predict", (-1,)),
    ("reasoning", ({}, {"summary": "auto"})),
    ("top_n_sigma", (-1, 0)),
)
# Fields of OpenAI's API and of other servers that are refused unless they have a neutral value.
UNSUPPORTED = {field: neutral for fields, neutral in _UNSUPPORTED for field in fields.split()}
# Fields that clients send and that change no answer.
IGNORED = {"user", "metadata", "store", "service_tier", "prediction", "safety_identifier", "prompt_cache_key"}
IGNORED |= {"prompt_cache_retention", "cache_control", "request_id", "priority", "cache_salt", "context_management"}
IGNORED |= {"inference_geo", "speed", "betas"}
MAX_STOPS = 64
_MAX_INT = 2**63 - 1
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "seed"} | {
    f"{kind}_penalty" for kind in ("repetition", "frequency", "presence")
}
_MAX_TOOL_CHARACTERS = 1 << 18
_OR_TEXT = BeforeValidator(lambda value: [value] if isinstance(value, str) else value, str | list[str])
_IMAGES_AND_SOUND = ("image_url", "input_image", "input_audio", "file", "video_url")


class ApiError(HTTPException):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.error = {"message": message, "type": type, "param": param, "code": code}


def as_api_error(error: Exception, prompt: str = "messages") -> ApiError:
    """The error response for an exception. ``prompt``: name of the request's prompt field."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(429, str(error), type="rate_limit_error", code="queue_full", headers={"retry-after": "1"})
        case UnavailableError():
            return ApiError(503, str(error), type="server_error", code="unavailable", headers={"retry-after": "1"})
        case ContextLengthError():
            return ApiError(400, str(error), param=prompt, code="context_length_exceeded")
        case PromptError():
            return ApiError(400, str(error), param=prompt, code="invalid_value")
        case UsageError():
            field = str(error).partition(":")[0]
            return ApiError(400, str(error), param=field if field.isidentifier() else None, code="invalid_value")
        case WisparseError():
            cause = error.__cause__ if type(error) is WisparseError else None  # an unexpected exception in the engine
            log.warning("a request failed: %s", error, exc_info=cause)
            return ApiError(500, str(error), type="server_error")
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed: its log has more", type="server_error")


class FieldError(ValueError):
    """Raised by validators. ``field``: of the model; empty in a validator of the field itself."""

    def __init__(self, field: str, message: str, code: str = "unsupported_parameter") -> None:
        super().__init__(message)
        self.field, self.code = field, code


def invalid(field: str, expected: str, found: Any) -> FieldError:
    return FieldError(field, f"expected {expected}, found {found!r:.80}", "invalid_value")


def from_validation(errors: Sequence[Mapping[str, Any]], where: str = "") -> ApiError:
    """The first of pydantic's errors as "field: expected ..., found ..."; ``where``: path of the validated part."""
    error = errors[0]
    cause = error.get("ctx", {}).get("error")
    names, code, message = list(error["loc"]), "invalid_value", error["msg"]
    if isinstance(cause, FieldError):
        names, code, message = [*names, cause.field] if cause.field else names, cause.code, str(cause)
    elif error["type"] == "missing":
        message = "this field is required"
    elif error["type"] in ("model_type", "model_attributes_type"):
        message = f"expected an object, found {error['input']!r:.80}"
    else:
        message = f"{message.replace('Input should be', 'expected')}, found {error['input']!r:.80}"
    path = where + "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    param = path.lstrip(".") or "body"
    return ApiError(501 if code == "unsupported_content" else 400, f"{param}: {message}", param=param, code=code)


def validated(model: type[T], body: Any, where: str = "") -> T:
    """Validate the body, or the part of it at the path ``where``; raises ApiError."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise from_validation(error.errors(), where) from error


class Strict(BaseModel):
    """A model without type conversions, in which null means an omitted field."""

    model_config = ConfigDict(strict=True)
    unsupported: ClassVar[Mapping[str, Sequence[Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = {key: value for key, value in data.items() if value is not None}
        for field, neutral in cls.unsupported.items():
            value = fields.get(field)
            if isinstance(value, dict):
                value = {name: inner for name, inner in value.items() if inner is not None}
            # True equals 1 in Python.
            if value is not None and (value, value is True) not in [(allowed, allowed is True) for allowed in neutral]:
                hint = "; drafts are chosen by serve --speculative-config" if field == "draft_model" else ""
                raise FieldError(field, f"this server does not have it; leave it out{hint}")
        return fields


class StreamOptions(Strict):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    schema_: dict[str, Any] = Field({"type": "object"}, alias="schema")


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise invalid("json_schema", "an object", None)
        return self


def as_response_format(value: Any, where: str) -> ResponseFormat:
    """The format of an API where the object of type json_schema has the schema itself; raises ApiError."""
    if isinstance(value, dict) and value.get("type") == "json_schema":
        value = {"type": "json_schema", "json_schema": value}
    return validated(ResponseFormat, value, where)


class GenerationRequest(Strict):
    """The fields of all endpoints. Omitted sampling fields have the generation config's values. Unknown fields are allowed."""

    model_config = ConfigDict(strict=True, extra="allow")
    unsupported: ClassVar = UNSUPPORTED
    ignored: ClassVar[Set[str]] = IGNORED
    prompt_field: ClassVar = "messages"

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    n: int = Field(1, ge=1)
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=1000)]], _OR_TEXT] = Field(
        [], max_length=MAX_STOPS
    )
    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=-1, le=_MAX_INT, description="0 and -1: all tokens")
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-_MAX_INT, le=_MAX_INT)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field({}, max_length=1024)
    response_format: ResponseFormat | None = None
    grammar: str = Field("", description="llguidance's Lark, or llama.cpp's GBNF")
    sparsity: float | None = Field(None, description="one of the bundle's sparsity levels, or 0 for the dense model")
    bits: float | None = Field(None, description="one of a graded bundle's levels, or 8 for the dense model")
    speculative: bool = Field(True, description="false: no drafts for this answer, which changes its speed only")

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, biases: dict[str, float]) -> dict[str, float]:
        unknown = next((key for key in biases if not (key.isascii() and key.isdigit() and len(key) < 10)), None)
        if unknown is not None:
            raise invalid("", "token ids as keys", unknown)
        return biases

    @model_validator(mode="after")
    def _one_constraint(self) -> Self:
        if self.grammar and self.formatted:
            raise invalid("grammar", "none beside a response_format", self.grammar)
        return self

    @property
    def warning(self) -> str:
        """The body's unknown fields; empty if there are none. Printable ASCII."""
        unknown = [field for field in self.model_extra or () if field not in self.unsupported.keys() | self.ignored]
        found = []
        for field in unknown[:10]:
            near = difflib.get_close_matches(field, self.__class__.model_fields, 1)
            found.append(f"{field!a:.40}" + (f" (did you mean {near[0]}?)" if near else ""))
        return f"unknown fields are ignored: {', '.join(found)}" if found else ""

    @property
    def formatted(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

    def sampling(self) -> dict[str, Any]:
        """The given keyword arguments of SamplingParams."""
        params: dict[str, Any] = self.model_dump(include=_SAMPLING, exclude_none=True)
        if "top_k" in params:
            params["top_k"] = max(params["top_k"], 0)
        if "top_p" in params:
            params["top_p"] = params["top_p"] or 1e-9  # 0: only the most probable token
        if "seed" in params:
            params["seed"] %= 2**63
        biases = {int(token): bias for token, bias in self.logit_bias.items()}
        return {**params, "logit_bias": biases, "logprobs": self.num_logprobs()}

    def num_logprobs(self) -> int | None:
        """Number of top log-probabilities per token; None: no log-probabilities."""
        return None

    def constraint(self) -> Grammar | None:
        if self.response_format is not None and self.formatted:
            schema = self.response_format.json_schema
            return Grammar.of_schema("response_format", {"type": "object"} if schema is None else schema.schema_)
        return Grammar("grammar", self.grammar) if self.grammar else None


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(token) is int for token in value)


class CompletionRequest(GenerationRequest):
    """``/v1/completions``. A single prompt is validated to a list of one."""

    unsupported: ClassVar = {**UNSUPPORTED, "tools": ([],), "tool_choice": ("none", "auto")}
    prompt_field: ClassVar = "prompt"

    prompt: list[str | list[int]]
    max_tokens: int = Field(16, ge=0, le=_MAX_INT, description="0: score the prompt only")
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: bool = False

    def num_logprobs(self) -> int | None:
        return self.logprobs

    @field_validator("prompt", mode="before", json_schema_input_type=str | list[int] | list[str] | list[list[int]])
    @classmethod
    def _several(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or _is_ids(prompt):
            return [prompt]
        if isinstance(prompt, list) and prompt and all(isinstance(one, str) or _is_ids(one) for one in prompt):
            return prompt
        raise invalid("", "a text, a list of token ids, or a list of either", prompt)


class CalledFunction(Strict):
    name: str
    arguments: dict[str, Any] = Field({})

    @field_validator("arguments", mode="before", json_schema_input_type=str | dict[str, Any])
    @classmethod
    def _parsed(cls, arguments: Any) -> Any:
        """Of an earlier turn: what is no object, as of a call that was cut off, goes to the template within one."""
        if not isinstance(arguments, str):
            return arguments if isinstance(arguments, dict) else {"arguments": arguments}
        try:
            found = json.loads(arguments or "{}")
            if isinstance(found, str):  # encoded twice
                found = json.loads(found)
            return parse_json(json.dumps(found).encode(), "arguments", UsageError)
        except (UsageError, ValueError, RecursionError):
            return {"arguments": arguments}


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    unsupported: ClassVar = {"function_call": (), "audio": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    tool_calls: list[ToolCall] = Field([], max_length=128)
    tool_call_id: str | None = None
    reasoning_content: str = ""

    @field_validator("content", mode="before", json_schema_input_type=str | list[dict[str, Any]])
    @classmethod
    def _joined(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in _IMAGES_AND_SOUND:
                raise FieldError("", f"this server reads text alone, not {kind}", "unsupported_content")
            if kind != "text" or not isinstance(part.get("text"), str):
                raise invalid("", "a part of type text", part)
        return "".join(part["text"] for part in content)

    @model_validator(mode="after")
    def _fits_role(self) -> Self:
        if self.content is None and self.role not in ("assistant", "tool"):
            raise invalid("content", "a text, or a list of parts", None)
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid("tool_call_id", "the id of the call that this answers", None)
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", "only an assistant's message has them")
        return self

    def for_template(self) -> dict[str, Any]:
        message = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
            "name": self.name,
            "tool_call_id": self.tool_call_id if self.role == "tool" else None,
            "reasoning_content": (self.reasoning_content or None) if self.role == "assistant" else None,
            "tool_calls": [call.model_dump() for call in self.tool_calls] or None,
        }
        return {name: value for name, value in message.items() if value is not None}


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise invalid("", "the JSON schema of an object", schema)
    return schema


FunctionName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
ObjectSchema = Annotated[dict[str, Any], AfterValidator(_of_an_object)]


class Function(Strict):
    model_config = ConfigDict(strict=True, extra="allow")

    name: FunctionName
    description: str = ""
    parameters: ObjectSchema = Field({})
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates expect it, with the fields of transformers' JSON schemas."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {**function, **self.model_dump(exclude_unset=True, exclude=set(function))}


class Tool(Strict):
    type: Literal["function"]
    function: Function


class ChatRequest(GenerationRequest):
    """``/v1/chat/completions``."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    max_completion_tokens: int | None = Field(None, ge=1, le=_MAX_INT)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Tool] = Field([], max_length=128)
    tool_choice: Any = Field("auto", description="none, auto, required, or an object that names one of the tools")
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = Field(None, description="passed to the chat template")
    chat_template_kwargs: dict[str, Any] = Field({})
    thinking_token_budget: int | None = Field(None, ge=0, le=_MAX_INT, description="most tokens of the thought")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid("logprobs", "true, as top_logprobs asks for some", False)
        variables = self.chat_template_kwargs
        if (wrong := not_variable(variables)) is not None:
            raise invalid("chat_template_kwargs", "further template variables", wrong)
        if self.tools and "tools" in variables:
            raise invalid("chat_template_kwargs", "no tools beside those of the request", variables)
        names = [tool.function.name for tool in self.tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise invalid("tools", "a name for each of them", twice)
        if len(json.dumps([tool.function.for_template() for tool in self.tools])) > _MAX_TOOL_CHARACTERS:
            raise invalid("tools", f"at most {_MAX_TOOL_CHARACTERS:,} characters of JSON", "more")
        match self.tool_choice:
            case "none" | "auto":
                return self
            case "required" if not names:
                raise invalid("tool_choice", "tools, one of which has to be called", "none")
            case "required" | {"type": "function", "function": {"name": str()}} if self.forced:
                pass
            case _:
                choices = "none, auto, required, or an object of type function that names one of the tools"
                raise invalid("tool_choice", choices, self.tool_choice)
        if self.grammar or self.formatted:
            raise invalid("tool_choice", "none or auto beside a response_format or a grammar", self.tool_choice)
        return self

    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def functions(self) -> list[dict[str, Any]]:
        """The functions of the tools as chat templates expect them; empty for tool_choice none."""
        return [] if self.tool_choice == "none" else [tool.function.for_template() for tool in self.tools]

    @property
    def forced(self) -> list[dict[str, Any]]:
        """The functions of a required call; empty if none is required."""
        if isinstance(self.tool_choice, dict):
            return [one for one in self.functions if one["name"] == self.tool_choice["function"]["name"]]
        return self.functions if self.tool_choice == "required" else []

    @property
    def several_calls(self) -> bool:
        return self.parallel_tool_calls and not isinstance(self.tool_choice, dict)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as the chat template expects them; tool results have their function's name."""
        messages = [message.for_template() for message in self.messages]
        called = {call["id"]: call["function"]["name"] for item in messages for call in item.get("tool_calls", ())}
        for message in messages:
            if message["role"] == "tool" and message["tool_call_id"] in called:
                message.setdefault("name", called[message["tool_call_id"]])
        return messages

    def template_variables(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": function} for function in self.functions]
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return {**effort, **self.chat_template_kwargs, **({"tools": tools} if tools else {})}
