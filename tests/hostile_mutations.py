"""What a stranger, a bad disk or a bad day can do to a bundle: a function for each kind of damage.

Each takes a random generator and the folder of a bundle, changes the folder, and says what it did. Beside the bundle's
folder lies ``outside``, an intact copy.
"""

import contextlib
import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tiny_bundle import join_safetensors, split_safetensors

# What a damage, or signing again, meets where an earlier damage was thorough.
TOO_BROKEN = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError, struct.error)

_NUMBERS = [
    0, 1, -1, 2, 3, 7, 8, 16, 128, 2**16, 2**31, 2**32 - 1, 2**53, 2**60, 2**63, 2**64, -(2**63), 10**30, 10**400,
    0.0, -0.0, 0.25, 0.5, -0.5, 0.951, 1.0, 1.5, 1e-320, 1e-40, 1e-30, 1e30, 1e38, 1e300,
]  # fmt: skip
_TEXTS = [
    "", "x", "1", "true", "NaN", "\0", "\x1b[2J", "..", "/dev/zero", "C:\\x.safetensors", "a" * 5000, "__proto__",
    "\u202e\ud83d\ude00", "lm_head", "model.layers.9.x", "model.safetensors.index.json", "wisparse.safetensors",
]  # fmt: skip
# Words that mean something somewhere: types of tensors and tokenizers, and how weights are stored.
_WORDS = [
    "F64", "F32", "F16", "BF16", "I8", "I64", "U64", "BOOL", "F8_E4M3", "f32", "Unigram", "WordLevel",
    "channel", "group", "tensor", "block", "token", "tensor_group", "int", "float", "static", "frozen", "initialized",
    "pack-quantized", "int-quantized", "float-quantized", "dense", "marlin-24", "gptq", "gptq_v2", "marlin", "awq",
    "gemm", "gemv", "fp8", "compressed-tensors", "bitsandbytes", "e5m2", "Linear", "re:.*", "re:.*q_proj", "re:(",
    "re:(a+)+$",
]  # fmt: skip
_KEYS = [
    "quantization_config", "sparsity_config", "transform_config", "kv_cache_scheme", "actorder", "weight_block_size",
    "block_structure", "modules_to_not_convert", "dynamic", "desc_act", "rope_scaling", "sliding_window", "head_dim",
    "unk_token", "continuing_subword_prefix", "num_experts", "__metadata__", "weight_map", "x",
]  # fmt: skip
_ODD: list[Any] = [
    None, True, False, [], {}, [[]], [None], [0], [-1], ["x"], {"x": None}, {"": {}}, [2**60] * 3, list(range(3000)),
    {"quant_method": "gptq"}, {"format": "sparse-bitmask"}, {"num_bits": 8, "type": "float"}, [8, 8], [2**40] * 2,
]  # fmt: skip


def _pick(random: Random, folder: Path, *patterns: str) -> Path:
    files = {file for pattern in patterns or ("*",) for file in folder.glob(pattern)}
    # Not what an earlier damage made huge or a device: this must not be read here either.
    return random.choice(sorted(f for f in files if f.is_file() and not f.is_symlink() and f.stat().st_size < 64 << 20))


# Bytes of any file, and what stands in the folder.


def cut_or_grow(random: Random, folder: Path) -> str:
    """Shorter, longer, or sparse and huge: costs nothing to make, and everything to read."""
    file = _pick(random, folder)
    size = file.stat().st_size
    new = random.choice([0, 1, 7, 8, 9, size // 2, size - 1, random.randrange(size + 1), size + 1, 300 << 20, 1 << 40])
    os.truncate(file, max(new, 0))
    return f"{file.name} to {new} bytes"


def flip_bits(random: Random, folder: Path) -> str:
    file = _pick(random, folder)
    data = bytearray(file.read_bytes())
    for _ in range(random.choice([1, 1, 1, 2, 8])):
        # Headers and other text lie at the front: half of the flips go there.
        end = len(data) if random.random() < 0.5 else min(len(data), 3000)
        data[random.randrange(end)] ^= 1 << random.randrange(8)
    file.write_bytes(data)
    return file.name


def splice(random: Random, folder: Path) -> str:
    """Bytes left out, repeated or put in, some of them not UTF-8."""
    file = _pick(random, folder)
    data = file.read_bytes()
    start, length = random.choice([random.randrange(len(data)), len(data)]), random.choice([1, 4, 8, 64, 1000])
    odd = [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xef\xbb\xbf", b"\x00", b" ", b"\n", b"}"]
    piece = random.choice([b"", data[start : start + length] * 2, bytes(length), random.randbytes(length), data, *odd])
    file.write_bytes(data[:start] + piece + data[start + (0 if piece in odd else length) :])
    return f"{file.name} at {start}"


def swap_files(random: Random, folder: Path) -> str:
    first, second = _pick(random, folder), _pick(random, folder)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    return f"{first.name} and {second.name}"


def not_a_file(random: Random, folder: Path) -> str:
    file = _pick(random, folder)
    file.rename(folder / f"x{file.name}.txt")
    targets = {"zero": "/dev/zero", "tty": "/dev/tty", "memory": "/proc/self/mem", "loop": file.name,
               "dangling": "nothing", "inside": f"x{file.name}.txt", "outside": f"../outside/{file.name}",
               "absolute": str(folder.parent / "outside" / file.name)}  # fmt: skip
    kind = random.choice(["missing", "fifo", "folder", "socket", *targets])
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "socket":
        # Bound under a short relative name: the path of a socket may have 107 bytes.
        with contextlib.chdir(folder), socket.socket(socket.AF_UNIX) as server:
            server.bind(file.name)
    elif kind != "missing":
        file.symlink_to(targets[kind])
    if kind != "inside":
        (folder / f"x{file.name}.txt").unlink()
    return f"{file.name}: {kind}"


def more_files(random: Random, folder: Path) -> str:
    name = random.choice(
        ["model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "model.pt", "x.SAFETENSORS",
         "added_tokens.json", "vocab.json", "special_tokens_map.json", "tokenizer.model", "chat_template.json",
         "modeling_evil.py", "notes.txt", ".hidden", "a" * 200, "many"]
    )  # fmt: skip
    if name != "many":
        shutil.copyfile(_pick(random, folder), folder / name)
        return name
    deep = folder.joinpath(*["d"] * random.choice([1, 100]))
    deep.mkdir(parents=True)
    for index in range(random.choice([10, 2000])):
        (deep / f"{index}").touch()
    return name


# Documents: JSON files, and the headers of safetensors files.


def _read_document(file: Path) -> tuple[Any, bytes]:
    """A file's JSON, and what follows it."""
    data = file.read_bytes()
    return split_safetensors(data) if file.suffix == ".safetensors" else (json.loads(data), b"")


def _write_document(file: Path, text: str, rest: bytes) -> None:
    data = text.encode("utf-8", errors="surrogatepass")
    file.write_bytes(struct.pack("<Q", len(data)) + data + rest if file.suffix == ".safetensors" else data)


def _place(random: Random, document: Any) -> tuple[Any, Any]:
    """A container in a document and one of its keys, each level being as likely."""
    while True:
        key = random.choice(list(document) if isinstance(document, dict) else range(len(document)))
        if not isinstance(document[key], (dict, list)) or not document[key] or random.random() < 0.25:
            return document, key
        document = document[key]


def _odd(random: Random, value: Any) -> Any:
    """Another value: most often of the same type and near to it, else anything."""
    if random.random() < 0.25:
        return random.choice([*_NUMBERS, *_TEXTS, *_ODD])
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return random.choice([*_NUMBERS, value + 1, value - 1, 2 * value, -value, float(value), str(value)])
    if isinstance(value, str):
        # Ways to the same file of another folder, or of this one by another name.
        paths = [f"../outside/{value}", f"sub/{value}", f"./{value}", f"sub/../{value}", f"{value}/", f"{value}\0"]
        return random.choice([*_TEXTS, *_WORDS, *_WORDS, *paths, value.upper(), f"{value}x", [value], value * 100_000])
    if isinstance(value, list):
        changed = [*value[:-1], random.choice(_NUMBERS)]
        return random.choice([[], value[::-1], value[1:], value * 2, value * 17, value * 300, [*value, 1], changed])
    if isinstance(value, dict):
        added = {random.choice(_KEYS): random.choice([*_ODD, *_WORDS])}
        return random.choice([{}, list(value), value | added, {**added, **dict(list(value.items())[1:])}])
    return random.choice([*_NUMBERS, *_TEXTS, *_WORDS, *_ODD])


def _change_document(random: Random, folder: Path, *patterns: str) -> str:
    file = _pick(random, folder, *patterns)
    document, rest = _read_document(file)
    container, key = _place(random, document)
    kind = random.choice(["replace"] * 6 + ["remove", "rename", "add", "copy", "swap", "twice"])
    if kind == "remove":
        del container[key]
    elif kind == "rename" and isinstance(container, dict):
        container[random.choice([str(key).upper(), f"{key}_", f"../{key}", *_TEXTS, *container])] = container.pop(key)
    elif kind == "add" and isinstance(container, dict):
        container[random.choice(_KEYS)] = _odd(random, None)
    elif kind in ("copy", "swap"):
        other, name = _place(random, document)
        taken, container[key] = container[key], json.loads(json.dumps(other[name]))
        if kind == "swap":
            other[name] = taken
    else:
        container[key] = _odd(random, container[key])
    text = json.dumps(document)
    if kind == "twice":
        name = random.choice(list(document))
        text = f"{text[:-1]}, {json.dumps(name)}: {json.dumps(_odd(random, document[name]))}}}"
    _write_document(file, text, rest)
    return f"{file.name}: {kind} {key!r:.60}"


def odd_json(random: Random, folder: Path) -> str:
    shutil.copytree(folder.parent / "outside", folder / "sub")
    return _change_document(random, folder, "*.json")


def lying_length(random: Random, folder: Path) -> str:
    file = _pick(random, folder, "*.safetensors")
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    lie = random.choice([0, 1, 2, length - 1, length + 1, 2**31, 2**40, 2**63, 2**64 - 1, len(data), 100_000_000])
    file.write_bytes(struct.pack("<Q", lie) + data[8:])
    return f"{file.name}: {lie}"


def json_bomb(random: Random, folder: Path) -> str:
    file = _pick(random, folder, "*.json", "*.safetensors")
    depth, width = random.choice([50, 1_000, 200_000]), random.choice([10_000, 1_000_000])
    bomb = random.choice([
        "[" * depth, '{"a":' * depth + "1" + "}" * depth, '{"a":' + "[" * depth + "]" * depth + "}",
        '{"a":[' + "[]," * width + "[]]}", "{" + ",".join(f'"{index}":{{}}' for index in range(width // 10)) + "}",
        '{"a":' + "9" * width + "}", '{"a":"' + "\\u0000" * width + '"}', '{"a":"' + '\\"' * width,
        '{"a":NaN}', '{"a":1e9999}', '{"a":-Infinity}', " " * width * 3,
    ])  # fmt: skip
    document, rest = _read_document(file)
    # On its own, or as one more value of a document that is otherwise right.
    _write_document(file, bomb if random.random() < 0.5 else f'{json.dumps(document)[:-1]}, "bomb": {bomb}}}', rest)
    return f"{file.name}: {bomb[:12]!r}"


# Numbers of weights and masks.


def odd_tensor(random: Random, folder: Path) -> str:
    """A number, or a whole tensor of codes, scales, shapes, orders or masks, with other content."""
    file = _pick(random, folder, "*.safetensors")
    header, data = split_safetensors(file.read_bytes())
    name = random.choice([name for name in header if name != "__metadata__"])
    start, end = header[name]["data_offsets"]
    old, size = data[start:end], end - start
    fills = {
        "zeros": bytes(size), "ones": b"\xff" * size, "signs": b"\x80" * size, "largest": b"\x7f" * size,
        "infinite": (b"\x00\x00\x80\x7f" * size)[:size], "random": random.randbytes(size), "backwards": old[::-1],
        "turned": old[size // 2 :] + old[: size // 2],
    }  # fmt: skip
    kind = random.choice([*fills, *["one number"] * 8])
    if kind == "one number":
        value = np.float32(random.choice([np.nan, np.inf, -np.inf, 0, -1, 1e-40, -1e-40, 1e-45, 3e38, 0.96, 1, 0.25]))
        # bfloat16: the upper half of a float32.
        bits = value.tobytes() if header[name]["dtype"] == "F32" else value.tobytes()[2:]
        at = random.randrange(size // len(bits)) * len(bits)
        fills[kind] = old[:at] + bits + old[at + len(bits) :]
    file.write_bytes(join_safetensors(header, data[:start] + fills[kind] + data[end:]))
    return f"{file.name}: {name} {kind}"


def swap_tensors(random: Random, folder: Path) -> str:
    """Two tensors of one size change places: every length and name stays right."""
    file = _pick(random, folder, "*.safetensors")
    header, data = split_safetensors(file.read_bytes())
    offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    a = random.choice(offsets)
    b = random.choice([other for other in offsets if other[1] - other[0] == a[1] - a[0]])
    changed = bytearray(data)
    changed[slice(*a)], changed[slice(*b)] = data[slice(*b)], data[slice(*a)]
    file.write_bytes(join_safetensors(header, bytes(changed)))
    return f"{file.name}: {a} and {b}"


# Text that is a program, and what ``--save`` reads.


def _nested(depth: int) -> Any:
    normalizer: Any = {"type": "NFC"}
    for _ in range(depth):
        normalizer = {"type": "Sequence", "normalizers": [normalizer]}
    return normalizer


def _replace(pattern: Any, content: str = "\u2581") -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
                                                {"type": "Replace", "pattern": pattern, "content": content}]}  # fmt: skip


_FLAGS = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
# Where in ``tokenizer.json``, and what then stands there, or is added to what does.
_TOKENIZERS: list[tuple[str, Any]] = [
    ("vocab", {f"token{index}": index for index in range(300, 200_000)}),
    ("vocab", {"x" * 1_000_000: 300}),
    ("vocab", {"a": 2**32 - 1}),
    ("merges", [["\u0120", "t"]] * 1000),
    ("normalizer", _nested(30)),
    ("normalizer", _nested(300)),
    *(("normalizer", _replace({"Regex": regex})) for regex in ("(a+)+$", "(", "(?<=a{1,1000}){1000}", "(x*)*y", "x*")),
    ("added_tokens", [{"id": 257, "content": "a", "special": True, **_FLAGS}]),
    ("added_tokens", [{"id": 2**31, "content": "x" * 100_000, "special": True, **_FLAGS}]),
    ("added_tokens", [{"id": 0, "content": "", "special": True, **_FLAGS}]),
]


def bad_tokenizer(random: Random, folder: Path) -> str:
    file = _pick(random, folder, "tokenizer.json")
    document = json.loads(file.read_bytes())
    vocab = document["model"]["vocab"]
    if random.random() < 0.5:
        first, second = random.sample(list(vocab), 2)
        vocab[first] = random.choice([vocab[second], vocab[second], *_NUMBERS])
        file.write_text(json.dumps(document))
        return f"vocab {first!r}"
    key, value = random.choice(_TOKENIZERS)
    place = document["model"] if key in document["model"] else document
    place[key] = place[key] | value if key == "vocab" else place[key] + value if key == "added_tokens" else value
    file.write_text(json.dumps(document))
    return f"{key} {value!r:.60}"


# Out of the sandbox, never done, more than memory; more of them in test_runtime_tokenizer.py.
_TEMPLATES = (
    "",
    "\0",
    "{% if",
    "{{ messages }}",
    "{{ messages[99].x.y }}",
    "{{ raise_exception('\x1b[2J') }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include '/etc/passwd' %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 9**9**9 }}",
    "{{ 'x' * 10**12 }}",
    "{{ 'x' | center(10**10) }}",
    "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
)


def bad_template(random: Random, folder: Path) -> str:
    text = random.choice(_TEMPLATES)
    _pick(random, folder, "chat_template.jinja").write_text(text)
    return text[:60]


def lying_findings(random: Random, folder: Path) -> str:
    """Report and card as another's: ``--save`` reads both."""
    finding = {"what": "tok/s", "conditions": "c", "sparsity": 0.5, "dense": 1.0, "sparse": 2.0,
               "dense_stderr": None, "sparse_stderr": None}  # fmt: skip
    key = random.choice(list(finding))
    finding[key] = _odd(random, finding[key])
    report = random.choice([{"findings": [finding]}, {"findings": [finding] * 1001}, {"findings": None}, [finding]])
    text = json.dumps(report)
    (folder / "conversion_report.json").write_text(text, "utf-8", errors="surrogatepass")
    marks = ("<!-- measured since the conversion -->", "<!-- end of what was measured since -->")
    card = random.choice(["", marks[0], marks[1] + marks[0], "\n".join(marks) * 3, "\udcff", "x" * 40_000_000])
    (folder / "README.md").write_text(card, "utf-8", errors="surrogateescape")
    return text[:100]


_ALL = (cut_or_grow, flip_bits, splice, swap_files, not_a_file, more_files, odd_json, lying_length, json_bomb)
_ALL += (odd_tensor, swap_tensors, bad_tokenizer, bad_template, lying_findings)
MUTATIONS: dict[str, Callable[[Random, Path], str]] = {mutation.__name__: mutation for mutation in _ALL} | {
    "odd_settings": lambda random, folder: _change_document(random, folder, "config.json", "wisparse.json"),
    "odd_header": lambda random, folder: _change_document(random, folder, "*.safetensors"),
}
