"""Chat templates that ask of messages and tools what the published ones of four families do, in few words of our own.

Each has its family's constructs, where a server can go wrong: what it looks up, refuses, and writes for a call.
"""

_LLAMA = r"""
{{- bos_token }}
{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " + date_string + "<|eot_id|>" }}
{%- if not tools is none %}
    {%- set first_user_message = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\nAnswer {"name": function name, "parameters": a dictionary}.\n\n' }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{{ "\n\n" }}{% endfor %}
    {{- first_user_message + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{ raise_exception("one tool call at a time") }}{% endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{ tool_call.arguments | tojson }}{{ "}" }}{{ "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
        {%- else %}{{ message.content }}{% endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

_QWEN = r"""
{%- if tools %}
    {{- "<|im_start|>system\n<tools>" }}{% for tool in tools %}{{ "\n" }}{{ tool | tojson }}{% endfor %}{{ "\n</tools>\n" }}
    {{- "<tool_call>\n{\"name\": <name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and
           not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{% set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}{% set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set content = (message.content.split('</think>') | last).lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- content.lstrip('\n') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{ '\n' }}{% endif %}
            {%- set tool_call = tool_call.function %}
            {{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{ tool_call.arguments }}
            {%- else %}{{ tool_call.arguments | tojson }}{% endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

_MISTRAL = r"""
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- set user_messages = messages | selectattr("role", "equalto", "user") | list %}
{%- for message in messages | rejectattr("role", "equalto", "tool") | selectattr("tool_calls", "undefined") %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}{{ raise_exception("roles must alternate") }}{% endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' }}{{ val | tojson }}{% if not loop.last %}{{ ", " }}{% endif %}
                {%- endfor %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}{{ out[:-1] }}
            {%- if tool_call.id | length != 9 %}{{ raise_exception("ids are alphanumeric, of length 9") }}{% endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{ ", " }}{% else %}{{ "]" + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{ " " + message["content"] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}{% set content = message.content %}{% endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content | string + ", " }}
        {%- if message.tool_call_id | length != 9 %}{{ raise_exception("ids are of length 9") }}{% endif %}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception("user and assistant alone") }}{% endif %}
{%- endfor %}
"""

_HERMES = r"""
{{- bos_token }}
{%- if tools is iterable and tools | length > 0 %}
    {{- "<|im_start|>system\n<tools> " }}
    {%- for tool in tools %}
        {%- set tool = tool.function %}{{ tool.name + '(' }}
        {%- for name, fields in tool.parameters.properties | items %}
            {{- name + ": " + fields.description | trim }}{% if not loop.last %}{{ ", " }}{% endif %}
        {%- endfor %}
        {{- ") - " + tool.description + "\n" + tool.parameters | tojson }}
    {%- endfor %}
    {{- " </tools>\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-dict>}\n</tool_call><|im_end|>\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "assistant" and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- '\n<tool_call>\n{ "arguments": ' }}{{ tool_call.function.arguments | tojson }}
            {{- ', "name": "' }}{{ tool_call.function.name }}{{ '"}\n</tool_call> ' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if not message.name is defined %}{{ raise_exception("a result needs the function's name") }}{% endif %}
        {{- '<tool_response>\n{"name": "' + message.name + '", "content": ' + message.content | tojson }}
        {{- '}\n</tool_response> <|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# By family: the template, what opens an answer, and what ends it.
PUBLISHED = {
    "llama-3.1": (_LLAMA, "assistant<|end_header_id|>\n\n", "<|eot_id|>"),
    "qwen-3": (_QWEN, "<|im_start|>assistant\n", "<|im_end|>"),
    "mistral": (_MISTRAL, "[/INST]", "</s>"),
    "hermes": (_HERMES, "<|im_start|>assistant\n", "<|im_end|>"),
}
