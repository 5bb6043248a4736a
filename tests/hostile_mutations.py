"""What a stranger, a bad disk or a bad day can do to a bundle: one function per kind of damage.

Each takes a random generator and the folder of a bundle, changes the folder, and says what it did.
"""

from __future__ import annotations

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

Mutation = Callable[[Random, Path], str]

# Values that a reader may be unprepared for, wherever they stand.
_ODD = [
    None, True, False, 0, 1, -1, 2, 7, 2**31, 2**53, 2**60, 2**63, 2**64, 10**30, -(2**63), 0.0, -0.0, 0.5, -0.5, 1e-40,
    1e-320, 1e38, 1e300, "", "x", "\x00", "\x1b[2J", "../../etc/passwd", "/dev/zero", "a" * 5000, "\u202e\ud83d\ude00",
    "NaN", "1", "true", [], {}, [[]], [None], ["x"], [0], [-1], [2**60] * 3, {"x": None}, {"": {}}, list(range(3000)),
]  # fmt: skip
_ODD_FLOATS = [np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0, 1e-40, -1e-40, 1e-45, 3e38, 0.96, 1.0, 0.25]


def _pick(random: Random, folder: Path, *patterns: str) -> Path:
    found = {
        file
        for pattern in patterns or ("*",)
        for file in folder.glob(pattern)
        if file.is_file() and not file.is_symlink()
    }
    # Not what an earlier damage made huge: the harness must not read it either.
    return random.choice(sorted(file for file in found if file.stat().st_size < 64 << 20))


def _plain(file: Path) -> Path:
    """``file``, unless an earlier damage made something of it that must not be read or written."""
    if file.is_symlink() or not file.is_file() or file.stat().st_size > 64 << 20:
        raise FileNotFoundError(file)
    return file


def _safetensors(random: Random, folder: Path) -> Path:
    return _pick(random, folder, "*.safetensors")


def _json_file(random: Random, folder: Path) -> Path:
    return _pick(random, folder, "*.json")


# Bytes of any file.


def truncate(random: Random, folder: Path) -> str:
    file = _pick(random, folder)
    size = file.stat().st_size
    keep = random.choice([0, 1, 7, 8, 9, size // 2, max(size - 1, 0), random.randrange(size + 1)])
    os.truncate(file, min(keep, size))
    return f"{file.name} to {keep} bytes"


def append(random: Random, folder: Path) -> str:
    file = _pick(random, folder)
    with file.open("ab") as end:
        end.write(random.choice([b"\0", b" ", b"\n", b"}", random.randbytes(100), file.read_bytes()]))
    return file.name


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
    file = _pick(random, folder)
    data = file.read_bytes()
    start = random.randrange(len(data))
    length = random.choice([1, 4, 8, 64, 1000])
    piece = random.choice([b"", data[start : start + length] * 2, bytes(length), random.randbytes(length)])
    file.write_bytes(data[:start] + piece + data[start + length :])
    return f"{file.name} at {start}"


def wrong_utf8(random: Random, folder: Path) -> str:
    file = _pick(random, folder, "*.json", "*.jinja", "*.md")
    data = file.read_bytes()
    at = random.randrange(len(data))
    bad = random.choice([b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xef\xbb\xbf", b"\x00"])
    file.write_bytes(data[:at] + bad + data[at:])
    return f"{file.name} at {at}"


def swap_files(random: Random, folder: Path) -> str:
    first, second = _pick(random, folder), _pick(random, folder)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    return f"{first.name} and {second.name}"


def remove(random: Random, folder: Path) -> str:
    file = _pick(random, folder)
    file.unlink()
    return file.name


def huge_file(random: Random, folder: Path) -> str:
    """Sparse: it costs nothing to make, and everything to read."""
    file = _pick(random, folder)
    size = random.choice([200 << 20, 300 << 20, 1 << 40])
    os.truncate(file, size)
    return f"{file.name} to {size} bytes"


# What stands in the folder.


def not_a_file(random: Random, folder: Path) -> str:
    file = _pick(random, folder)
    data = file.read_bytes()
    file.unlink()
    kind = random.choice(["fifo", "folder", "socket", "zero", "tty", "memory", "loop", "dangling", "outside", "inside"])
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
        (file / file.name).write_bytes(data)
    elif kind == "socket":
        # Bound under a short relative name: the path of a socket may have 107 bytes.
        before = Path.cwd()
        os.chdir(folder)
        try:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(file.name)
        finally:
            os.chdir(before)
    elif kind == "outside":
        target = folder.parent / "outside" / file.name
        target.write_bytes(data)
        file.symlink_to(random.choice([str(target), f"../outside/{file.name}"]))
    elif kind == "inside":
        (folder / f"x{file.name}.txt").write_bytes(data)
        file.symlink_to(f"x{file.name}.txt")
    else:
        targets = {"zero": "/dev/zero", "tty": "/dev/tty", "memory": "/proc/self/mem", "loop": file.name}
        file.symlink_to(targets.get(kind, "nothing"))
    return f"{file.name}: {kind}"


def more_files(random: Random, folder: Path) -> str:
    name = random.choice(
        ["model.safetensors", "pytorch_model.bin", "adapter_model.safetensors", "model.pt", "x.SAFETENSORS",
         "added_tokens.json", "vocab.json", "special_tokens_map.json", "tokenizer.model", "chat_template.json",
         "modeling_evil.py", "notes.txt", ".hidden", "a" * 200]
    )  # fmt: skip
    shutil.copyfile(_pick(random, folder), folder / name)
    return name


def many_files(random: Random, folder: Path) -> str:
    deep = folder.joinpath(*["d"] * random.choice([1, 100]))
    deep.mkdir(parents=True)
    for index in range(random.choice([10, 2000])):
        (deep / f"{index}").touch()
    return "many"


# Safetensors files.


def _header(random: Random, file: Path, change: Callable[[dict[str, Any], list[str]], str]) -> str:
    header, data = split_safetensors(file.read_bytes())
    names = [name for name in header if name != "__metadata__"]
    what = change(header, names)
    file.write_bytes(join_safetensors(header, data))
    return f"{file.name}: {what}"


def lying_header(random: Random, folder: Path) -> str:
    def change(header: dict[str, Any], names: list[str]) -> str:
        name, other = random.choice(names), random.choice(names)
        entry = header[name]
        start, end = entry["data_offsets"]
        kind = random.choice(
            ["shape", "offsets", "dtype", "overlap", "rename", "drop", "swap", "key", "odd", "metadata"]
        )
        if kind == "shape":
            entry["shape"] = random.choice(
                [
                    [2**60],
                    [2**60, 0],
                    [2**32, 2**32],
                    [-1],
                    [],
                    [1] * 40,
                    entry["shape"][::-1],
                    [0],
                    [*entry["shape"], 1],
                ]
            )
        elif kind == "offsets":
            entry["data_offsets"] = random.choice(
                [[-8, end], [start, 2**60], [end, start], [start, end - 4], [start + 4, end], [0, 0], [2**63, 2**63]]
            )
        elif kind == "dtype":
            entry["dtype"] = random.choice(
                ["F64", "F16", "BF16", "I8", "BOOL", "F8_E4M3", "F4", "Q4_0", "", "f32", "U64"]
            )
        elif kind == "overlap":
            entry["data_offsets"] = list(header[other]["data_offsets"])
        elif kind == "rename":
            header[random.choice([name + "x", "", "../" + name, "__proto__", other, name.upper()])] = header.pop(name)
        elif kind == "drop":
            del header[name]
        elif kind == "swap":
            header[name], header[other] = header[other], header[name]
        elif kind == "key":
            del entry[random.choice(list(entry))]
        elif kind == "odd":
            entry[random.choice(["dtype", "shape", "data_offsets", "more"])] = random.choice(_ODD)
        else:
            header["__metadata__"] = random.choice([*_ODD, {"format": "pt"}, {"format": "wisparse"}])
        return f"{kind} of {name}"

    return _header(random, _safetensors(random, folder), change)


def lying_length(random: Random, folder: Path) -> str:
    file = _safetensors(random, folder)
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    lie = random.choice([0, 1, 2, length - 1, length + 1, 2**31, 2**40, 2**63, 2**64 - 1, len(data), 100_000_000])
    file.write_bytes(struct.pack("<Q", lie) + data[8:])
    return f"{file.name}: {lie}"


def duplicate_key(random: Random, folder: Path) -> str:
    file = _pick(random, folder, "*.json", "*.safetensors")
    data = file.read_bytes()
    if file.suffix == ".safetensors":
        header, rest = split_safetensors(data)
        name = random.choice(list(header))
        text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}}}"
        file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + rest)
    else:
        document = json.loads(data)
        name = random.choice(list(document))
        value = random.choice([document[name], *_ODD])
        file.write_text(json.dumps(document)[:-1] + f", {json.dumps(name)}: {json.dumps(value)}}}")
    return f"{file.name}: {name}"


def odd_values(random: Random, folder: Path) -> str:
    """NaN, infinite, denormal, negative numbers among masks and weights."""
    file = _safetensors(random, folder)
    header, data = split_safetensors(file.read_bytes())
    name = random.choice([name for name in header if name != "__metadata__"])
    start, end = header[name]["data_offsets"]
    values = np.frombuffer(data[start:end], "<f4" if header[name]["dtype"] == "F32" else "<u2").copy()
    value = random.choice(_ODD_FLOATS)
    if values.dtype == np.uint16:  # bfloat16: the upper half of a float32
        value = int(np.float32(value).view(np.uint32)) >> 16
    values[random.randrange(len(values))] = value
    file.write_bytes(join_safetensors(header, data[:start] + values.tobytes() + data[end:]))
    return f"{file.name}: {name}"


def swap_tensors(random: Random, folder: Path) -> str:
    """Two tensors of one size change places: every length and name stays right."""
    file = _safetensors(random, folder)
    header, data = split_safetensors(file.read_bytes())
    offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    a = random.choice(offsets)
    b = random.choice([other for other in offsets if other[1] - other[0] == a[1] - a[0]])
    first, second = data[slice(*a)], data[slice(*b)]
    changed = bytearray(data)
    changed[slice(*a)], changed[slice(*b)] = second, first
    file.write_bytes(join_safetensors(header, bytes(changed)))
    return f"{file.name}: {a} and {b}"


# JSON files.


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a document."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return [(value, key) for key, _ in items] + [place for _, child in items for place in _places(child)]


def odd_json(random: Random, folder: Path) -> str:
    file = _json_file(random, folder)
    document = json.loads(file.read_bytes())
    # Containers near the top first: most of a tokenizer is vocabulary.
    places = _places(document)
    container, key = random.choice(places[: random.choice([10, 40, len(places)])])
    kind = random.choice(["replace", "replace", "replace", "remove", "rename", "copy"])
    if kind == "replace":
        container[key] = random.choice(_ODD)
    elif kind == "remove":
        del container[key]
    elif kind == "rename" and isinstance(container, dict):
        container[random.choice([key.upper(), key + "_", ""])] = container.pop(key)
    else:
        other, name = random.choice(places)
        container[key] = other[name] if name in other or (isinstance(other, list) and name < len(other)) else None
    try:
        text = json.dumps(document)
    except (ValueError, RecursionError):  # it contains itself now
        text = "{}"
    file.write_text(text, "utf-8", errors="surrogatepass")
    return f"{file.name}: {kind} {key!r:.60}"


def json_bomb(random: Random, folder: Path) -> str:
    file = _pick(random, folder, "*.json", "*.safetensors")
    depth, width = random.choice([50, 1_000, 200_000]), random.choice([10_000, 1_000_000])
    bomb = random.choice(
        [
            b"[" * depth,
            b'{"a":' * depth + b"1" + b"}" * depth,
            b'{"a":' + b"[" * depth + b"]" * depth + b"}",
            b'{"a":[' + b"[]," * width + b"[]]}",
            b"{" + b",".join(b'"%d":{}' % index for index in range(width // 10)) + b"}",
            b'{"a":' + b"9" * width + b"}",
            b'{"a":"' + b"\\u0000" * width + b'"}',
            b'{"a":NaN}',
            b'{"a":1e9999}',
            b'{"a":-Infinity}',
            b" " * width * 3,
            b'{"a":"' + b'\\"' * width,
        ]
    )
    if file.suffix == ".safetensors":
        file.write_bytes(struct.pack("<Q", len(bomb)) + bomb + split_safetensors(file.read_bytes())[1])
    else:
        document = file.read_bytes().rstrip()
        # On its own, or as one more value of a document that is otherwise right.
        file.write_bytes(bomb if random.random() < 0.5 else document[:-1] + b', "bomb": ' + bomb + b"}")
    return f"{file.name}: {bomb[:12]!r}"


def bad_index(random: Random, folder: Path) -> str:
    file = _plain(folder / "model.safetensors.index.json")
    document = json.loads(file.read_bytes())
    names = list(document["weight_map"])
    name = random.choice(names)
    shard = document["weight_map"][name]
    shutil.copyfile(_plain(folder / shard), folder.parent / "outside" / shard)
    (folder / "sub").mkdir(exist_ok=True)
    shutil.copyfile(folder / shard, folder / "sub" / shard)
    target = random.choice(
        [f"../outside/{shard}", str(folder.parent / "outside" / shard), f"sub/{shard}", f"./{shard}", f"sub/../{shard}",
         "..", "/dev/zero", "\0", shard + "\0", shard.upper(), "a" * 300 + ".safetensors", "x.safetensors",
         "wisparse.safetensors", "model.safetensors.index.json", f"{shard}/", "C:\\x.safetensors", *_ODD[-14:]]
    )  # fmt: skip
    if random.random() < 0.5:
        document["weight_map"] = {
            key: target if value == shard else value for key, value in document["weight_map"].items()
        }
    else:
        document["weight_map"][name] = target
    file.write_text(json.dumps(document))
    return f"{name} in {target!r:.60}"


# What the document says of its weights, its sparsity levels and its model.

_DIMENSIONS = [0, 1, -1, 3, 7, 2**16, 2**31, 2**40, 2**63, 1.5, True, None, "16"]
_REALS = [0, -1, 1e-320, 1e-30, 1e30, 1e300, 10**400, 2**63, True, None, "1", 0.5, 1.0]
_SCHEMES: dict[str, list[Any]] = {
    "num_bits": [0, 1, 2, 3, 4, 8, 16, 64, -4, 4.0, None, "4", 2**63],
    "group_size": [0, -1, 1, 2, 3, 5, 7, 8, 16, 128, 2**31, 2**63, None, "8"],
    "strategy": ["channel", "group", "tensor", "block", "token", "tensor_group", "", None, 3],
    "type": ["int", "float", "", None, 1],
    "symmetric": [True, False, None, 0, "false"],
    "actorder": ["group", "weight", "static", True, None],
    "block_structure": [[0, 0], [1, 1], [-1, 8], [2**40, 2**40], [8], "8x8", None],
    "weight_block_size": [[0, 0], [1, 1], [7, 3], [2**40, 2**40], [8], None],
    "format": ["pack-quantized", "int-quantized", "float-quantized", "dense", "marlin-24", "", None],
    "quant_method": ["gptq", "awq", "fp8", "compressed-tensors", "bitsandbytes", "", None],
    "bits": [0, 1, 2, 3, 4, 8, 32, -1, None],
    "desc_act": [True, None, "yes"],
    "sym": [True, False, None],
    "checkpoint_format": ["gptq", "gptq_v2", "marlin", None],
    "zero_point": [True, False],
    "version": ["gemm", "gemv", "exllama", None],
    "targets": [[], ["Linear"], ["re:(a+)+$"], ["re:("], ["re:.*q_proj"], ["*"], "Linear", [7]],
    "ignore": [[], ["lm_head"], ["re:(a+)+$"], ["re:.*"], ["model.layers.0.self_attn.q_proj"], ["x"] * 9999, None],
    "modules_to_not_convert": [["lm_head"], ["model.layers.0.mlp.up_proj"], [], None, "lm_head"],
    "quantization_status": ["frozen", "initialized", None],
    "sparsity_config": [{"format": "sparse-bitmask"}, {"format": "dense"}],
    "kv_cache_scheme": [{"num_bits": 8, "type": "float"}],
    "output_activations": [{"num_bits": 8}],
    "transform_config": [{"config_groups": {"a": {}}}],
}


def _change_document(folder: Path, name: str, change: Callable[[dict[str, Any]], str]) -> str:
    file = _plain(folder / name)
    document = json.loads(file.read_bytes())
    what = change(document)
    try:
        file.write_text(json.dumps(document))
    except ValueError:  # an integer that Python does not write out
        file.write_text("{}")
    return f"{name}: {what}"


def lying_scheme(random: Random, folder: Path) -> str:
    """What ``quantization_config`` says of how weights are stored; a plain bundle claims to be quantised."""

    def change(document: dict[str, Any]) -> str:
        scheme = document.setdefault("quantization_config", {"quant_method": random.choice(_SCHEMES["quant_method"])})
        inner = [scheme, *(place[key] for place, key in _places(scheme) if isinstance(place[key], dict))]
        where = random.choice(inner)
        key = random.choice([key for key in where if key in _SCHEMES] or list(_SCHEMES))
        if random.random() < 0.15:
            document.pop("quantization_config")
            return "no quantization_config"
        where[key] = random.choice(_SCHEMES[key])
        return f"quantization_config {key} {where[key]!r:.60}"

    return _change_document(folder, "config.json", change)


def lying_dimensions(random: Random, folder: Path) -> str:
    """Dimensions and numbers of the model that its weights, or arithmetic, cannot have."""

    def change(document: dict[str, Any]) -> str:
        numbers = [(place, key) for place, key in _places(document) if type(place[key]) in (int, float)]
        place, key = random.choice(numbers)
        place[key] = random.choice(_DIMENSIONS if isinstance(place[key], int) else _REALS)
        return f"{key} {place[key]!r:.60}"

    return _change_document(folder, "config.json", change)


def lying_levels(random: Random, folder: Path) -> str:
    """Sparsity levels of the recipe in another order, twice, without one that is in force, too many, or with other numbers."""

    def change(document: dict[str, Any]) -> str:
        levels = document["levels"]
        kind = random.choice(["reverse", "twice", "drop", "many", "default", "number", "projections", "blocks", "none"])
        level = random.choice(levels)
        if kind == "reverse":
            levels.reverse()
            level["projections"].reverse()
        elif kind == "twice":
            levels.append(level)
        elif kind == "drop":
            levels.remove(level)
        elif kind == "many":
            levels *= random.choice([17, 300])
        elif kind == "default":
            document["default"] = random.choice([0, 0.31, 1, -0.5, None, "0.5", True, levels[0]["sparsity"]])
        elif kind == "number":
            level["sparsity"] = random.choice([0, 0.951, 1, 2, -0.1, 1e-9, None, True])
        elif kind == "projections":
            entry = random.choice(level["projections"])
            entry[random.choice(list(entry))] = random.choice([*_REALS, "x", "lm_head", "model.layers.9.x"])
        elif kind == "blocks":
            level["block_sparsities"] = random.choice([[], [0.5], [0.5] * 10_000, [None, None], "0.5"])
        else:
            document["levels"] = random.choice([[], {}, None, [[]], [None]])
        return kind

    return _change_document(folder, "wisparse.json", change)


def odd_codes(random: Random, folder: Path) -> str:
    """Whole tensors of codes, scales, zero points, shapes and orders of channels, or of masks, with other content."""
    file = _safetensors(random, folder)
    header, data = split_safetensors(file.read_bytes())
    parts = ("_packed", "_scale", "_zero_point", "_shape", "qweight", "qzeros", "scales", "g_idx", "scale_inv",
             "threshold", "channel_scale", "sparsity")  # fmt: skip
    names = [name for name in header if name.endswith(parts)]
    name = random.choice(names or [name for name in header if name != "__metadata__"])
    start, end = header[name]["data_offsets"]
    size = end - start
    kinds: dict[str, bytes] = {
        "zeros": bytes(size),
        "ones": b"\xff" * size,
        "signs": b"\x80" * size,
        "random": random.randbytes(size),
        "backwards": data[start:end][::-1],
        "largest": (b"\x7f" * size),
        "infinite": (b"\x00\x00\x80\x7f" * size)[:size],
        "turned": data[start + size // 2 : end] + data[start : start + size // 2],
    }
    kind = random.choice(list(kinds))
    file.write_bytes(join_safetensors(header, data[:start] + kinds[kind] + data[end:]))
    return f"{file.name}: {name} {kind}"


def lying_findings(random: Random, folder: Path) -> str:
    """Report and card as another's: ``--save`` reads both."""
    finding = {"what": "tok/s", "conditions": "c", "sparsity": 0.5, "dense": 1.0, "sparse": 2.0,
               "dense_stderr": None, "sparse_stderr": None}  # fmt: skip
    finding[random.choice(list(finding))] = random.choice(_ODD)
    report = random.choice([{"findings": [finding]}, {"findings": [finding] * 1001}, {"findings": None}, [finding]])
    text = json.dumps(report)
    (folder / "conversion_report.json").write_text(text, "utf-8", errors="surrogatepass")
    marks = ("<!-- measured since the conversion -->", "<!-- end of what was measured since -->")
    card = random.choice(["", marks[0], marks[1] + marks[0], "\n".join(marks) * 3, "\udcff", "x" * 40_000_000])
    (folder / "README.md").write_text(card, "utf-8", errors="surrogateescape")
    return text[:100]


# Text that is a program.


def bad_tokenizer(random: Random, folder: Path) -> str:
    file = _plain(folder / "tokenizer.json")
    document = json.loads(file.read_bytes())
    vocab = document["model"]["vocab"]
    kind = random.choice(
        ["ids", "huge", "long", "merges", "deep", "type", "regex", "added", "empty", "unknown", "template", "pattern"]
    )
    if kind == "ids":
        vocab[random.choice(list(vocab))] = random.choice([2**31, 2**32 - 1, 2**32, -1, 300, 0])
    elif kind == "huge":
        vocab |= {f"token{index}": index for index in range(300, 200_000)}
    elif kind == "long":
        vocab["x" * 1_000_000] = 300
    elif kind == "merges":
        document["model"]["merges"] = random.choice([[["a", "b"]], ["a b c"], [["a"]], 7, [["\u0120", "t"]] * 1000])
        document["model"]["continuing_subword_prefix"] = random.choice([None, "##", "\u00e9"])
    elif kind == "deep":
        document["normalizer"] = None
        for _ in range(random.choice([30, 100, 300])):
            document["normalizer"] = {"type": "Sequence", "normalizers": [document["normalizer"] or {"type": "NFC"}]}
    elif kind == "type":
        document["model"]["type"] = random.choice(["Unigram", "WordLevel", "Evil", None])
    elif kind == "regex":
        pattern = random.choice(["(a+)+$", "(", "(?<=a{1,1000}){1000}", "\\p{Nope}", "(x*)*y"])
        document["normalizer"] = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "a"}
    elif kind == "added":
        added = {
            "id": random.choice([0, 257, 2**31]),
            "content": random.choice(["", "a", "x" * 100_000]),
            "special": True,
        }
        flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
        document["added_tokens"].append(added | flags)
    elif kind == "unknown":
        document["model"]["unk_token"] = "nothing"
        del vocab[random.choice(list(vocab))]
    elif kind == "template":
        pieces = [{"SpecialToken": {"id": "nothing", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        document["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces}
        document["post_processor"]["special_tokens"] = {}
    elif kind == "pattern":
        empty = {"type": "Replace", "pattern": random.choice([{"String": ""}, {"Regex": "x*"}]), "content": "\u2581"}
        prepend = {"type": "Prepend", "prepend": random.choice(["", "\u2581"])}
        document["normalizer"] = {"type": "Sequence", "normalizers": [prepend, empty]}
    else:
        document["model"]["vocab"] = {}
    file.write_text(json.dumps(document))
    return kind


_TEMPLATES = (
    "",
    "\0",
    "{% if",
    "{{ messages }}",
    "{{ messages[99].x.y }}",
    "{{ raise_exception('\x1b[2J') }}",
    # Out of the sandbox.
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ [1].append(2) }}",
    "{% include '/etc/passwd' %}",
    # Never done.
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n - 1) if n else 'x' }}{{ m(n - 1) if n else 'x' }}{% endmacro %}{{ m(60) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 9**9**9 }}",
    # More than memory.
    "{{ 'x' * 10**12 }}",
    "{{ range(10**9) | list }}",
    "{{ 'x'.ljust(10**10) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:9999999999d}'.format(1) }}",
    "{{ '\t'.expandtabs(10**10) }}",
    "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "{{ ('b' * 10**6).join(('a' * 10**6) | list) }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
    "{% set n = namespace(s=['x']) %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
)


def bad_template(random: Random, folder: Path) -> str:
    text = random.choice(_TEMPLATES)
    _plain(folder / "chat_template.jinja").write_text(text)
    return text[:60]


MUTATIONS: dict[str, Mutation] = {
    mutation.__name__: mutation
    for mutation in (
        *(truncate, append, flip_bits, splice, wrong_utf8, swap_files, remove, huge_file),
        *(not_a_file, more_files, many_files),
        *(lying_header, lying_length, duplicate_key, odd_values, swap_tensors),
        *(odd_json, json_bomb, bad_index, bad_tokenizer, bad_template),
        *(lying_scheme, lying_dimensions, lying_levels, odd_codes, lying_findings),
    )
}
