"""The numbers that the tensor cores' products make of codes, worked out from the instructions themselves."""

from __future__ import annotations

import re

import pytest
import torch

from wisparse.kernels.gpu.packed_gemv import INT8_OFFSET, code_unit, product_source, sum_source, value_scale

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = ("int4", "int8", "fp8")
BITS = {"int4": 4, "int8": 8, "fp8": 8}


class Machine:
    """Registers, and those instructions of PTX that work on their bits."""

    def __init__(self, registers: dict[str, int]) -> None:
        self.registers = registers

    def value(self, operand: str) -> int:
        return self.registers[operand] if operand in self.registers else int(operand, 0)

    def run(self, instruction: str) -> None:
        name, operands = instruction.split(" ", 1)
        target, *given = [operand.strip() for operand in operands.split(",")]
        numbers = [self.value(operand) for operand in given]
        name = name.removesuffix(".b32").removesuffix(".u32")
        if name == "prmt":
            both = numbers[0] | numbers[1] << 32
            picked = [both >> 8 * (numbers[2] >> 4 * i & 7) & 255 for i in range(4)]
            result = sum(byte << 8 * i for i, byte in enumerate(picked))
        elif name == "lop3":
            result = 0
            for row in range(8):
                if numbers[3] >> row & 1:
                    a, b, c = (number if row >> 2 - i & 1 else ~number for i, number in enumerate(numbers[:3]))
                    result |= a & b & c
        else:
            result = {"and": lambda a, b: a & b, "shl": lambda a, b: a << b, "mov": lambda a: a}[name](*numbers)
        self.registers[target] = result & 0xFFFFFFFF


def operands(source: str, words: list[int], first: int) -> list[list[int]]:
    """The bits of the left operand of each product of ``source``, whose words are its operands from ``first`` on."""
    machine = Machine({f"${first + i}": word for i, word in enumerate(words)})
    found = []
    for instruction in re.split(r";\s*", source.strip("{} ")):
        if instruction.startswith("mma"):
            found.append(
                [machine.registers[name] for name in re.findall(r"\{(a\S*, .*?)\}", instruction)[0].split(", ")]
            )
        elif instruction and not instruction.startswith(".reg"):
            machine.run(instruction)
    return found


def halves(bits: int, dtype: torch.dtype) -> list[float]:
    """The two numbers in a register."""
    return torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(torch.int16).view(dtype).double().tolist()


def meaning(kind: str, code: int) -> float:
    """What a product's sum has of a code in it, in units."""
    if kind == "int4":
        return float(code)
    if kind == "int8":
        return float((code ^ 128) - 128) + INT8_OFFSET
    return float(torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn).double())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_every_code_is_its_number_in_every_place(kind: str, dtype: str, parts: int) -> None:
    bits, columns = BITS[kind], 32 // BITS[kind]
    source, constraints = product_source(kind, dtype, parts)
    sums = 2 * columns * parts
    assert constraints.count("=f") == sums
    unit = code_unit(kind, dtype) / value_scale(dtype)
    generator = torch.Generator().manual_seed(0)
    for code in range(2**bits):
        if kind == "fp8" and code & 127 == 127:
            continue  # NaN: no checkpoint that is read has one
        for column in range(columns):
            for channel in range(4):
                # All others hold anything: nothing of a neighbour may be left in a number.
                codes = torch.randint(2**bits, (4, columns), generator=generator).tolist()
                codes[channel][column] = code
                words = [sum(each << bits * i for i, each in enumerate(row)) for row in codes]
                products = operands(source, words, sums)
                assert len(products) == columns // 2 * parts
                registers = products[column // 2 * parts]
                assert products[column // 2 * parts + parts - 1] == registers
                # Registers 0 and 1 are the first two channels of the first and the second column, 2 and 3 the others.
                found = halves(registers[column % 2 + 2 * (channel // 2)], DTYPES[dtype])[channel % 2]
                factor = 16 if kind == "int4" and column % 2 else 1
                assert found == meaning(kind, code) * unit * factor


@pytest.mark.parametrize("dtype", DTYPES)
def test_x_is_added_up_in_the_unit_of_integers(dtype: str) -> None:
    source, _ = sum_source(dtype)
    (registers,) = operands(source, [], 4)
    unit = code_unit("int4", dtype) / value_scale(dtype)
    assert code_unit("int8", dtype) == code_unit("int4", dtype)
    assert {number for register in registers for number in halves(register, DTYPES[dtype])} == {unit}


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaling_x_changes_no_bit_of_what_occurs(dtype: str) -> None:
    """The powers of two leave every x of real models as it is, and the smallest products of such normal numbers."""
    kind = DTYPES[dtype]
    large = 2.0**31 if dtype == "bfloat16" else torch.finfo(kind).max
    x = torch.tensor([1e-6, 0.1, 3.0, 6e4, large], dtype=kind)
    scaled = (x.float() * value_scale(dtype)).to(kind)
    assert torch.equal(scaled.double(), x.double() * value_scale(dtype))
    for codes in KINDS:
        smallest = code_unit(codes, dtype) * (2.0**-9 if codes == "fp8" else 1.0)
        assert smallest * 1e-6 > torch.finfo(torch.float32).tiny
