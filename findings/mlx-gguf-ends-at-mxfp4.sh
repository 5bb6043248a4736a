#!/usr/bin/env bash
# mlx 0.32.4 with gguf 0.19.0: `mx.load` of a GGUF file that has tensors in MXFP4, as every GGUF file of gpt-oss has its experts, or in
# TQ2_0 (BitNet).
#
# Guess: they become float16, as the documentation of `mx.load` says of "unsupported quantization formats", or there is an error, as
# there is for Q5_0 and IQ4_NL.
# Seen: the first tensor of such a type ends the list. It and all that follow, of any type, are missing in the result: of a file with
# 27 tensors, in the order of llama.cpp's converter, 6 are loaded. Fields of the header are complete, and nothing is printed.
# Ends with an error if this changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "mlx[cpu]==0.32.4" gguf==0.19.0 numpy
"$folder/venv/bin/python" - "$folder" <<'PY'
import sys
from importlib.metadata import version
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Type

values = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
ATTENTION = [f"attn_{name}.weight" for name in ("norm", "q", "k", "v", "output")]
EXPERTS = [f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")]


def write(path, kind):
    """Three blocks of gpt-oss: experts in ``kind``, all other tensors in float32. Returns the names."""
    writer = gguf.GGUFWriter(path, "gpt-oss")
    writer.add_block_count(3)
    names = ["token_embd.weight"]
    for block in range(3):
        names += [f"blk.{block}.{name}" for name in (*ATTENTION, *EXPERTS)]
    names += ["output_norm.weight", "output.weight"]
    for name in names:
        if name.split(".", 2)[-1] in EXPERTS:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [tensor.name for tensor in gguf.GGUFReader(path).tensors] == names
    return names


print(*(f"{name} {version(name)}" for name in ("mlx", "gguf")))
for kind in (Type.BF16, Type.Q8_0, Type.MXFP4, Type.TQ2_0):
    path = Path(sys.argv[1], f"{kind.name}.gguf")
    names = write(path, kind)
    loaded, fields = mx.load(str(path), return_metadata=True)
    found = [name for name in names if name in loaded]
    print(f"{kind.name}: {len(found)} of {len(names)} tensors, the last is {found[-1]}; fields: {sorted(fields)}")
    assert found == (names if kind in (Type.BF16, Type.Q8_0) else names[:6]) and len(fields) == 2
path = Path(sys.argv[1], "refused.gguf")
write(path, Type.Q5_0)
try:
    mx.load(str(path))
except RuntimeError as error:
    print("Q5_0:", error)
else:
    raise SystemExit("expected an error for Q5_0")
PY
