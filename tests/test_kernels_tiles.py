"""Which kernel and tile a linear gets, without a GPU: whatever the shape and the chip, its spinning reducers have room. And the
numbers that the tensor cores' products make of codes, worked out from the instructions themselves."""

import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from triton_decoder_cases import make_bundle

from wisparse.formats.block_ops import describe
from wisparse.formats.errors import UsageError
from wisparse.kernels.gpu import packed_gemv, products, tiles
from wisparse.kernels.gpu.packed_gemv import INT8_OFFSET, VALUE_SCALE, code_unit, product_source, sum_source
from wisparse.kernels.gpu.products import choose, choose_product
from wisparse.kernels.gpu.tiles import Gpu, Tile, choose_tile, measured_tiles, tuned_file
from wisparse.kernels.gpu.weights import BITS, LinearShape, padded_width
from wisparse.runtime.cuda import kernel_times
from wisparse.runtime.cuda.decoder import CudaDecoder
from wisparse.runtime.cuda.kernel_times import neighbours
from wisparse.runtime.cuda.step import DecodeStep
from wisparse.runtime.torch.decoder import TorchDecoder

META = torch.device("meta")
H200 = Gpu(90, 132)
shapes = st.tuples(st.integers(16, 40_000), st.lists(st.integers(16, 40_000), min_size=1, max_size=3).map(tuple))
kinds = st.sampled_from(["sparse", "dense", "rows", "batch", "wide"])


def shape_of(k: int, widths: tuple[int, ...], quant: str = "none", group: int = 0, **changes) -> LinearShape:
    stride = sum(map(padded_width, widths)) * BITS[quant] // 32 if quant != "none" else sum(widths)
    return LinearShape(k, widths, stride, torch.bfloat16, META, False, quant, group)._replace(**changes)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WISPARSE_CACHE", str(tmp_path))


def has_room(tile: Tile, multiprocessors: int, widths: tuple[int, ...]) -> bool:
    """No tile spans two projections, so widths that are no multiples of a tile's have more of them."""
    return tile.reducers * sum(-(-width // tile.block_n) for width in widths) <= multiprocessors


@given(shapes, st.integers(1, 200), kinds)
def test_spinning_reducers_of_any_shape_have_room(shape, multiprocessors, kind):
    gpu = Gpu(90, multiprocessors)
    tile = tiles.default_tile(gpu, shape_of(*shape), kind)
    assert has_room(tile, multiprocessors, shape[1])
    most = replace(tile, reducers=tiles.most_reducers(gpu, shape[1], tile))
    for tried in (most, *neighbours(tile, kind, shape[1], gpu)):
        assert has_room(tried, multiprocessors, shape[1])  # and Tile does not refuse it
    assert 1 <= tile.splits <= max(1, shape[0] // 64)
    if kind == "batch":  # no program without a block of channels
        assert tile.splits <= -(-shape[0] // tile.block_k)


@pytest.mark.parametrize("multiprocessors", [132, 78, 8])
def test_the_measured_tiles_fit_smaller_chips_of_the_same_generation(multiprocessors):
    rows = {"dense": 1, "sparse": 1, "rows": 2, "batch": 3, "wide": 17}
    for key, tile in measured_tiles().items():
        _, kind, *quant, size = key.split(":")
        if kind.startswith("mask"):
            continue
        k, n = map(int, size.split("x"))
        name, group = (*quant[0].split("-"), k)[:2] if quant else ("none", 0)
        shape = shape_of(k, (n,), name, int(group), dense=kind == "dense")
        chosen, origin = choose_tile(Gpu(90, multiprocessors), shape, rows[kind])
        assert origin.startswith("measured")
        assert has_room(chosen, multiprocessors, (n,))
        assert chosen == tile or (multiprocessors < 132 and chosen.reducers < tile.reducers)


KEY, SQUARE = "sm90:sparse:4096x4096:1:bfloat16", shape_of(4096, (4096,))


def test_a_tuned_tile_is_taken_before_the_table():
    tile, table = Tile(128, 4, 10, 2), measured_tiles()["sm90:sparse:4096x4096"]
    products.remember_tiles({KEY: tile})
    assert choose_tile(H200, SQUARE, 1) == (tile, "tuned here")
    # Not for what it was not measured with.
    assert choose_tile(H200, shape_of(4096, (4096,), dtype=torch.float16), 1)[0] == table
    assert choose_tile(H200, SQUARE, 2)[0] != tile
    assert list(tuned_file().parent.iterdir()) == [tuned_file()]  # no temporary file is left


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_n": 0}, "block_n: expected an integer of at least 1, found 0"),
        ({"block_k": -4}, "block_k"),
        ({"block_k": 3}, "block_k: expected a power of two, found 3"),
        ({"splits": "8"}, "splits"),
        ({"warps": 2.0}, "warps"),
        ({"stages": None}, "stages"),
        ({"trigger": 0}, "trigger"),
        ({"reducers": -1}, "reducers: expected an integer of at least 0, found -1"),
        ({"reducers": 3}, "power of two up to splits"),
        ({"reducers": 16}, "power of two up to splits"),
        # Seen on a GPU: one of two threads that polled a sum saw the last one arrive, its double had not.
        ({"block_n": 64, "splits": 4, "warps": 4, "reducers": 4}, "for every thread"),
    ],
)
def test_an_impossible_tile_is_refused_and_in_the_cache_told_and_ignored(changes, message, caplog):
    fields = {"block_n": 128, "block_k": 4, "splits": 10, "warps": 2} | changes
    with pytest.raises(ValueError, match=message):
        Tile(**fields)
    tuned_file().write_text(json.dumps({KEY: fields}), "utf-8")
    assert choose_tile(H200, SQUARE, 1)[0] == measured_tiles()["sm90:sparse:4096x4096"]
    assert str(tuned_file()) in caplog.text
    assert message.split(":")[0] in caplog.text


@pytest.mark.parametrize(("reducers", "multiprocessors"), [(2, 3), (4, 7), (4, 8)])
def test_a_launch_whose_programs_would_wait_for_ever_is_refused(reducers, multiprocessors):
    """Two tiles, of projections that are no multiple of one: each reducer waits for all others."""
    shape, tile = shape_of(64, (40, 40)), Tile(block_n=64, splits=4, warps=2, reducers=reducers)
    if 2 * reducers <= multiprocessors:
        assert choose_product(shape, 1, gpu=Gpu(90, multiprocessors), tile=tile).tile == tile
    else:
        with pytest.raises(ValueError, match=f"at most {multiprocessors} programs .* found {2 * reducers}"):
            choose_product(shape, 1, gpu=Gpu(90, multiprocessors), tile=tile)
    with pytest.raises(ValueError, match="at most 1 programs that wait for each other on cpu"):
        choose_product(
            shape_of(64, (40, 40), device=torch.device("cpu")), 1, tile=tile
        )  # the interpreter runs one after the other


def test_a_plan_follows_the_environment_also_after_the_first(monkeypatch):
    for value, reducers in ((None, 8), ("0", 0), ("1", 8), ("0", 0)):
        if value is not None:
            monkeypatch.setenv("WISPARSE_SPINNING", value)
        assert choose_product(SQUARE, 1).tile.reducers == reducers


# For each place: rows, weights, what the product is with a mask, and where nothing is dropped or the input comes masked.
NATIVE, INT8, ODD = ("none", 0), ("int8", 4096), ("int4", 48)  # the last: groups that no tensor core kernel takes
QKV, OUT, GATE_UP, UNMEASURED = (4096, 1024, 1024), (4096,), (14336, 14336), (960, 320)
CHOICES = [
    ("step", 1, NATIVE, QKV, "sparse_gemv, masks", "sparse_gemv"),
    ("step", 2, NATIVE, QKV, "sparse_gemv, masks", "fused_gemm"),
    ("step", 16, NATIVE, QKV, "fused_gemm, masks", "fused_gemm"),
    ("step", 1, INT8, QKV, "packed_gemv, masks", "packed_gemv"),
    ("step", 16, INT8, QKV, "packed_gemv, masks", "packed_gemv"),
    ("step", 1, ODD, QKV, "sparse_gemv, masks", "sparse_gemv"),
    ("step", 8, ODD, QKV, "fused_gemm, masks", "fused_gemm"),
    ("rows", 32, NATIVE, GATE_UP, "gemm 32, masks", "cuBLAS"),
    ("rows", 32, NATIVE, UNMEASURED, "cuBLAS, copies 3 1, batched", "cuBLAS"),
    ("rows", 32, NATIVE, OUT, "cuBLAS, copies 1", "cuBLAS"),
    ("rows", 32, INT8, QKV, "packed_gemv, masks", "packed_gemv"),
    ("rows", 32, ODD, QKV, "cuBLAS, copies 1 1 1", "cuBLAS"),  # no such step is made
    ("prompt", 16, NATIVE, QKV, None, "cuBLAS"),
    ("prompt", 128, INT8, QKV, None, "gemm 128"),
    ("prompt", 129, INT8, QKV, None, "cuBLAS"),
    ("prompt", 16, ODD, QKV, None, "cuBLAS"),
    ("plugin", 2, NATIVE, QKV, "sparse_gemv, masks", "sparse_gemv, masks"),
    ("plugin", 8, NATIVE, UNMEASURED, "fused_gemm, masks", "cuBLAS"),
    ("plugin", 64, NATIVE, GATE_UP, "gemm 64, masks", "cuBLAS"),
    ("plugin", 512, NATIVE, QKV, "cuBLAS, copies 4 1 1, batched", "cuBLAS"),
    ("plugin", 513, NATIVE, QKV, "cuBLAS, copies 1 1 1", "cuBLAS"),
    ("plugin", 16, INT8, QKV, "packed_gemv, masks", "packed_gemv"),
    ("plugin", 17, INT8, QKV, "packed_gemv, masks", "packed_gemv"),
    ("plugin", 33, INT8, QKV, "gemm 64, copies 1 1 1", "gemm 64"),
    ("plugin", 129, INT8, QKV, "cuBLAS, copies 1 1 1", "cuBLAS"),
]


@pytest.mark.parametrize(("place", "rows", "weights", "widths", "masked", "ready"), CHOICES)
def test_the_product_of_each_place(place, rows, weights, widths, masked, ready) -> None:
    shape = shape_of(4096, widths, *weights)
    unmasked = (shape._replace(dense=True), {}) if place == "step" else (shape, {"ready": True})
    for expected, (of, options) in ((masked, (shape, {})), (ready, unmasked)):
        product = choose_product(of, rows, place, gpu=H200, **options)
        block_m = f" {product.tile.block_m}" if product.kernel == "gemm" else ""
        copies = f", copies {' '.join(map(str, product.copies))}" * bool(product.copies)
        found = f"{product.kernel}{block_m}{copies}{', masks' * product.masks}{', batched' * product.batched}"
        assert expected in (None, found)
        assert str(product).startswith(product.kernel)


def test_experts_have_a_product_for_steps_and_one_for_prompts() -> None:
    for weights, kernel in ((NATIVE, "sparse_gemv"), (INT8, "packed_gemv")):
        shape = shape_of(4096, (768, 768), *weights, experts=128, chosen=8)
        step, prompt = (choose_product(shape, 4, place, gpu=H200) for place in ("step", "prompt"))
        assert (step.kernel, step.pairs) == (kernel, 32)
        assert (prompt.kernel, prompt.tile.block_m) == ("expert_gemm", 16)


def test_which_weights_are_multiplied_on_the_tensor_cores() -> None:
    for block_n, changes, why_not in (
        (256, {}, ""),
        (64, {}, "a lane would not read 4, 8 or 16 bytes in tiles of 64 columns"),
        (256, {"dtype": torch.float32}, "float32 activations"),
        (256, {"device": torch.device("cpu")}, "the interpreter has no tensor cores"),
        (256, {"group": 48}, "no power of two"),
        (256, {"group": 8}, "no power of two of at least 16"),
        (256, {"quant": "int8", "group": 4096, "stride": 1536}, ""),
    ):
        shape = shape_of(4096, (6144,), "int4", 128)._replace(**changes)
        chosen = choose_product(shape, 1, gpu=H200, tile=Tile(block_n, 1, 8, 4))
        assert why_not in chosen.why_not_packed
        assert (chosen.packed is None) == ("not packed_gemv: " in str(chosen)) == bool(why_not)


# What Triton 3.6 takes on sm_90 to reduce the splits of 1, 4, 8 and more rows; 3.7 takes a quarter. Of more than 16 rows
# the last program adds one split at a time.
@pytest.mark.parametrize(
    ("rows", "warps", "of_triton"),
    [(1, 4, 2048), (4, 4, 8192), (4, 8, 16384), (8, 2, 8192), (8, 4, 16384), (16, 4, 16384), (8, 8, 32768), (32, 8, 8192)],
)  # fmt: skip
@pytest.mark.parametrize("quant", ["int4", "int8"])
def test_lists_fit_beside_what_triton_takes_to_reduce_splits(rows: int, warps: int, of_triton: int, quant: str) -> None:
    block_n = 64 * warps if quant == "int4" else 32 * warps
    for k, splits in ((4096, 4), (4096, 2), (14336, 4), (2560, 1)):
        tile = Tile(max(block_n, 128), 1, splits, warps, stages=1, chunk=128)
        chosen = choose_product(shape_of(k, (7168, 7168), quant, 128), rows, gpu=H200, tile=tile)
        assert chosen.launch is not None
        declared = re.search(r"smem\[(\d+)\]", chosen.launch.smem)
        assert declared is not None
        assert chosen.packed is not None
        assert int(declared[1]) + of_triton <= 48 * 1024


def test_tensor_cores_that_flush_subnormal_numbers_get_the_dequantizing_kernel(monkeypatch):
    """The check's answer decides; the check itself runs on GPUs (triton_codes_cases.py)."""
    shape = shape_of(4096, (6144,), "int4", 128, device=torch.device("cuda", 0))
    monkeypatch.setattr(tiles, "gpu_of", lambda device: H200)
    for keeps in (True, False):
        monkeypatch.setattr(packed_gemv, "keeps_subnormals", lambda device, dtype, keeps=keeps: keeps)
        choose.cache_clear()
        chosen = choose_product(shape, 1)
        assert (chosen.packed is not None) == keeps
        assert chosen.kernel == ("packed_gemv" if keeps else "sparse_gemv")
    assert "the tensor cores of cuda:0 flush subnormal bfloat16 numbers" in str(chosen)
    choose.cache_clear()


def test_plans_are_printed() -> None:
    assert str(choose_product(SQUARE, 1)) == (
        "sparse_gemv (sparse), bfloat16, 4096 x 4096, 1 row: 16 tiles of 256 columns x 20 splits = 320 programs of 4 "
        "warps; 8 spinning reducers a tile; tile: measured (tiles.json)"
    )
    # One line for each linear that differs from the others; what no GPU runs is refused.
    bundle = make_bundle("llama", 0.5)
    for name, mask in list(bundle.masks.items()):
        if "layers.0" in name and name.endswith("down_proj"):
            bundle.masks[name] = replace(mask, threshold=0.0, sparsity=0.0)
    settings = {"device": torch.device("cpu"), "dtype": torch.float32, "max_seq_len": 16, "max_batch": 2}
    shown = kernel_times.explain(CudaDecoder(bundle, **settings), batch=1).splitlines()
    operations = describe(bundle.config)
    assert shown[: len(operations)] == operations
    lines = shown[len(operations) :]
    assert [line.split(":")[0] for line in lines] == [
        "qkv (2 blocks)", "o (2 blocks)", "gate_up (2 blocks)", "down (block 0)", "down (block 1)",
    ]  # fmt: skip
    assert "sparse_gemv (dense), float32, 88 x 48, 1 row" in lines[3]
    with pytest.raises(UsageError, match="--explain: expected the triton back end"):
        kernel_times.explain(TorchDecoder(bundle, **settings), batch=1)


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (3, 4), (5, 8)])
def test_tuning_times_the_step_that_the_decoder_runs(batch, rows, monkeypatch):
    bundle, ran = make_bundle("llama", 0.5), []
    settings = {"device": torch.device("cpu"), "dtype": torch.float32, "max_seq_len": 16, "max_batch": batch}
    decoder = CudaDecoder(bundle, **settings)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda other: 1.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: event)
    monkeypatch.setattr(CudaDecoder, "prefill", lambda *_: None)
    monkeypatch.setattr(DecodeStep, "replay", lambda step: ran.append((type(step), step.rows)))
    kernel_times.tune(decoder, batch=batch)
    ran_by_the_decoder = decoder.step_for(batch, 150)
    assert set(ran) == {(type(ran_by_the_decoder), ran_by_the_decoder.rows)}
    assert ran_by_the_decoder.rows == rows


@given(
    k=st.integers(1, 300).map(lambda n: 16 * n), splits=st.integers(1, 64), unroll=st.integers(1, 8),
    chunk=st.integers(1, 200), batch=st.integers(1, 32), grouped=st.booleans(),
)  # fmt: skip
def test_lists_hold_what_is_read_ahead(k, splits, unroll, chunk, batch, grouped):
    shape = shape_of(k, (512,), "int4", 16 if grouped else k, dtype=torch.float16)
    chosen = choose_product(shape, batch, gpu=H200, tile=Tile(256, 1, splits, 4, unroll=unroll, chunk=chunk))
    if chosen.packed is None:
        return
    launch, block_k = chosen.launch, 16 * chosen.packed.steps
    channels = math.ceil(math.ceil(k / launch.chunk) / splits) * launch.chunk
    x_tiles = chosen.packed.x_tiles
    assert channels <= launch.segment * x_tiles
    # One pipeline stage beyond the last, or one tile of x.
    assert (math.ceil(channels / block_k) * block_k + block_k if x_tiles == 1 else launch.segment) <= launch.length
    assert x_tiles == 1 or launch.segment % chosen.packed.slot == 0
    assert (chosen.packed.slot % block_k, launch.length % 16) == (0, 0)


DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def execute(name: str, numbers: list[int]) -> int:
    if name == "prmt":
        both = numbers[0] | numbers[1] << 32
        return sum((both >> 8 * (numbers[2] >> 4 * i & 7) & 255) << 8 * i for i in range(4))
    if name == "lop3":
        result = 0
        for row in range(8):
            if numbers[3] >> row & 1:
                a, b, c = (number if row >> 2 - i & 1 else ~number for i, number in enumerate(numbers[:3]))
                result |= a & b & c
        return result & 0xFFFFFFFF
    return {"and": numbers[0] & numbers[-1], "shl": numbers[0] << numbers[-1], "mov": numbers[0]}[name] & 0xFFFFFFFF


def left_operands(source: str, words: list[int], first: int) -> list[list[int]]:
    """The registers of the left operand of each product in ``source``, whose operands from ``first`` on are ``words``."""
    registers, found = {f"${first + i}": word for i, word in enumerate(words)}, []
    for instruction in re.split(r";\s*", source.strip("{} ")):
        if instruction.startswith("mma"):
            names = re.findall(r"\{(a\S*, .*?)\}", instruction)[0].split(", ")
            found.append([registers[name] for name in names])
        elif instruction and not instruction.startswith(".reg"):
            name, operands = instruction.split(" ", 1)
            target, *given = operands.split(", ")
            numbers = [registers[operand] if operand in registers else int(operand, 0) for operand in given]
            registers[target] = execute(name.removesuffix(".b32"), numbers)
    return found


def halves(bits: int, dtype: torch.dtype) -> list[float]:
    return torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.int16).view(dtype).double().tolist()


@pytest.mark.parametrize("kind", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_every_code_is_its_number_in_every_place(kind: str, dtype: str, parts: int) -> None:
    bits, columns = BITS[kind], 32 // BITS[kind]
    source, constraints = product_source(kind, dtype, parts)
    sums = 2 * columns * parts
    assert constraints.count("=f") == sums
    unit = code_unit(kind, dtype) / VALUE_SCALE[dtype]
    generator = torch.Generator().manual_seed(0)
    for code in range(2**bits):
        if kind == "fp8" and code & 127 == 127:
            continue  # NaN: no checkpoint that is read has one
        fp8 = float(torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).double())
        meaning = {"int4": code, "int8": (code ^ 128) - 128 + INT8_OFFSET, "fp8": fp8}[kind]
        for column in range(columns):
            for channel in range(4):
                # All others hold anything: nothing of a neighbour may be left in a number.
                codes = torch.randint(2**bits, (4, columns), generator=generator).tolist()
                codes[channel][column] = code
                words = [sum(each << bits * i for i, each in enumerate(row)) for row in codes]
                products = left_operands(source, words, sums)
                assert len(products) == columns // 2 * parts
                registers = products[column // 2 * parts]
                assert products[column // 2 * parts + parts - 1] == registers
                # Registers 0 and 1 are the first two channels of the first and the second column, 2 and 3 the others.
                found = halves(registers[column % 2 + 2 * (channel // 2)], DTYPES[dtype])[channel % 2]
                assert found == meaning * unit * (16 if kind == "int4" and column % 2 else 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_x_is_scaled_exactly_and_added_up_in_the_unit_of_integers(dtype: str) -> None:
    (registers,) = left_operands(sum_source(dtype)[0], [], 4)
    assert code_unit("int8", dtype) == code_unit("int4", dtype)
    ones = {number for register in registers for number in halves(register, DTYPES[dtype])}
    assert ones == {code_unit("int4", dtype) / VALUE_SCALE[dtype]}
    # The powers of two leave every x of real models as it is, and the smallest products of such normal numbers.
    large = 2.0**31 if dtype == "bfloat16" else torch.finfo(torch.float16).max
    x = torch.tensor([1e-6, 0.1, 3.0, 6e4, large], dtype=DTYPES[dtype])
    scaled = (x.float() * VALUE_SCALE[dtype]).to(x.dtype)
    assert torch.equal(scaled.double(), x.double() * VALUE_SCALE[dtype])
    for codes in BITS:
        smallest = code_unit(codes, dtype) * (2.0**-9 if codes == "fp8" else 1.0)
        assert smallest * 1e-6 > torch.finfo(torch.float32).tiny
