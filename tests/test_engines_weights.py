"""Balance and centre of K from a model's weights in vLLM: modules with the names and shapes that vLLM gives them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
import torch
from torch.nn.modules import module as torch_module

import vllm_standin
from conftest import HAS_GPU
from kvstrata.engines.weights import Owner, calibration_of, update
from kvstrata.hf import weights as hf_weights
from kvstrata.quant.calibration import Calibration, LayerCalibration, pair_balance
from vllm_standin import profile

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 64, 96


class Rotary(torch.nn.Module):
    """RoPE with the table of vLLM's: cos and sin of each position, in the model's dtype."""

    def __init__(self, theta=10000.0, pairs=DIM // 2, neox=True, dtype=torch.bfloat16, size=1.0, positions=4096):
        super().__init__()
        self.is_neox_style = neox
        self.angles = theta ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
        turn = torch.arange(positions, dtype=torch.float64)[:, None] * self.angles
        self.register_buffer("cos_sin_cache", (size * torch.cat([turn.cos(), turn.sin()], 1)).to(dtype))

    def turn(self, x):
        """Rows ``x [T, heads, D]`` at positions 0, 1, .."""
        pairs = len(self.angles)
        turn = torch.arange(len(x), dtype=torch.float64)[:, None] * self.angles
        cos, sin = turn.cos().float()[:, None].to(x.device), turn.sin().float()[:, None].to(x.device)
        one = slice(pairs) if self.is_neox_style else slice(0, 2 * pairs, 2)
        two = slice(pairs, 2 * pairs) if self.is_neox_style else slice(1, 2 * pairs, 2)
        out = x.clone()
        out[..., one], out[..., two] = x[..., one] * cos - x[..., two] * sin, x[..., two] * cos + x[..., one] * sin
        return out


class Projection(torch.nn.Module):
    """The part of QKVParallelLinear that is read: rows of Q, K and V of this rank."""

    def __init__(self, heads=HEADS, kv_heads=KV_HEADS, dtype=torch.float32, bias=True):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_size, self.v_head_size = heads, kv_heads, DIM, DIM
        rows = (heads + 2 * kv_heads) * DIM
        self.weight = torch.nn.Parameter(torch.randn(rows, HIDDEN).mul(HIDDEN**-0.5).to(dtype), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(rows, dtype=dtype), requires_grad=False) if bias else None


class Layer(torch.nn.Module):
    """vLLM's Attention: what an impl belongs to."""

    def __init__(self, impl):
        super().__init__()
        self.child = torch.nn.Identity()  # hooks see this one too
        self.impl, self.layer_name = impl, "model.layers.0.self_attn.attn"


class Attention(torch.nn.Module):
    """An attention module of a model, in the order that vLLM's models are built."""

    def __init__(self, impl=None, rotary=None, **given):
        super().__init__()
        torch.manual_seed(0)
        self.qkv_proj = Projection(**given)
        self.rotary_emb = rotary if rotary is not None else Rotary()
        if impl is not None:
            self.attn = Layer(impl)

    def bias_k(self, values):
        self.qkv_proj.bias.data[HEADS * DIM : (HEADS + KV_HEADS) * DIM] = values
        return self


@pytest.fixture
def engine() -> Iterator[vllm_standin.Engine]:
    with vllm_standin.engine() as made:
        made.configure({"kvstrata": {"format": "K4V4"}}, rope_parameters={"rope_theta": 1e4})
        yield made


def impl_of(engine):
    return engine.ours.KvstrataImpl(num_heads=HEADS, head_size=DIM, scale=DIM**-0.5, num_kv_heads=KV_HEADS)


def of(module, turned=True, heads=HEADS, kv_heads=KV_HEADS):
    return calibration_of(module, heads, kv_heads, DIM, turned)


def biased(module):
    """Large biases of K, as in Qwen2.5: most of them in pairs that turn slowly; weights of unlike rows."""
    torch.manual_seed(1)
    bias = torch.zeros(KV_HEADS, 2, DIM // 2)
    bias[..., 20:] = 30 * torch.randn(KV_HEADS, 2, DIM // 2 - 20)
    bias[..., 5] = 10
    module.qkv_proj.weight.data[HEADS * DIM :][3::16] *= 6
    return module.bias_k(bias.flatten())


class Impl:
    """An object that belongs to a layer."""

    def __init__(self):
        self.owner = Owner()


def test_owner_is_the_module_that_gets_the_layer():
    first, second = Impl(), Impl()
    hooks = len(torch_module._global_module_registration_hooks)
    assert Impl().owner.get() is None
    module, other = Attention(first), torch.nn.Module()
    other.add_module("attn", Layer(second))
    assert first.owner.get() is module
    assert second.owner.get() is other
    other.attn = None
    assert len(torch_module._global_module_registration_hooks) == hooks  # one for all
    del module
    gc.collect()
    assert first.owner.get() is None


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("pairs", [DIM // 2, DIM // 4])
def test_calibration_equals_that_of_transformers(neox, pairs):
    """Fused rows against q_proj and k_proj, whose balance and centre hf computes from a module of its own."""
    rotary = Rotary(pairs=pairs, neox=neox, dtype=torch.float32)
    module = biased(Attention(rotary=rotary))
    theirs = torch.nn.Module()
    linear, sizes = module.qkv_proj, [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
    for name, weight, bias in zip("qk", linear.weight.split(sizes), linear.bias.split(sizes), strict=False):
        linear = torch.nn.Linear(HIDDEN, len(weight))
        linear.weight.data, linear.bias.data = weight.data, bias.data
        setattr(theirs, f"{name}_proj", linear)
    rope = rotary.angles.tolist()
    balance = hf_weights.balance_of(theirs, KV_HEADS, DIM, rope, not neox)
    centre = hf_weights.centre_of(theirs, KV_HEADS, DIM, rope, not neox)
    fused, what = of(module)
    assert what == "balance and centre"
    assert torch.equal(fused.balance, balance)
    assert torch.allclose(fused.centre, centre / balance, rtol=1e-3, atol=1e-3)
    theirs.rotary_emb = rotary
    apart, _ = of(theirs)
    assert torch.equal(apart.balance, fused.balance)
    assert torch.equal(apart.centre, fused.centre)


class RMSNorm(torch.nn.Module):
    """vLLM's norm: its forward is a kernel, forward_native is torch; Gemma's gain is 1 + weight."""

    def __init__(self, size, is_gemma=False, dtype=torch.float32):
        super().__init__()
        self.weight, self.is_gemma = torch.nn.Parameter(torch.randn(size).to(dtype), requires_grad=False), is_gemma

    def forward(self, x, residual=None):
        raise NotImplementedError

    def forward_native(self, x, residual=None):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (self.weight.float() + self.is_gemma)


@pytest.mark.parametrize("is_gemma", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_quantised", [False, True])
def test_norms_of_q_and_k_balance(is_gemma, dtype, is_quantised):
    """K of a model that normalises it has channels as large as the gain of its norm (Qwen3, Gemma 3)."""
    module = Attention(bias=False)
    module.q_norm, module.k_norm = (RMSNorm(DIM, is_gemma, dtype) for _ in range(2))
    module.k_norm.weight.data[[3, 3 + DIM // 2]] = 24.0
    if is_quantised:
        module.qkv_proj.weight = torch.nn.Parameter(module.qkv_proj.weight.to(torch.int8), requires_grad=False)
    own, what = of(module)
    assert what == "balance"
    k = torch.randn(2000, KV_HEADS, DIM) if is_quantised else torch.randn(2000, HIDDEN) @ module.qkv_proj.weight.mT
    q = torch.randn(2000, HEADS, DIM) if is_quantised else k[:, : HEADS * DIM].unflatten(1, (-1, DIM))
    k = k if is_quantised else k[:, HEADS * DIM : (HEADS + KV_HEADS) * DIM].unflatten(1, (-1, DIM))
    k, q = (norm.forward_native(x).square().mean(0) for norm, x in ((module.k_norm, k), (module.q_norm, q)))
    expected = pair_balance(k, q.view(KV_HEADS, -1, DIM).mean(1), DIM // 2)
    assert (own.balance.log2() - expected.log2()).abs().max() <= 1
    assert (own.balance != expected).float().mean() < 0.15
    assert own.balance[0, 3] >= 2 * own.balance[0].median()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_angles_come_from_the_table(dtype, theta):
    """Slow pairs, whose sin at position 1 is too small for fp16; a table that is scaled (YaRN)."""
    exact = of(biased(Attention(rotary=Rotary(theta, dtype=torch.float64))))[0]
    given = of(biased(Attention(rotary=Rotary(theta, dtype=dtype, size=1.2))))[0]
    assert torch.equal(given.balance, exact.balance)
    assert (given.centre - exact.centre).norm() < 0.01 * exact.centre.norm()


def test_ranks_have_their_rows():
    """What a rank computes from its rows is that part of the whole."""
    whole, _ = of(biased(module := Attention()))
    linear = module.qkv_proj
    for rank in range(2):
        part = Attention(heads=HEADS // 2, kv_heads=1)
        for name in ("weight", "bias"):
            q, k, v = getattr(linear, name).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM])
            rows = [x.unflatten(0, (2, -1))[rank] for x in (q, k, v)]
            getattr(part.qkv_proj, name).data = torch.cat(rows)
        own, _ = of(part, heads=HEADS // 2, kv_heads=1)
        assert torch.equal(own.balance[0], whole.balance[rank])
        assert torch.equal(own.centre[0], whole.centre[rank])


def test_weights_that_are_quantised_give_a_centre_alone():
    module = biased(Attention())
    bias = module.qkv_proj.bias[HEADS * DIM :][: KV_HEADS * DIM].view(KV_HEADS, DIM)
    module.qkv_proj.weight = torch.nn.Parameter(module.qkv_proj.weight.to(torch.float8_e4m3fn), requires_grad=False)
    own, what = of(module)
    assert (own.balance, what) == (None, "centre")
    assert own.centre.abs().max() > 5
    module.rotary_emb = None  # a layer without RoPE in a model that has it
    assert torch.equal(of(module)[0].centre, bias)
    del module.rotary_emb
    assert torch.equal(of(module, turned=False)[0].centre, bias)
    assert of(module)[0] is None  # RoPE is somewhere else


def test_quantised_projections_are_probed():
    """As vLLM's linear layers: a forward that returns its output and a bias that was not added."""
    plain, _ = of(biased(Attention()))

    class Quantised(Projection):
        input_size, params_dtype = HIDDEN, torch.float32

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight.float(), self.bias), None

    module = biased(Attention())
    module.qkv_proj.__class__ = Quantised
    weight = module.qkv_proj.weight
    module.qkv_proj.weight = torch.nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
    own, what = of(module)
    assert what == "balance and centre"
    off = (own.balance.log2() - plain.balance.log2()).abs()
    assert off.max() <= 1
    assert off.mean() < 0.1
    torch.testing.assert_close(own.centre * own.balance, plain.centre * plain.balance)
    q, k = weight[: (HEADS + KV_HEADS) * DIM].split([HEADS * DIM, KV_HEADS * DIM])
    module.q_proj, module.k_proj, bias = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), module.qkv_proj.bias
    for name, rows, part in (("q_proj", q, slice(0, len(q))), ("k_proj", k, slice(len(q), len(q) + len(k)))):
        linear = getattr(module, name)
        linear.weight, linear.bias, linear.input_size = None, torch.nn.Parameter(bias[part]), HIDDEN
        linear.params_dtype = torch.float32
        linear.forward = lambda x, rows=rows, part=part: torch.nn.functional.linear(x, rows, bias[part])
    del module.qkv_proj
    parts, what = of(module)
    assert what == "balance and centre"
    assert (parts.balance.log2() - plain.balance.log2()).abs().mean() < 0.1
    torch.testing.assert_close(parts.centre * parts.balance, plain.centre * plain.balance)


def test_unsupported_modules_give_no_calibration():
    module = Attention(bias=False)
    assert of(module) == (None, "its weights need none")
    assert of(module, heads=HEADS * 2)[1] == "no projection with as many heads was found"
    module.qkv_proj.weight.data[0, 0] = torch.nan
    assert of(module)[1] == "its weights are not finite"
    module.qkv_proj.weight.data[0, 0] = 0.0
    module.inner_norm = torch.nn.LayerNorm(DIM)
    assert of(module)[1] == "Q or K may be normalised after its projection (inner_norm)"
    del module.inner_norm
    module.k_norm = torch.nn.Identity()
    assert of(module)[1] == "Q or K is normalised in an unknown way (Identity)"
    module = Attention(rotary=Rotary(pairs=DIM))
    assert of(module)[1] == "its RoPE is of an unknown kind"
    assert of(torch.nn.Sequential(torch.nn.Identity()), turned=False)[1].startswith("no projection")


def test_reloaded_weights_update_the_same_tensors():
    """Addresses stay, since CUDA graphs hold them; what was not there is not added."""
    first, second = of(biased(Attention()))[0], LayerCalibration(torch.full((KV_HEADS, DIM), 4.0), torch.ones(2, DIM))
    addresses = first.balance.data_ptr(), first.centre.data_ptr()
    update(first, second)
    assert first.balance.unique().tolist() == [4.0]
    assert first.centre.unique().tolist() == [1.0]
    update(first, None)
    assert (first.balance == 1).all()
    assert not first.centre.any()
    assert addresses == (first.balance.data_ptr(), first.centre.data_ptr())
    centred = LayerCalibration(None, torch.zeros(KV_HEADS, DIM))
    update(centred, second)
    assert centred.centre.unique().tolist() == [4.0]  # of K that no balance divides
    update(None, second)


@pytest.mark.parametrize(
    ("config", "used"),
    [({}, True), ({"weights": False}, False), ({"calibration": "no file"}, False)],
)
def test_a_layer_is_calibrated_after_loading(engine, caplog, config, used):
    engine.configure({"kvstrata": {"format": "K4V4"} | config}, rope_parameters={"rope_theta": 1e4})
    impl = impl_of(engine)
    module = biased(Attention(impl)).to(DEVICE)
    assert impl.layer.calibration is None
    with caplog.at_level(logging.INFO, "vllm.kvstrata"):
        impl.process_weights_after_loading(torch.bfloat16)
        again = impl_of(engine)
        second = biased(Attention(again)).to(DEVICE)
        again.process_weights_after_loading(torch.bfloat16)
    assert second.attn.impl is again
    assert [x.layer.calibration is not None for x in (impl, again)] == [used] * 2
    said = [record.getMessage() for record in caplog.records]
    assert said == ["kvstrata: the model's weights give K a balance and centre (Attention)"] * used
    if used:
        balance = impl.layer.calibration.balance
        address, expected = balance.data_ptr(), of(module)[0]
        assert torch.equal(balance.cpu(), expected.balance.cpu())
        assert balance.device.type == DEVICE.type
        module.qkv_proj.weight.data[HEADS * DIM :][5::16] *= 64  # weights that are loaded again
        impl.process_weights_after_loading(torch.bfloat16)
        assert impl.layer.calibration.balance.data_ptr() == address
        assert torch.equal(impl.layer.calibration.balance.cpu(), of(module)[0].balance.cpu())
        assert not torch.equal(impl.layer.calibration.balance.cpu(), expected.balance.cpu())


def test_rope_that_no_child_of_a_module_applies_is_unknown(engine):
    """Its model says that there is one; only one without any is calibrated."""
    for parameters, used in (({"rope_theta": 1e4}, False), (None, True)):
        engine.configure({"kvstrata": {"format": "K4V4"}}, rope_parameters=parameters)
        impl = impl_of(engine)
        module = biased(Attention(impl)).to(DEVICE)
        del module.rotary_emb
        impl.process_weights_after_loading(torch.bfloat16)
        assert (impl.layer.calibration is not None) == used


def test_a_layer_that_a_file_leaves_out_is_calibrated_by_its_weights(engine, tmp_path):
    """Short windows are not in a file; the layer's weights still are at hand."""
    own = LayerCalibration(torch.full((KV_HEADS, DIM), 2.0))
    Calibration([own], kinds=["layer", "none"]).save(path := tmp_path / "own.safetensors")
    options = {"format": "K4V4", "calibration": str(path)}
    engine.configure({"kvstrata": options}, text=dict(num_hidden_layers=2), rope_parameters={"rope_theta": 1e4})
    impls = [impl_of(engine) for _ in range(2)]
    modules = [biased(Attention(impl)).to(DEVICE) for impl in impls]
    for number, impl in enumerate(impls):
        impl.process_weights_after_loading(torch.bfloat16)
        assert impl.layer.calibration is None
        profile(impl, f"model.layers.{number}.attn")
    assert torch.equal(impls[0].layer.calibration.balance.cpu(), own.balance)
    before = impls[1].layer.calibration.balance
    assert torch.equal(before.cpu(), of(modules[1])[0].balance.cpu())
    for impl, module in zip(impls, modules, strict=True):
        module.qkv_proj.weight.data[HEADS * DIM :][5::16] *= 64  # weights that are loaded again
        impl.process_weights_after_loading(torch.bfloat16)
    assert torch.equal(impls[0].layer.calibration.balance.cpu(), own.balance)
    assert impls[1].layer.calibration.balance is before
    assert torch.equal(before.cpu(), of(modules[1])[0].balance.cpu())


def attended(engine, module, weights):
    """Error of decoding 300 tokens of a module, as a share of the output's spread; K4V4 without and with weights."""
    options = {"kvstrata": {"format": "K4V4", "weights": weights}}
    engine.configure(options, rope_parameters={"rope_theta": 1e4})
    impl = impl_of(engine)
    module.attn = Layer(impl)
    impl.process_weights_after_loading(torch.bfloat16)
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    torch.manual_seed(2)
    x = torch.randn(300, HIDDEN, device=DEVICE)
    rows = torch.nn.functional.linear(x, module.qkv_proj.weight, module.qkv_proj.bias)
    q, k, v = rows.unflatten(1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
    q, k = (module.rotary_emb.turn(x) for x in (q, k))
    wide = (x[-1:] if n == 1 else x.repeat_interleave(n, 1) for x, n in ((q, 1), (k, 2), (v, 2)))
    wide = [x.float().transpose(0, 1) for x in wide]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, scale=DIM**-0.5).transpose(0, 1)
    q, k, v = (x.to(dtype).contiguous() for x in (q, k, v))
    cache = torch.zeros(5, KV_HEADS, 64, impl.layer.bytes_per_token, dtype=torch.uint8, device=DEVICE)
    impl.do_kv_cache_update(module.attn, k, v, cache, torch.arange(300, device=DEVICE))
    spec = engine.spec(block_size=64, num_kv_heads=KV_HEADS, head_size=DIM, head_size_v=DIM)
    config = vllm_standin.config_of(options)
    builder = engine.ours.KvstrataBuilder(spec, ["layer"], config, DEVICE)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    common = engine.common(
        query_start_loc=starts, query_start_loc_cpu=starts.cpu(), num_reqs=1, num_actual_tokens=1, max_query_len=1,
        seq_lens=torch.tensor([300], dtype=torch.int32, device=DEVICE), max_seq_len=300, causal=True,
        block_table_tensor=torch.arange(5, dtype=torch.int32, device=DEVICE)[None],
    )  # fmt: skip
    out = torch.full_like(q[-1:], torch.nan)
    impl.forward(module.attn, q[-1:], k[-1:], v[-1:], cache, builder.build(0, common), output=out)
    return ((out.float() - expected).norm() / expected.norm()).item()


def test_keys_with_large_biases_lose_far_less(engine):
    module = biased(Attention(rotary=Rotary(1e6))).to(DEVICE)
    without, with_weights = (attended(engine, module, weights) for weights in (False, True))
    plain = attended(engine, Attention(rotary=Rotary(1e6)).to(DEVICE), True)  # without biases
    assert with_weights < 0.25 * without, (with_weights, without, plain)
    assert with_weights < 3 * plain
