"""Our vLLM backend with stand-ins for vLLM: specs, refusals, metadata and the shapes that vLLM gives."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

import vllm_standin
from conftest import HAS_GPU
from kvstrata import Format
from kvstrata.engines import VLLM_BACKEND, register_vllm
from vllm_standin import CONFIG, DEVICE, configured, layer_of  # noqa: F401


def spec_of(engine, **given):
    """Spec of a Llama-3.1-8B layer as vLLM makes it."""
    sizes = dict(block_size=64, num_kv_heads=8, head_size=128, head_size_v=128, dtype=torch.bfloat16)
    return engine.spec(**(sizes | dict(tokens_per_state=1) | given))


@pytest.mark.parametrize("name", ["K8V8", "K8V4", "K4V4", "K4V2", "K3V3", "K2V2"])
@pytest.mark.parametrize("block_size", [1, 16, 64, 256])  # vLLM also asks for one token
def test_spec_has_the_bytes_of_pages(engine, name, block_size):
    engine.configure({"kvstrata": {"format": name}})
    spec = engine.ours.KvstrataBackend.customize_spec(spec_of(engine, block_size=block_size))
    assert spec.state_content_bytes == Format.parse(name, 128).bytes_per_token
    assert (spec.dtype, spec.block_size, spec.num_kv_heads) == (torch.uint8, block_size, 8)
    assert engine.ours.KvstrataBackend.customize_spec(spec) is spec


def test_spec_outside_the_configuration_uses_the_latest(engine):
    layer_of(engine)
    engine.configure(None)
    assert engine.ours.KvstrataBackend.customize_spec(spec_of(engine)).state_content_bytes == 132


def test_spec_before_any_configuration_is_an_error(engine):
    engine.configure(None)
    with pytest.raises(RuntimeError, match="before it created a layer"):
        engine.ours.KvstrataBackend.customize_spec(spec_of(engine))


def test_backend_reports_its_capabilities(engine):
    backend = engine.ours.KvstrataBackend
    assert backend.get_name() == "CUSTOM"  # vLLM looks it up among its backends
    assert not backend.forward_includes_kv_cache_update
    assert backend.get_preferred_block_size(16) == 64
    assert [layout.value[-2:] for layout in backend.supported_kv_cache_layouts()] == [(3, 4)] * 3
    assert backend.supports_compute_capability(SimpleNamespace(major=8))
    assert not backend.supports_compute_capability(SimpleNamespace(major=7))


def test_vllm_reasons_become_explanations(engine):
    backend = engine.ours.KvstrataBackend
    backend.reasons = ("MLA not supported", "something new")
    first, second = backend.validate_configuration(head_size=576)
    assert first == "kvstrata: models with multi-head latent attention (MLA) are not supported."
    assert second == "kvstrata: something new."


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(alibi_slopes=[0.5]), "ALiBi"),
        (dict(attn_type="encoder_decoder"), "attention of type encoder_decoder"),
        (dict(kv_sharing_target_layer_name="model.layers.1.attn"), "share the K and V"),
        (
            dict(kv_cache_dtype="fp8"),
            "--kv-cache-dtype has to be auto, or bfloat16 or float16 if .* fp8 cache, got 'fp8'",
        ),
        (dict(chunk_lookback=2), "'chunk_lookback'"),
        (dict(head_size=80), "head_dim: expected one of"),
        (dict(num_kv_heads=1), "query heads per KV head"),
    ],
)
def test_unsupported_layers_are_refused(engine, given, message):
    with pytest.raises(ValueError, match=f"^kvstrata: .*{message}.*[.]$"):
        layer_of(engine, **given)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "additional_config: expected"),
        ({"kvstrata": {"format": "fp8"}}, "format: expected K and V of 8, 4, 3 or 2 bits such as 'K4V4', got 'fp8'"),
        ({"kvstrata": {"format": "K4V4", "tail": "yes"}}, "tail: expected true or false"),
    ],
)
def test_wrong_options_are_refused(engine, config, message):
    """By every part that vLLM asks at start-up."""
    spec = engine.ours.KvstrataBackend.customize_spec(spec_of(engine))
    engine.configure(config)
    for ask in (
        lambda: layer_of(engine),
        lambda: engine.ours.KvstrataBackend.customize_spec(spec_of(engine)),
        lambda: engine.ours.KvstrataBuilder(spec, ["layer"], vllm_standin.config_of(config), DEVICE),
    ):
        with pytest.raises(ValueError, match=f"^kvstrata: {message}.*[.]$"):
            ask()


def test_unsupported_specs_are_refused(engine):
    for given, message in (
        (dict(head_size_v=64), "expected V as wide as K, 128, got a head of 64"),
        (dict(head_size=80, head_size_v=80), "head_dim: expected one of"),
    ):
        with pytest.raises(ValueError, match=f"^kvstrata: {message}"):
            engine.ours.KvstrataBackend.customize_spec(spec_of(engine, **given))
    for given, message in (  # fields of specs that vLLM derives from this one
        (dict(attention_chunk_size=8192), "chunked local attention"),
        (dict(sink_len=128), "layers with K and V of their own in every request"),
        (dict(non_causal=True), "non-causal attention"),
    ):
        spec = SimpleNamespace(head_size=128, head_size_v=128, state_content_bytes=None, **given)
        with pytest.raises(ValueError, match=f"^kvstrata: {message} .* not supported[.]$"):
            engine.ours.KvstrataBackend.customize_spec(spec)


def builder_of(engine, drafts=0, **changed):
    spec = engine.ours.KvstrataBackend.customize_spec(spec_of(engine))
    config = engine.current.config.additional_config
    return engine.ours.KvstrataBuilder(spec, ["layer"], vllm_standin.config_of(config, drafts, **changed), DEVICE)


def test_too_many_drafts_are_refused(engine):
    builder_of(engine, 15)
    with pytest.raises(ValueError, match="up to 15 draft tokens"):
        builder_of(engine, 16)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def test_metadata_of_a_mixed_batch(engine):
    """Two decodes, a second chunk and a first one; buffers are longer than the batch, as vLLM's are."""
    starts = ints(0, 1, 2, 34, 46, 46, 46)
    common = engine.common(
        query_start_loc=starts,
        query_start_loc_cpu=starts.cpu(),
        seq_lens=ints(70, 3, 96, 12, 0, 0),
        seq_lens_cpu_upper_bound=torch.tensor([70, 3, 96, 12], dtype=torch.int32),
        num_reqs=4,
        num_actual_tokens=46,
        max_query_len=32,
        max_seq_len=96,
        block_table_tensor=torch.arange(12, dtype=torch.int32, device=DEVICE).view(6, 2),
        slot_mapping=torch.arange(46, device=DEVICE),
        causal=True,
    )
    batch = builder_of(engine).build(0, common).batch
    decode, short = batch.decodes
    assert (decode.first, decode.tokens, decode.seq_lens.tolist()) == (0, 2, [70, 3])
    assert (short.first, short.tokens, short.seq_lens.tolist()) == (34, 12, [12])
    (chunk,) = batch.prefills
    assert (chunk.first, chunk.tokens, chunk.cu_seqlens_q.tolist()) == (2, 32, [0, 32])
    assert chunk.block_table.tolist() == [[4, 5]]
    assert (chunk.max_seqlen_k, chunk.total_tokens, chunk.exact, chunk.prefix) == (96, 96, True, True)
    assert batch.rows is None
    common.causal = False
    with pytest.raises(ValueError, match="non-causal"):
        builder_of(engine).build(0, common)


def step_of(engine, table, first, last, **given):
    """Metadata of one request whose tokens ``first .. last`` are new, and their slots."""
    starts, position = ints(0, last - first), torch.arange(first, last, device=DEVICE)
    slots = table[0, position // 64].long() * 64 + position % 64
    common = engine.common(
        query_start_loc=starts, query_start_loc_cpu=starts.cpu(), seq_lens=ints(last),
        seq_lens_cpu_upper_bound=torch.tensor([last], dtype=torch.int32), num_reqs=1,
        num_actual_tokens=last - first, max_query_len=last - first, max_seq_len=last, block_table_tensor=table,
        slot_mapping=slots, causal=True, **given,
    )  # fmt: skip
    return common, slots


@pytest.mark.parametrize(
    ("format", "tail", "error"), [("K8V8", False, 0.03), ("K8V8", True, 0.03), ("K2V2", True, 0.02)]
)
def test_prompts_and_decodes_through_the_backend(engine, format, tail, error):
    """Slots and blocks as vLLM makes them; the output is that of attention over the rows, within the codes' error.

    With a tail the second page, and so what its tokens see of themselves, is exact at any format.
    """
    engine.configure({"kvstrata": {"format": format, "tail": tail}})
    impl = layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64, scale=0.125, sliding_window=None)
    spec = engine.ours.KvstrataBackend.customize_spec(spec_of(engine, num_kv_heads=2, head_size=64, head_size_v=64))
    cache = torch.zeros(5, 2, 64, spec.state_content_bytes, dtype=spec.dtype, device=DEVICE)
    layer = SimpleNamespace(layer_name="model.layers.0.self_attn.attn")
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    torch.manual_seed(0)
    q, k, v = (torch.randn(82, heads, 64, device=DEVICE).to(dtype) for heads in (4, 2, 2))
    v[:64] *= 0.02 if format == "K2V2" else 1.0  # what is packed at 2 bit has little weight
    impl.forward(layer, q, k, v, torch.empty(0), None, torch.empty_like(q))  # memory profiling
    assert (impl.layer.tail is not None) == tail
    table, builder = ints(3, 1)[None], builder_of(engine)
    outs = []
    for first, last in ((0, 40), (40, 70), (70, 71), (71, 82)):
        common, slots = step_of(engine, table, first, last, req_idx=np.array([6]))
        rows = slice(first, last)
        impl.do_kv_cache_update(layer, k[rows], v[rows], cache, slots)
        out = torch.full_like(q[rows], torch.nan)
        given = impl.forward(layer, q[rows], k[rows], v[rows], cache, builder.build(0, common), output=out)
        assert given is out
        outs.append(out)
        assert bool(cache[1].any()) == (last > 64 and not tail)
    wide = (x.float().repeat_interleave(n, 1).transpose(0, 1) for x, n in ((q, 1), (k, 2), (v, 2)))
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=0.125).transpose(0, 1)
    wrong = (torch.cat(outs).float() - expected).abs()
    assert wrong[:64].max() < error
    assert wrong.max() < error if format == "K8V8" else wrong.mean() < 0.2
    assert not cache[[0, 2, 4]].any()


def test_tails_of_a_batch(engine):
    """Indices of the runner's table, at the same address in every step; padding has none."""
    engine.configure({"kvstrata": {"format": "K4V4", "tail": True}})
    builder = builder_of(engine)
    starts = ints(0, 1, 2, 2)
    common = engine.common(
        query_start_loc=starts, query_start_loc_cpu=starts.cpu(), seq_lens=ints(9, 5, 0), num_reqs=3,
        num_actual_tokens=3, max_query_len=1, max_seq_len=9, block_table_tensor=torch.zeros_like(starts)[:3, None],
        slot_mapping=torch.tensor([1, 2, -1]), causal=True, req_idx=np.array([4, 1]),
    )  # fmt: skip
    first = builder.build(0, common).batch
    assert first.rows.tail_slots.tolist() == [4, 1, -1]
    common.req_idx = np.array([7, 2])
    second = builder.build(0, common).batch
    assert second.decodes[0].tail_slots.data_ptr() == first.decodes[0].tail_slots.data_ptr()
    assert first.rows.tail_slots.tolist() == [7, 2, -1]
    for wrong in (None, np.arange(4)):
        common.req_idx = wrong
        with pytest.raises(RuntimeError, match="a tail needs the index of each of 3 requests"):
            builder.build(0, common)


@pytest.mark.parametrize(
    ("drafts", "changed", "message"),
    [
        (0, dict(use_v2_model_runner=False), "a tail needs model runner V2"),
        (0, dict(is_hybrid=True), "a tail needs prefix hits of whole blocks"),
        (3, dict(method="eagle"), "a tail works with drafts of .*, got 'eagle'"),
    ],
)
def test_tail_with_unsupported_configuration_raises(engine, drafts, changed, message):
    engine.configure({"kvstrata": {"format": "K4V4", "tail": True}})
    with pytest.raises(ValueError, match=message):
        builder_of(engine, drafts, **changed)
    engine.configure({"kvstrata": {"format": "K4V4"}})
    builder_of(engine, drafts, **changed)


def test_tail_is_counted_before_the_cache_is_allocated(engine):
    engine.configure({"kvstrata": {"format": "K4V4", "tail": True}}, drafts=3, max_num_seqs=5)
    impl = layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64)
    q = torch.randn(3, 4, 64, device=DEVICE)
    impl.forward(None, q, q, q, torch.empty(0), None, torch.empty_like(q))
    assert [x.shape for x in impl.layer.tail] == [(5, 2, 128, 64)] * 2  # a page, and drafts over its edge


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_ranks_of_tensor_parallel(engine, ranks):
    """Llama-3.1-8B on up to 8 GPUs: bytes and shapes of a rank; the same output as on one GPU."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    q, k, v = (torch.randn(20, heads, 64, device=DEVICE).to(dtype) for heads in (32, 8, 8))
    outs = []
    for rank in range(ranks):
        engine.current.rank, engine.current.ranks = rank, ranks
        heads, kv_heads = 32 // ranks, 8 // ranks
        impl = layer_of(engine, num_heads=heads, num_kv_heads=kv_heads, head_size=64, scale=0.125)
        spec = spec_of(engine, num_kv_heads=kv_heads, head_size=64, head_size_v=64)
        spec = engine.ours.KvstrataBackend.customize_spec(spec)
        cache = torch.zeros(2, kv_heads, 64, spec.state_content_bytes, dtype=torch.uint8, device=DEVICE)
        mine = [x.unflatten(1, (ranks, -1))[:, rank] for x in (q, k, v)]
        out = torch.full_like(mine[0], torch.nan, memory_format=torch.contiguous_format)
        for first, last in ((0, 19), (19, 20)):
            common, slots = step_of(engine, ints(1)[None], first, last)
            rows = [x[first:last] for x in mine]
            layer = SimpleNamespace(layer_name="model.layers.0.self_attn.attn")
            impl.do_kv_cache_update(layer, *rows[1:], cache, slots)
            impl.forward(layer, *rows, cache, builder_of(engine).build(0, common), output=out[first:last])
        outs.append(out)
    wide = (x.float().repeat_interleave(n, 1).transpose(0, 1) for x, n in ((q, 1), (k, 4), (v, 4)))
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, scale=0.125).transpose(0, 1)
    wrong = (torch.cat(outs, 1).float() - expected).abs()
    assert wrong[:19].max() < 0.02  # a prompt sees its own rows
    assert 0.0 < wrong[19].max() < 0.3  # 4-bit codes


def test_profiling_runs_without_a_cache(engine):
    impl = layer_of(engine, num_heads=4, num_kv_heads=2, head_size=64)
    q, k = torch.randn(3, 4, 64, device=DEVICE), torch.randn(3, 2, 64, device=DEVICE)
    impl.do_kv_cache_update(None, k, k, torch.empty(0), torch.empty(0, dtype=torch.int64))
    out = torch.full_like(q, torch.nan)
    impl.forward(None, q, k, k, torch.empty(0), None, out)
    assert not out.any()
    with pytest.raises(NotImplementedError, match="quantised attention outputs"):
        impl.forward(None, q, k, k, torch.empty(0), None, out, output_scale=torch.ones(1))


@pytest.mark.parametrize(
    ("drafts", "changed", "ahead"),
    [
        (0, {}, 0), (3, {}, 0), (3, dict(method="eagle3"), 0), (3, dict(method="draft_model"), 1),
        (3, dict(method="eagle3", parallel_drafting=True), 3),
    ],
)  # fmt: skip
def test_host_lengths_of_draft_models_are_bounds(engine, drafts, changed, ahead):
    config = vllm_standin.config_of(CONFIG, drafts, **changed)
    assert engine.ours.slots_ahead(config) == ahead


class Registry(ModuleType):
    """vLLM's registry with the members that are recorded; ``path`` is what CUSTOM stands for."""

    def __init__(self, path=None):
        super().__init__("registry")
        self.path = path
        custom = SimpleNamespace(is_overridden=lambda: self.path is not None, get_path=lambda: self.path)
        self.AttentionBackendEnum = SimpleNamespace(CUSTOM=custom)

    def register_backend(self, backend, class_path=None, is_mamba=False):
        assert backend is self.AttentionBackendEnum.CUSTOM
        self.path = class_path


@pytest.mark.parametrize(
    ("before", "after", "warning"),
    [(None, VLLM_BACKEND, ""), (VLLM_BACKEND, VLLM_BACKEND, ""), ("a.B", "a.B", "is already a.B")],
)
def test_plugin_registers_once_and_keeps_others(monkeypatch, caplog, before, after, warning):
    registry = Registry(before)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", registry)
    for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    register_vllm()
    register_vllm()
    assert registry.path == after
    assert warning in caplog.text
    assert bool(caplog.text) == bool(warning)


def test_plugin_only_warns_with_another_vllm_version(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))  # it has no registry
    for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends.registry"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    register_vllm()
    assert "not that of 0.32" in caplog.text


def test_the_named_backend_exists(engine):
    module, name = VLLM_BACKEND.rsplit(".", 1)
    assert getattr(sys.modules[module], name) is engine.ours.KvstrataBackend
