"""Chat templates that ask of messages and tools what the published ones of four families do, in few words of our own.

Each has its family's constructs, where a server can go wrong: what it looks up, refuses, and writes for a call.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent / "templates"
# By family: the template, what opens an answer, and what ends it.
PUBLISHED = {
    name: ((_FOLDER / f"{name}.jinja").read_text("utf-8"), *ends)
    for name, ends in {
        "llama-3.1": ("assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        "qwen-3": ("<|im_start|>assistant\n", "<|im_end|>"),
        "mistral": ("[/INST]", "</s>"),
        "hermes": ("<|im_start|>assistant\n", "<|im_end|>"),
    }.items()
}
