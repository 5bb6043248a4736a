"""Short lists that the threads of one program share.

Triton has no way to write to a computed place of the multiprocessor's shared memory, and a list that goes through
global memory costs a way to the L2 cache and back between choosing channels and the first read of a weight. So lists
lie in shared memory by a few instructions of PTX:

    room                 declares static shared memory (at most 48 KiB with what Triton itself takes)
    put, get             st.shared, ld.shared at list + 4 * place
    put_half, get_half   at list + 2 * place, for values of 16 bits
    settled              a barrier; what is read from the addresses it returns was written before it

``get`` counts as pure, so that the compiler keeps one copy of a read it needs in several layouts; it is held behind
the barrier by the address, which only ``settled`` gives. Where there is no room (the interpreter, lists too long,
float64 values) the same functions work on scratch memory: SHARED says which, and lists are then pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "ROOM_LIMIT",
    "ROOM_LIMIT_BESIDE",
    "add_rows",
    "get",
    "get_half",
    "hold_reads",
    "put",
    "put_half",
    "room",
    "room_source",
    "settled",
]

# Bytes. Triton's own use comes on top, and without asking the driver a program may have 48 KiB in all. Triton asks if
# its own use is more than that; what is declared here may then be nearly as much beside it.
ROOM_LIMIT = 36 * 1024
ROOM_LIMIT_BESIDE = 47 * 1024


def room_source(num_bytes: int, limit: int = ROOM_LIMIT) -> str:
    """PTX that declares so much shared memory and gives its address; "" for none, if it is more than there may be."""
    if num_bytes > limit:
        return ""
    return f"{{ .shared .align 16 .b8 room[{num_bytes}]; mov.u32 $0, room; }}"


@triton.jit
def room(SOURCE: tl.constexpr, scalar):
    """The address of the room that ``room_source`` declares; ``scalar`` is any int32. Once in a kernel."""
    return tl.inline_asm_elementwise(SOURCE, "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def put(items, place, value, wanted, SHARED: tl.constexpr):
    """items[place] = value where wanted: int32, or floating point, which is float32 in shared memory."""
    if not SHARED:
        tl.store(items + place, value.to(items.dtype.element_ty), mask=wanted)
    elif value.dtype.is_floating():
        # Its own way in: as bits among integers it costs a quarter more registers.
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,r,f,r",
            [items + place * 4, value.to(tl.float32), wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,r,r,r",
            [items + place * 4, value, wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def get(items, place, FLOATING: tl.constexpr, SHARED: tl.constexpr):
    """items[place], after ``settled``."""
    if SHARED:
        value = tl.inline_asm_elementwise(
            "ld.shared.b32 $0, [$1];", "=r,r", [items + place * 4], dtype=tl.int32, is_pure=True, pack=1
        )
        if FLOATING:
            value = value.to(tl.float32, bitcast=True)
    else:
        value = tl.load(items + place)
    return value


@triton.jit
def put_half(items, place, value, wanted, SHARED: tl.constexpr):
    """items[place] = value where wanted: fp16 or bf16."""
    if SHARED:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.shared.b16 [$1], $2; mov.b32 $0, 0; }",
            "=r,r,h,r",
            [items + place * 2, value.to(tl.int16, bitcast=True), wanted.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(items + place, value, mask=wanted)


@triton.jit
def get_half(items, place, dtype: tl.constexpr, SHARED: tl.constexpr):
    """items[place], after ``settled``: fp16 or bf16."""
    if SHARED:
        value = tl.inline_asm_elementwise(
            "ld.shared.b16 $0, [$1];", "=h,r", [items + place * 2], dtype=tl.int16, is_pure=True, pack=1
        ).to(dtype, bitcast=True)
    else:
        value = tl.load(items + place)
    return value


@triton.jit
def settled(items, SHARED: tl.constexpr):
    """The list again, once every thread of the program has put what it had to."""
    if SHARED:
        # Not the compiler's own barrier: it reads no weights ahead in a loop that has one.
        items = tl.inline_asm_elementwise(
            "bar.sync 0; mov.b32 $0, $1;", "=r,r", [items], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.debug_barrier()
    return items


@triton.jit
def hold_reads(scalar):
    """What was read before this is on its way: left alone, the compiler moves each read to where it is needed, to save
    registers. ``scalar`` is any int32."""
    tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r,r", [scalar], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def add_rows(values, items, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum of float32 values (ROWS, COLUMNS) over the rows, first to last, in one exchange through shared memory.

    ``tl.sum`` takes one for each number a thread holds. Columns are spread so that few threads meet in a bank.
    """
    row = tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = (column % 8) * (COLUMNS // 8) + column // 8
    put(items, row[:, None] * COLUMNS + place[None, :], values, place[None, :] >= 0, True)
    items = settled(items, True)
    total = get(items, place, True, True)
    for other in tl.static_range(1, ROWS):
        total += get(items, other * COLUMNS + place, True, True)
    return total
