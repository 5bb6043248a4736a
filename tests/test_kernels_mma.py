"""The numbers that the tensor cores' products make of codes, worked out from the instructions themselves."""

import re

import pytest
import torch

from wisparse.kernels.gpu.packed_gemv import INT8_OFFSET, VALUE_SCALE, code_unit, product_source, sum_source
from wisparse.kernels.gpu.weights import BITS

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
