"""``prefill_attention`` in CUDA C++ (prefill.cu, sm_80 and newer): one launch, tile chosen by shape (tiles.py)."""

from __future__ import annotations

import functools
import math
import struct
from pathlib import Path

import torch

from kvstrata import jit
from kvstrata.attention.decode.stages import NAMES
from kvstrata.call_cache import PerThread

from .configs import tuned_tile
from .job import PrefillJob, Result, Run, lse_strides, strides_of
from .launch import signature
from .tiles import Tile, tile_of

SOURCE = Path(__file__).parent / "prefill.cu"
DIMS = (64, 96, 128, 256)
SECTION_BYTES = 16 << 20  # K and V of the heads that are processed together: less than L2
POINTERS = struct.Struct("9q")  # q, k, v, out, lse, sinks, cu_seqlens of q and k, counters: the beginning of PARAMS
PARAMS = struct.Struct("9q" + "2qI4x" * 5 + "12I4x5i2f")


def entry(dtype: torch.dtype, tile: Tile, softcap: bool, checked: bool = False) -> str:
    """Template instantiation of prefill.cu; ``checked``: the checking build."""
    return f"prefill<{NAMES[dtype]},{tile.name},{str(softcap).lower()},{str(checked).lower()}>"


def missing(job: PrefillJob) -> str | None:
    """Reason why the kernel cannot run this job, or None."""
    if reason := jit.missing():
        return reason
    if job.q.dtype not in NAMES:
        return f"cuda: expected q in float16 or bfloat16, got {job.q.dtype}"
    if job.head_dim not in DIMS:
        return f"cuda: expected a head_dim of {DIMS}, got {job.head_dim}"
    for name, x in (("q", job.q), ("k", job.k), ("v", job.v), ("out", job.out)):
        if x is None:
            continue
        if any(2 * n % 16 for n in x.stride()[:-1]) or x.data_ptr() % 16:
            return f"cuda: expected rows of {name} at multiples of 16 bytes, got strides {x.stride()}"
        token = x.stride(-3)
        if 2 * token >= 1 << 32:
            return f"cuda: expected tokens of {name} less than 4 GiB apart, got a stride of {token}"
    return None


@functools.lru_cache(maxsize=256)
def divisor(by: int) -> tuple[int, int, int]:
    """``n // by == (n * factor // 2**32 + n) >> shift`` for 0 <= n < 2**31."""
    shift = (by - 1).bit_length()
    return by, (1 << 32) * ((1 << shift) - by) // by + 1, shift


@functools.lru_cache(maxsize=1024)
def section_of(heads: int, bytes_each: int) -> int:
    """Number of query heads processed together: a divisor of ``heads``, of all sequences, whose K and V fit L2."""
    limit = max(SECTION_BYTES // max(bytes_each, 1), 1)
    return max(n for n in range(1, min(heads, limit) + 1) if heads % n == 0)


@functools.lru_cache(maxsize=256)
def _kernel(dtype: torch.dtype, tile: Tile, softcap: bool, checked: bool, device: int) -> jit.Kernel:
    return jit.load(SOURCE, entry(dtype, tile, softcap, checked), jit.arch_of(device))


_launches: PerThread[jit.Launch] = PerThread()  # parameters are written in place, so threads do not share a launch


def run(job: PrefillJob, tile: Tile | None = None, check: torch.Tensor | None = None) -> Result:
    """Launch a checked job; ``check`` selects the checking build: int32 [4], its counters, incremented."""
    out, lse = job.outputs()
    if not job.sequences or not job.heads or not job.max_seqlen_q or not job.q.numel():
        return out, lse
    device = job.q.get_device()
    with torch.cuda.device(device):
        launch = _find(job, out, lse, tile, check is not None)
        jit.bind_context(device)
        _start(launch, device, job, out, lse, check)
    return out, lse


def prepare(job: PrefillJob, out: torch.Tensor, lse: torch.Tensor | None) -> Run:
    """Launch for jobs with this `signature` on the current device, by this thread; the job is not empty."""
    device, launch = job.q.get_device(), _find(job, out, lse, None, False)
    return lambda job, out, lse: _start(launch, device, job, out, lse, None)


def _find(job: PrefillJob, out: torch.Tensor, lse: torch.Tensor | None, tile: Tile | None, checked: bool) -> jit.Launch:
    device = job.q.get_device()
    tile = tile or _tile(job, device)
    key = (tile, checked, *signature(job))
    launch = _launches.known.get(key)
    if launch is None:
        launch = _launches.known[key] = _plan(job, tile, checked, out, lse, device)
    return launch


def _start(
    launch: jit.Launch, device: int, job: PrefillJob, out: torch.Tensor, lse: torch.Tensor | None,
    check: torch.Tensor | None,
) -> None:  # fmt: skip
    tensors = (job.q, job.k, job.v, out, lse, job.sinks, job.cu_seqlens_q, job.cu_seqlens_k, check)
    POINTERS.pack_into(launch.params, 0, *(0 if x is None else x.data_ptr() for x in tensors))
    launch(jit.current_stream(device))


def _tile(job: PrefillJob, device: int) -> Tile:
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    blocks = job.sequences * job.heads * -(-job.max_seqlen_q // 64)
    return tile_of(job.head_dim, blocks, processors, tuned_tile(job))


def _plan(
    job: PrefillJob, tile: Tile, checked: bool, out: torch.Tensor, lse: torch.Tensor | None, device: int
) -> jit.Launch:
    """Launch for every job with this `signature`; the addresses are filled in per call."""
    all_heads, blocks = job.sequences * job.heads, -(-job.max_seqlen_q // tile.block_m)
    section = section_of(all_heads, 4 * job.max_seqlen_k * job.head_dim // (job.heads // job.kv_heads))
    log2e, softcap = math.log2(math.e), job.softcap or 0.0
    byte_strides = [n * x.element_size() for x in (job.q, job.k, job.v, out) for n in strides_of(x)]
    byte_strides += [4 * n for n in lse_strides(lse)]
    divisors = (section * blocks, section, job.heads, job.heads // job.kv_heads)
    params = PARAMS.pack(
        *[0] * 9, *byte_strides, *(n for by in divisors for n in divisor(by)),
        blocks, job.max_seqlen_q, job.max_seqlen_k, job.causal, job.sliding_window or 0,
        job.scale * log2e, softcap * log2e,
    )  # fmt: skip
    kernel = _kernel(job.q.dtype, tile, softcap > 0, checked, device)
    jit.bind_context(device)
    return jit.Launch(kernel, all_heads * blocks, 32 * tile.warps, params, shared=tile.shared(checked), overlap=True)
