"""The gated short convolution of hybrid models, for the rows of a step or of prompts.

    out[p] = c[p] * (bias + sum over taps j of kernel[taps - 1 - j] * u[p - j]),   u = b * x       each channel by itself

b, c and x are the three parts of in_proj's output. Why a row looks at the rows before it: a decode step has one row for
each sequence, a verified draft and a prompt have consecutive positions of one. The inputs u of earlier positions are
those of the rows before as long as these continue the sequence, and else those that the cache keeps, so one kernel serves
all. Bytes: 4 H for each row, and taps - 1 kept inputs. Roundings are those of transformers. Twin: ``runtime.torch.block``.

Kept inputs have at least two buffers, as in ``delta_net``: position p reads buffer p % buffers and writes the next one. Of
a prompt only the last row's are kept; they may replace what its first rows read, so a launch of its own stores them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .attention import Rows
from .common import gdc_wait


@triton.jit
def _continues(rows, row, other, ahead, count):
    """Whether row ``other`` has the position ``ahead`` after that of ``row``, in the same sequence."""
    exists = (other >= 0) & (other < count)
    slot = tl.load(rows.slot + other, mask=exists, other=-1)
    position = tl.load(rows.position + other, mask=exists, other=-1)
    busy = tl.load(rows.token + other, mask=exists, other=-1) >= 0
    return busy & (slot == tl.load(rows.slot + row)) & (position == tl.load(rows.position + row) + ahead)


@triton.jit(do_not_specialize=["count"])
def _short_conv_kernel(
    projected_ptr, kernel_ptr, bias_ptr, kept_ptr, rows, out_ptr, count, buffer_stride,  # elements between buffers
    H: tl.constexpr, TAPS: tl.constexpr, BUFFERS: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr,
    STORE: tl.constexpr,  # "each": every row stores its inputs; "last": the last row of a sequence; "": none
    PDL: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = projected_ptr.dtype.element_ty
    row = tl.program_id(1)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = k < H
    gdc_wait(PDL)
    busy = tl.load(rows.token + row) >= 0
    stores = busy
    if STORE == "last":
        stores = busy & ~_continues(rows, row, row + 1, 1, count)
    if OUT or stores:
        position = tl.load(rows.position + row)
        slot = tl.load(rows.slot + row).to(tl.int64) * ((TAPS - 1) * H)
        before = row * 0  # rows before this one, at most TAPS - 1, that continue the sequence
        for j in tl.static_range(1, TAPS):
            before += (_continues(rows, row, row - j, -j, count) & (before == j - 1)).to(tl.int32)
        kept = kept_ptr + ((position - before) % BUFFERS).to(tl.int64) * buffer_stride + slot
        us = ()
        for j in tl.static_range(TAPS):
            at = projected_ptr + (row - j).to(tl.int64) * (3 * H) + k
            given = k < tl.where(before >= j, H, 0)  # by a row of this launch
            b = tl.load(at, mask=given, other=0.0).to(tl.float32)
            x = tl.load(at + 2 * H, mask=given, other=0.0).to(tl.float32)
            u = (b * x).to(dtype)
            if j > 0:
                earlier = tl.load(kept + (before - j + TAPS - 1) * H + k, mask=live & ~given, other=0.0)
                u = tl.where(given, u, earlier)
            us += (u,)
        if OUT:
            total = tl.zeros((BLOCK,), tl.float32)
            for j in tl.static_range(TAPS):
                weight = tl.load(kernel_ptr + k * TAPS + (TAPS - 1 - j), mask=live, other=0.0)
                total += weight.to(tl.float32) * us[j].to(tl.float32)
            if bias_ptr is not None:
                total += tl.load(bias_ptr + k, mask=live, other=0.0).to(tl.float32)
            c = tl.load(projected_ptr + row.to(tl.int64) * (3 * H) + H + k, mask=live, other=0.0).to(tl.float32)
            y = c * total.to(dtype).to(tl.float32)
            tl.store(out_ptr + row.to(tl.int64) * H + k, y.to(dtype), mask=live)
        if STORE != "":
            tl.debug_barrier()  # a prompt's last row may store where it has read
            after = kept_ptr + ((position + 1) % BUFFERS).to(tl.int64) * buffer_stride + slot
            for j in tl.static_range(TAPS - 1):
                tl.store(after + (TAPS - 2 - j) * H + k, us[j], mask=k < tl.where(stores, H, 0))


def launch_short_conv(
    projected: Tensor, kernel: Tensor, bias: Tensor | None, kept: Tensor, rows: Rows, out: Tensor, *,
    prompt: bool = False, pdl: bool = False,
) -> None:  # fmt: skip
    """out (B, H) of in_proj's output (B, 3 H). kernel: (H, 1, taps); bias: (H,); kept: (buffers, slots, taps - 1, H),
    oldest first. ``prompt``: rows may be more positions of a sequence than there are buffers."""
    (count, width), taps, block = out.shape, kernel.shape[-1], min(512, triton.next_power_of_2(out.shape[1]))
    for computes, stores in ((True, ""), (False, "last")) if prompt else ((True, "each"),):
        _short_conv_kernel[(triton.cdiv(width, block), count)](
            projected, kernel, bias, kept, rows, out, count, kept.stride(0), width, taps, len(kept), block, computes,
            stores, pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
