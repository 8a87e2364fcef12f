"""store_packed: every backend against the reference, and equal bytes for equal rows however they come."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import HAS_GPU
from kvstrata import Format, store_packed
from kvstrata.layout import fragments, scales
from kvstrata.quant import reference as quant
from kvstrata.store.packed import cuda as store_cuda
from kvstrata.store.packed import op as store_op
from packed_model import (  # noqa: F401
    DEVICE,
    EMULATED,
    POISON,
    Calibration,
    calibration_of,
    each_backend,
    kernels,
    memory,
    stored_rows,
)


def rows(tokens: int, heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, tokens, heads, dim, generator=torch.Generator().manual_seed(seed))
    x[0, ..., 3] *= 12  # a channel of outliers
    return tuple(x.to(dtype).to(DEVICE))  # type: ignore[return-value]


def parts(pages: torch.Tensor, fmt: Format) -> list[torch.Tensor]:
    """K codes, V codes ``[pages, tokens, D]``, K scales, V scales ``[pages, tokens]``."""
    whole = pages.cpu().contiguous().view(-1, fmt.page_bytes)
    k_raw, v_raw, scale_raw = whole.split([fmt.k_bytes, fmt.v_bytes, fmt.scale_bytes], -1)
    sides = (("k", fmt.k_bits, k_raw), ("v", fmt.v_bits, v_raw))
    codes = [fragments.unpack(raw, bits, fmt.head_dim, fmt.page_tokens, side) for side, bits, raw in sides]
    return [*codes, *scales.unpack_scales(scale_raw)]


def assert_like_reference(fmt: Format, pages: torch.Tensor, wanted: torch.Tensor) -> None:
    """Codes and scales are equal, poison and padding too."""
    for a, b in zip(parts(pages, fmt), parts(wanted, fmt), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), f"{int((a != b).sum())} of {a.numel()} differ"


def test_reference_gives_the_bytes_of_whole_pages() -> None:
    """Tokens one by one and the packing of whole pages are two pieces of code with one result."""
    for name, dim, tokens in (("K4V4", 64, 16), ("K8V3", 80, 32), ("K2V4", 128, 64), ("K3V2", 48, 16)):
        fmt = Format.parse(name, dim, tokens)
        pages = memory(fmt, 3, 2, 2).zero_()  # so is the padding of odd head dims
        k, v = rows(3 * 2 * tokens, 2, dim, torch.float32)
        order = torch.randperm(len(k))
        for some in order.split(7):
            store_packed(k[some.to(DEVICE)], v[some.to(DEVICE)], pages, some.to(DEVICE), fmt, backend="reference")
        by_page = (x.view(3, 2, tokens, 2, dim).permute(0, 3, 1, 2, 4) for x in (k, v))
        want = quant.quantize_page(*by_page, fmt).flatten(2)
        assert torch.equal(pages, want)


@each_backend
@pytest.mark.parametrize(
    ("name", "dim", "page_tokens", "dtype"),
    [
        ("K4V4", 128, 64, torch.bfloat16),
        ("K8V8", 64, 16, torch.float16),
        ("K3V2", 64, 32, torch.float32),
        ("K2V3", 80, 16, torch.bfloat16),
        ("K8V4", 48, 16, torch.float16),
    ],
)
@pytest.mark.parametrize("calibrated", [False, True])
def test_mixed_slots_give_the_bytes_of_the_reference(
    backend: str, name: str, dim: int, page_tokens: int, dtype: torch.dtype, calibrated: bool
) -> None:
    """A prompt, single tokens, padding and slots past the end in one call, into strided blocks."""
    fmt = Format.parse(name, dim, page_tokens)
    pages = memory(fmt, 4, 2, 2, strided=True)
    size = 2 * page_tokens
    prompt = torch.arange(size + 5, 2 * size + 3)  # crosses into the third block's first tile, starts amid a tile
    slots = torch.cat([prompt, torch.tensor([3, -1, 1, 0, 4 * size, 4 * size + 99, 3 * size + 7])])
    k, v = rows(len(slots), 2, dim, dtype)
    cal = calibration_of(2, dim) if calibrated else None
    wanted = pages.clone()
    store_packed(k, v, wanted, slots.to(DEVICE), fmt, calibration=cal, backend="reference")
    store_packed(k, v, pages, slots.to(DEVICE).int(), fmt, calibration=cal, backend=backend)
    assert_like_reference(fmt, pages, wanted)
    live = (slots >= 0) & (slots < 4 * size)
    back = stored_rows(pages, fmt, slots[live], cal)
    for got, x, bits in zip(back, (k, v), (fmt.k_bits, fmt.v_bits), strict=True):
        error = (got - x.cpu()[live].float()).norm() / x.float().norm()
        assert error < (2.5 if calibrated else 1.0) * {8: 0.02, 4: 0.2, 3: 0.35, 2: 0.6}[bits]


@each_backend
def test_other_tokens_keep_their_bits(backend: str) -> None:
    for name in ("K4V4", "K3V2", "K2V8"):
        fmt = Format.parse(name, 64, 16)
        k, v = rows(32, 2, 64, torch.bfloat16)
        full = memory(fmt, 1, 2, 2)
        store_packed(k, v, full, torch.arange(32, device=DEVICE), fmt, backend=backend)
        pages = memory(fmt, 1, 2, 2)
        order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
        seen: list[int] = []
        for some in order.split(5):
            store_packed(k[some.to(DEVICE)], v[some.to(DEVICE)], pages, some.to(DEVICE), fmt, backend=backend)
            seen += some.tolist()
            for a, b in zip(parts(pages, fmt), parts(full, fmt), strict=True):
                a, b = (x.reshape(2, 32, -1) for x in (a, b))  # head, token
                assert torch.equal(a[:, seen], b[:, seen]), "tokens stored so far are those of the whole page"
                rest = sorted(set(range(32)) - set(seen))
                if a.dtype == torch.uint8 and rest:
                    assert a[:, rest].unique().numel() == 1, "tokens to come are poison still"
        assert torch.equal(pages, full)


@each_backend
def test_equal_rows_give_equal_bytes(backend: str) -> None:
    """In any batch, chunking and order; a NaN or an infinity next to a token changes nothing of it."""

    few = backend == "cuda" and not HAS_GPU  # kernels to compile

    @settings(max_examples=8 if not HAS_GPU else 40)
    @given(
        name=st.sampled_from(["K4V4", "K3V3"] if few else ["K4V4", "K8V8", "K3V3", "K2V4"]),
        dim=st.sampled_from([64, 128] if HAS_GPU else [64]),
        calibrated=st.booleans(),
        cuts=st.lists(st.integers(1, 39), max_size=5),
        shuffled=st.booleans(),
        bad=st.booleans(),
        seed=st.integers(0, 99),
    )
    def run(name: str, dim: int, calibrated: bool, cuts: list[int], shuffled: bool, bad: bool, seed: int) -> None:
        fmt = Format.parse(name, dim, 16)
        generator = torch.Generator().manual_seed(seed)
        k, v = rows(40, 1, dim, torch.bfloat16, seed)
        if bad:
            k[7, 0, 5] = float("inf")
            k[20, 0] = 60000.0
            v[9, 0, 1] = float("nan")
        cal = calibration_of(1, dim, seed) if calibrated else None
        once = memory(fmt, 2, 1, 2)
        slots = torch.arange(8, 48)
        store_packed(k, v, once, slots.to(DEVICE), fmt, calibration=cal, backend=backend)
        parted = memory(fmt, 2, 1, 2)
        order = torch.randperm(40, generator=generator) if shuffled else torch.arange(40)
        for some in order.tensor_split(sorted(cuts)):
            padding = torch.randn(2, 3, 1, dim).to(k.dtype).to(DEVICE)
            index = some.to(DEVICE)
            chunk_k, chunk_v = torch.cat([padding[0], k[index]]), torch.cat([padding[1], v[index]])
            where = torch.cat([torch.full((3,), -1), slots[some]]).to(DEVICE)
            store_packed(chunk_k, chunk_v, parted, where, fmt, calibration=cal, backend=backend)
        assert torch.equal(parted, once)

    run()


@pytest.mark.parametrize("backend", [EMULATED])
@pytest.mark.parametrize(
    ("name", "page_tokens", "dtype", "calibrated"),
    [("K4V4", 16, torch.bfloat16, False), ("K8V3", 32, torch.float16, True)],
)
def test_prompt_kernel_gives_the_bytes_of_the_token_kernel(
    backend: str, name: str, page_tokens: int, dtype: torch.dtype, calibrated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of long prompts gives the bytes of the one of steps, whatever the runs in its windows."""
    fmt = Format.parse(name, 64, page_tokens)
    calibration = calibration_of(3, 64) if calibrated else None
    prompts, prepare = [], store_cuda._prompt
    monkeypatch.setattr(store_cuda, "_prompt", lambda *given: prompts.append(given) or prepare(*given))
    order = torch.tensor([3, 0, 5, 1])[:, None] * 64 + torch.arange(64)  # blocks of 64 tokens
    long = order.flatten()
    mapping = {
        "aligned": long,
        "amid a tile": long[5:230],  # every window has a run of 16, at its end
        "two requests": torch.cat([long[3:100], torch.tensor([-1, -1, 319, 384, 9999]), long[130:250]]),
        "single tokens": long[torch.randperm(256, generator=torch.Generator().manual_seed(3))[:70]],
        "short": long[:9],
    }
    for case, slots in mapping.items():
        k, v = rows(len(slots), 3, 64, dtype)
        if case == "amid a tile":
            k[40, 1, 3], v[90, 0] = float("nan"), 60000.0  # a whole tile that is not fine
        pages = [memory(fmt, 6, 3, 64 // page_tokens, strided=True) for _ in range(3)]
        store_packed(k, v, pages[2], slots.to(DEVICE), fmt, calibration=calibration, backend="reference")
        for waves, into in ((0, pages[0]), (1 << 20, pages[1])):
            monkeypatch.setattr(store_cuda, "WAVES", waves)
            monkeypatch.setattr(store_op, "_plans", type(store_op._plans)())
            store_packed(k, v, into, slots.to(DEVICE), fmt, calibration=calibration, backend=backend)
        assert torch.equal(pages[0], pages[1]), case
        assert_like_reference(fmt, pages[0], pages[2])
    assert len(prompts) == len(mapping)


@pytest.mark.parametrize("backend", [EMULATED])
def test_windows_of_several_tokens(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run may begin behind a window's first token, whose row is then loaded in vain and must not arrive late."""
    fmt = Format.parse("K4V4", 64, 16)
    slots = torch.cat([torch.arange(5, 26), torch.tensor([-1, 40, -1, -1, -1, 47, 50, 32])])
    k, v = rows(len(slots), 3, 64, torch.bfloat16)
    wanted = memory(fmt, 4, 3, 1)
    store_packed(k, v, wanted, slots.to(DEVICE), fmt, backend="reference")
    for window in (2, 4, 8):
        monkeypatch.setattr(store_cuda, "window_of", lambda *sizes, window=window: window)
        monkeypatch.setattr(store_op, "_plans", type(store_op._plans)())
        pages = memory(fmt, 4, 3, 1)
        store_packed(k, v, pages, slots.to(DEVICE), fmt, backend=backend)
        assert_like_reference(fmt, pages, wanted)


@given(number=st.integers(2, 4096), x=st.integers(0, 2**31 - 1))
def test_division_by_block_size(number: int, x: int) -> None:
    shift, inverse = store_cuda.divider(number)
    assert inverse < 1 << 32
    for one in (x, x // number * number, max(x // number * number - 1, 0), 2**31 - 1):
        assert one * inverse >> 32 >> shift == one // number


def test_invalid_store_arguments_are_named() -> None:
    fmt = Format.parse("K4V4", 64, 16)
    pages, (k, v) = memory(fmt, 2, 2, 1), rows(3, 2, 64, torch.float32)
    slots = torch.arange(3, device=DEVICE)
    wide = torch.zeros(2, 2, fmt.page_bytes + 4, dtype=torch.uint8, device=DEVICE)
    wrong = {
        "pages: expected torch.uint8": (k, v, pages.int(), slots, fmt),
        "pages: expected .num_blocks": (k, v, pages[:, :, :-64], slots, fmt),
        "pages: expected strides": (k, v, wide[..., :-4], slots, fmt),
        "k: expected .tokens, 2, 64": (k[:, :1], v, pages, slots, fmt),
        "v: expected 3 tokens as k": (k, v[:2], pages, slots, fmt),
        "v: expected torch.float32 as k": (k, v.half(), pages, slots, fmt),
        "slot_mapping: expected int32": (k, v, pages, slots.float(), fmt),
        "slot_mapping: expected .3.": (k, v, pages, slots[:2], fmt),
        "fmt: expected a quantised format": (k, v, pages, slots, Format.parse("K16V16", 64, 16)),
        "fmt: expected a Format": (k, v, pages, slots, "K4V4"),
    }  # fmt: skip
    for message, arguments in wrong.items():
        with pytest.raises((ValueError, TypeError), match=message):
            store_packed(*arguments)
    with pytest.raises(ValueError, match=r"calibration.balance: expected float32 \(2, 64\)"):
        store_packed(k, v, pages, slots, fmt, calibration=Calibration(balance=torch.ones(64)))
    with pytest.raises(TypeError, match=r"calibration.centre: expected a tensor, got list"):
        store_packed(k, v, pages, slots, fmt, calibration=Calibration(centre=[[0.0] * 64] * 2))
    with pytest.raises(ValueError, match="backend: expected one of"):
        store_packed(k, v, pages, slots, fmt, backend="fast")
    for x in (torch.inf, torch.nan, 65600.0):
        far = Calibration(centre=torch.full((2, 64), x, device=DEVICE))
        with pytest.raises(ValueError, match=r"calibration.centre: expected finite numbers up to 65504"):
            store_packed(k, v, pages, slots, fmt, calibration=far, backend="reference")
    assert (pages == POISON).all()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tensors_without_memory_are_named() -> None:
    """Sparse tensors and those on meta, also after a call that such a one repeats."""
    fmt = Format.parse("K4V4", 64, 16)
    pages, (k, v) = memory(fmt, 2, 2, 1), rows(3, 2, 64, torch.float32)
    slots, ones = torch.arange(3, device=DEVICE), torch.ones(2, 64, device=DEVICE)
    store_packed(k, v, pages, slots, fmt, calibration=Calibration(ones, ones))
    given = dict(k=k, v=v, pages=pages, slot_mapping=slots, balance=ones, centre=ones)
    for name, x in given.items():
        for sparse in (x.to_sparse(), x.to_sparse_csr()) if x.dim() == 2 else (x.to_sparse(),):
            changed = given | {name: sparse}
            calibration = Calibration(changed.pop("balance"), changed.pop("centre"))
            with pytest.raises(TypeError, match=rf"^(calibration\.)?{name}: expected a strided tensor, got torch.sp"):
                store_packed(**changed, fmt=fmt, calibration=calibration)
    with pytest.raises(ValueError, match="k: expected a tensor on"):
        store_packed(k.to("meta"), v, pages, slots, fmt)
    with pytest.raises(ValueError, match="pages: expected a tensor in memory, got one on meta"):
        store_packed(*(x.to("meta") for x in (k, v, pages, slots)), fmt)


def test_store_packed_passes_opcheck() -> None:
    fmt = Format.parse("K4V4", 64, 16)
    pages, (k, v) = memory(fmt, 2, 2, 1), rows(3, 2, 64, torch.float32)
    slots = torch.arange(3, device=DEVICE)
    arguments = (k, v, pages, slots, None, None, "K4V4", 64, 16, True, "reference")
    torch.library.opcheck(torch.ops.kvstrata.store_packed.default, arguments)
    wanted, traced = pages.clone(), pages.clone()
    store_packed(k, v, wanted, slots, fmt, backend="reference")

    def call(k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor) -> None:
        store_packed(k, v, pages, slots, fmt, backend="reference")

    torch.compile(call, fullgraph=True, backend="eager")(k, v, traced)
    assert torch.equal(traced, wanted)


@pytest.mark.gpu
def test_replay_stores_new_rows() -> None:
    fmt = Format.parse("K4V4", 128, 64)
    pages, (k, v) = memory(fmt, 4, 8, 2), rows(32, 8, 128, torch.bfloat16)
    slots = torch.arange(32, device=DEVICE)
    store_packed(k, v, pages, slots, fmt)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        store_packed(k, v, pages, slots, fmt)
    for seed in range(3):
        for x, y in zip((k, v), rows(32, 8, 128, torch.bfloat16, seed), strict=True):
            x.copy_(y)
        slots.copy_(torch.randperm(512)[:32])
        pages.fill_(POISON)
        graph.replay()
        wanted = memory(fmt, 4, 8, 2)
        store_packed(k, v, wanted, slots, fmt)
        assert torch.equal(pages, wanted)
