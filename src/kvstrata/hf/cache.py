"""``StrataCache``: a transformers cache whose full-attention layers are the layers of one `TieredCache`.

row of the batch    = request of the TieredCache
column of the batch = a token or padding; only tokens are stored, so every row has its own length
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

import kvstrata
from kvstrata.attention.cache_warmup import load_kernels
from kvstrata.cache import TieredCache
from kvstrata.cache.ops.clone import clone
from kvstrata.cache.policy.budget import DEFAULT, Memory, check_budget
from kvstrata.checks import check_int
from kvstrata.quant.calibration import Calibration

from . import attention, balance, files, mass, support, turns
from .columns import Columns
from .forward import Forward
from .guard import Guard, WindowGuard
from .hybrid import HybridLayer
from .layer import StrataLayer
from .mask import LastMask
from .packed import PackedCache
from .prompts import Prompts
from .rope import frequencies, interleaved
from .steps import Steps
from .window import WindowLayer, window_of
from .window_prompts import WindowPrompts
from .window_warmup import warm_up

TOKENS = 2**15  # default capacity of the tables, unless a prompt or the config needs more; positions then take 2 bytes

# Arguments of TieredCache that the caller may not pass here, and what determines them instead.
OWN = dict.fromkeys(("layers", "kv_heads", "head_dim", "device", "rope", "interleaved"), "")
OWN["max_requests"] = " (max_batch= sets the number of rows)"
OWN["sensitivity"] = " (a calibration has it)"


class StrataCache(Columns):
    """KV cache of a transformers model under a byte budget, in tiers of 2 to 16 bit.

    Pass it as ``past_key_values`` to ``model.generate`` or to a forward, where K and V are
    ``[rows, kv_heads, tokens, D]``. A forward mutates the cache.

    Args:
        config: the model's (``model.config``); it is not changed.
        budget: a fraction of 16 bit; 1.0 compresses nothing, None is no limit.
        budget_bytes: bytes for the whole cache, instead of ``budget``.
        tiers, recent_tokens, sink_tokens, page_tokens, policy, ...: passed to `kvstrata.TieredCache`.
        dtype: dtype of tokens that are not compressed; None is the model's, or float16 if a float32 model is
            compressed.
        max_batch: largest number of rows, for `batch_repeat_interleave`; None is that of the first forward.
        max_tokens: largest length of a row; None starts with the config's context length, at most 32768 for shorter
            prompts, and grows when a row becomes longer.
        importance_queries: maximum number of prompt queries sampled per head for importance: the newest 64, and evenly
            spaced ones of those before, others in each query head of a KV head.
        calibration: balance, centres and mean queries of the model, or the file that `kvstrata calibrate` wrote; with
            sensitivities, they also distribute the budget's bytes over layers. None, and a calibration with
            sensitivities alone, leave the estimates to each row's prompt; ``balance=False`` then uses no balance.
        capture: run decode steps, one new token in every row, as CUDA graphs; None does so on a GPU. `decoding` says
            how they run and, if they are eager, why.
        compile: compile the forward with inductor before it is captured.
        format: a format such as ``K4V4``; packs all tokens in it instead of using a budget. The result is a
            `kvstrata.hf.packed.PackedCache`, whose steps `generate` may compile.

    Layers that cannot be compressed (short sliding windows, linear attention, other shapes of K and V) are left to
    transformers; ``plain_layers`` maps each to the reason. ``tiered`` is the TieredCache, available from the first
    token. Gradients do not flow through stored tokens, nor through the attention of later calls with few tokens. Not
    safe under CUDA graph capture by the caller, since a forward reads sizes on the host: the cache captures steps
    itself, and `kvstrata.hf.step` has a step for engines to capture.

    Raises:
        ValueError, TypeError: an argument does not fit, or the model cannot be compressed.
        NotImplementedError: from a forward with a mask beyond causal order and padding, packed sequences or
            ``output_attentions``, and from offloading.
        BudgetExceeded: from a forward whose tokens do not fit ``budget_bytes``.
        RuntimeError: from a forward after one that failed when some layers had stored its tokens; `reset` is needed.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, **sizes))
        >>> cache = StrataCache(model.config, budget=0.25)
        >>> tokens = model.generate(torch.ones(1, 8, dtype=torch.long), past_key_values=cache, max_new_tokens=4)
        >>> cache.tiered.length(0)
        11
    """

    def __new__(cls, *arguments: Any, format: str | None = None, **options: Any) -> Any:
        """Create a `PackedCache` if a format is given; copies and pickles pass no arguments."""
        return super().__new__(cls) if format is None else PackedCache(*arguments, format=format, **options)

    def __init__(
        self,
        config: PreTrainedConfig,
        budget: float | None = DEFAULT,
        *,
        budget_bytes: int | None = None,
        dtype: torch.dtype | None = None,
        max_batch: int | None = None,
        max_tokens: int | None = None,
        importance_queries: int = 512,
        calibration: Calibration | str | PathLike[str] | None = None,
        capture: bool | None = None,
        compile: bool = False,
        format: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config: expected the model's, model.config, got {type(config).__name__}")
        text = config.get_text_config(decoder=True)
        support.check(config, attention.check_implementation(text))
        known = [name for name in inspect.signature(TieredCache).parameters if name not in OWN]
        for name in options:
            if name in OWN:
                raise TypeError(f"{name}: expected to be left out, since the model determines it{OWN[name]}")
            if name not in known:
                raise TypeError(f"{name}: expected an option of TieredCache ({', '.join(known)}), got an unknown one")
        # Check values now, not in the middle of the first forward.
        check_int("importance_queries", importance_queries, 1)
        for name, flag in (("capture", capture), ("compile", compile)):
            if type(flag) is not bool and (flag is not None or name == "compile"):
                raise TypeError(f"{name}: expected True or False, got {flag!r}")
        if max_batch is not None:
            check_int("max_batch", max_batch, 1)
        amount = check_budget(budget, budget_bytes)
        early: dict[str, Any] = {
            name: value for name, value in (("dtype", dtype), ("max_tokens", max_tokens)) if value is not None
        }
        TieredCache(1, 1, 64, budget=None, **early, **options)
        self._compresses = amount is not None
        fraction = None if budget is None else float(budget)
        self.options = options | ({"budget": fraction} if budget_bytes is None else {"budget_bytes": budget_bytes})
        self.dtype, self.max_batch, self.max_tokens = dtype, max_batch, max_tokens
        self.importance_queries = importance_queries
        self.calibration = support.calibration_of(calibration)
        self._text = text
        self.plain_layers: dict[int, str] = {}
        self.context = support.context(text) or TOKENS
        self.prompts, self._unfinished = Prompts(), None
        self._shape: tuple[int, int] | None = None
        self.steps, self.forward = Steps(), Forward(capture, compile)
        self._real = self._room = np.ones((0, 0), bool)  # [rows, columns], a view of a buffer that may be longer
        self._checked, self.checked_window = LastMask(), LastMask()
        self.guard: Guard | None = None  # set during a prompt that is checked
        self.window_guard: WindowGuard | None = None
        self.window_prompts = WindowPrompts()

        layers = DynamicCache(config=config).layers
        if self.calibration is not None:
            self.calibration.check_kinds(support.kinds_of(layers, text))
        self.shares = bool(getattr(text, "num_kv_shared_layers", None))  # layers that share the K and V of others
        self._compressed = windows = 0
        for place, layer in enumerate(layers):
            window = window_of(text, place, layer)
            if window and isinstance(amount, float):
                recent = options.get(
                    "recent_tokens", inspect.signature(TieredCache).parameters["recent_tokens"].default
                )
                layers[place] = WindowLayer(self, place, windows, window, amount, recent)
                windows += 1
            elif type(layer) is LinearAttentionAndFullAttentionLayer:
                layers[place] = HybridLayer(self, place, self._compressed, layer.number_of_states)
                self._compressed += 1
            elif type(layer) is not DynamicLayer:
                self.plain_layers[place] = support.why_plain(text, place, layer)
            else:
                layers[place] = StrataLayer(self, place, self._compressed)
                self._compressed += 1
        if self.calibration is not None and windows:
            self.calibration.check_windows(windows)
            if not self._compressed and self.calibration.layers:
                own = len(self.calibration.layers)
                raise ValueError(f"calibration: expected one without layers of full attention, got one with {own}")
        super().__init__(layers=layers)
        support.warn_if_useless(self)
        self._check_sizes()
        attention.connect(self)

    @classmethod
    def from_file(cls, config: PreTrainedConfig, path: str | PathLike[str], **options: Any) -> StrataCache:
        """Create a cache with the arguments in a JSON file as `kvstrata advise` writes it; ``options`` override them.

        Raises ValueError unless the file holds a JSON object, and what `StrataCache` raises.
        """
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"path: expected a JSON object of arguments in {path}, got {error}") from error
        if not isinstance(given, dict):
            raise ValueError(f"path: expected a JSON object of arguments in {path}, got {type(given).__name__}")
        if "budget" in options or "budget_bytes" in options:
            given = {name: value for name, value in given.items() if name not in ("budget", "budget_bytes")}
        return cls(config, **(given | options))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the whole cache to a safetensors file, for `load`.

        Raises FileNotFoundError for a missing folder and NotImplementedError for layers of linear attention. Reads
        everything back from the device, so it cannot be captured.
        """
        self._undo_step()
        self.window_prompts.finish()
        files.save(path, self, self._text, self._tiered, self._real)

    @classmethod
    def load(
        cls,
        config: PreTrainedConfig,
        path: str | PathLike[str],
        device: torch.device | str = "cpu",
        *,
        calibration: Calibration | str | PathLike[str] | None = None,
        capture: bool | None = None,
        compile: bool = False,
    ) -> StrataCache:
        """Read a cache that `save` wrote; ``calibration``, ``capture`` and ``compile`` are not in the file.

        Raises ValueError for any other file and for a model of another shape.
        """
        return files.load(cls, config, path, device, dict(calibration=calibration, capture=capture, compile=compile))

    def __copy__(self) -> StrataCache:
        """Deep copy: layers and pages cannot have two owners."""
        return copy.deepcopy(self)

    # The TieredCache

    @property
    def tiered(self) -> TieredCache:
        """TieredCache of the compressed layers; raises RuntimeError before the first token."""
        self.prompts.finish()
        return self.unfinished

    @property
    def uses_mass(self) -> bool:
        """True if attention mass decides which tokens are demoted."""
        return self.unfinished.policy.name == "importance" and self.unfinished.budget.amount is not None

    @property
    def balances(self) -> bool:
        """True if the balance of K is estimated from each row's prompt."""
        return self._estimates and self.unfinished.balance is not None

    @property
    def _estimates(self) -> bool:
        """True without a calibration, or with one that has only sensitivities."""
        return self.calibration is None or not self.calibration.has_rows

    def _misfit(self, key: torch.Tensor, value: torch.Tensor) -> str | None:
        """Reason why K and V of a layer, ``[rows, kv_heads, n, D]``, cannot be compressed, or None."""
        return support.misfit(key, value, self._shape)

    @property
    def window_layers(self) -> dict[int, int]:
        """Layers of the model with a compressed sliding window, and the window's number of tokens."""
        layers = enumerate(self.layers)
        return {place: layer.sliding_window for place, layer in layers if isinstance(layer, WindowLayer)}

    @property
    def eager_only(self) -> str | None:
        """Reason why a decode step needs the host in some layers and cannot be captured, or None."""
        if self.plain_layers:
            return "some layers are not compressed"
        if any(isinstance(layer, HybridLayer) for layer in self.layers):
            return "some layers have states in addition to K and V"
        return "layers share K and V" if self.shares else None

    def _keep_plain(self, place: int, reason: str) -> DynamicLayer:
        """Replace a compressed layer by transformers' own; ``reason`` goes to ``plain_layers``."""
        self.plain_layers[place], self.layers[place] = reason, self.layers[place].plain()
        support.warn_if_useless(self)
        return self.layers[place]

    def build(self, key: torch.Tensor) -> None:
        """Create the TieredCache for K ``[rows, kv_heads, n, D]``; does nothing if there is one.

        The first forward calls it. Raises ValueError for a budget below the lowest tier, and for options that do not
        fit the model's sizes.
        """
        rows, heads, new, dim = key.shape
        if self._unfinished is not None:
            return
        self._shape = heads, dim
        self._tiered = self._make(rows, heads, new, dim, key.dtype, key.device)
        self._check_budget(self._tiered)
        load_kernels(self._tiered, self._query_heads(heads))
        self._real = np.ones((rows, 0), bool)
        recent = self.options.get("recent_tokens")
        if recent is not None and recent >= new > 1 and self._tiered.budget.amount is not None:
            warnings.warn(
                f"recent_tokens: expected fewer than the {new} tokens of the first forward, got {recent}; nothing is"
                f" compressed until a row has more than {recent + self._tiered.sink_tokens} tokens",
                stacklevel=2,
            )

    def _make(
        self, rows: int, heads: int, new: int, dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> TieredCache:
        """Empty TieredCache for a first forward whose K has these sizes, of a model in ``dtype``."""
        if self.dtype is not None:
            dtype = self.dtype
        elif dtype == torch.float32 and self._compresses:
            dtype = torch.float16
        tokens = self.max_tokens
        if tokens is None:
            tokens = min(self.context, TOKENS) if 2 * new <= TOKENS else max(self.context, 2 * new)
        rope, requests = frequencies(self._text, dim), max(rows, self.max_batch or 0)
        sizes: dict[str, Any] = dict(dtype=dtype, device=device, max_requests=requests, max_tokens=tokens, rope=rope)
        sensitivity = None if self.calibration is None else self.calibration.sensitivity
        sizes |= dict(calibration=self.calibration, sensitivity=sensitivity, balance=self._compresses)
        return TieredCache(self._compressed, heads, dim, **sizes | self.options)

    def _query_heads(self, kv_heads: int) -> int | None:
        """Query heads of a layer with ``kv_heads`` KV heads, by the config's ratio; None if it has none."""
        heads = support.size(self._text, "num_attention_heads")
        groups = support.size(self._text, "num_key_value_heads") or heads
        return kv_heads * heads // groups if heads and groups and heads % groups == 0 else None

    def warmup(self, model: PreTrainedModel, rows: int = 1, progress: bool | None = None) -> None:
        """Compile and load everything that a prompt, decode steps and later turns of ``model`` need with this cache.

        The first forward does this for CUDA kernels; this call does it ahead of time, and also covers what torch,
        Triton and numba compile at first use. ``rows`` of the batch; ``progress`` as in `kvstrata.warmup`. The cache is
        not changed. Raises what `kvstrata.warmup` raises.
        """
        self.forward.load_kernels(model.device)
        heads, dim = self._config_heads()
        query_heads = self._query_heads(heads) if heads else None
        if not heads or not dim:
            return
        if self._compressed:
            tiered = self._make(rows, heads, 1, dim, model.dtype, model.device)
            kvstrata.warmup(tiered, query_heads, progress=progress)
            if query_heads and self._compresses:
                sizes = (query_heads, heads, dim, model.dtype, model.device)
                mass.load_kernels(*sizes)
                if not self.shares:
                    turns.load_kernels(tiered, query_heads)
                if self._estimates and tiered.balance is not None:
                    balance.load_kernels(*sizes, tiered.rope, interleaved(model))
        if query_heads and (windows := self._windows()):
            warm_up(windows[0], model, query_heads, (rows, heads, dim), progress)

    def _config_heads(self) -> tuple[int | None, int | None]:
        """KV heads and head_dim from the config, None if `_misfit` would refuse them."""
        return support.sizes(self._text)[1:]

    def _adopt(self, tiered: TieredCache, real: np.ndarray) -> None:
        """Use a TieredCache whose requests are the rows of ``real``, bool ``[rows, columns]``, False for padding."""
        self._tiered, self._real = tiered, real
        self._shape = tiered.kv_heads, tiered.head_dim

    def _reserve(self, tokens: int) -> None:
        """Make room for rows of ``tokens`` tokens; raises ValueError if that exceeds ``max_tokens``."""
        most = self.tiered.max_tokens
        if tokens <= most:
            return
        if self.max_tokens is not None:
            raise ValueError(f"max_tokens: expected at least {tokens}, which a row of the batch has now, got {most}")
        self._flush()
        for layer in self._strata():
            layer.ledger = None
        self._tiered = clone(self.tiered, max_tokens=max(self.context, 2 * tokens))
        self.steps.forget()
        self.forward.drop()

    def _check_sizes(self) -> None:
        """Refuse a budget that is too low for the sizes in the config; `build` checks the sizes of the model itself."""
        _, dim = self._config_heads()
        if not self._compressed or dim is None:
            return
        probe = TieredCache(
            self._compressed,
            1,  # with tensor parallelism a rank has fewer heads than the config says
            dim,
            dtype=self.dtype or torch.float16,
            max_requests=self.max_batch or 1,
            max_tokens=self.max_tokens or min(self.context, TOKENS),
            **self.options,
        )
        self._check_budget(probe)

    def _check_budget(self, tiered: TieredCache) -> None:
        """Refuse a budget below the lowest tier before the first token, not in the middle of a text."""
        budget = tiered.budget
        least = budget.page_price[-1] / tiered.page_tokens / budget.token_bytes
        if isinstance(budget.amount, float) and budget.amount <= least and not tiered.policy.evict:
            self._tiered = self._shape = None
            raise ValueError(
                f"budget: expected more than {least:.3f}, which {tiered.formats[-1].name} of {tiered.head_dim} values"
                f" takes, or evict=True, got {budget.amount}"
            )

    def memory(self) -> Memory:
        """Bytes in use, as `TieredCache.memory` counts them, plus those of layers that are not compressed."""
        self.window_prompts.finish()
        plain = [tree_leaves(vars(self.layers[place])) for place in self.plain_layers]
        plain += [layer.states() for layer in self.layers if isinstance(layer, HybridLayer)]
        held = sum(x.nbytes for tensors in plain for x in tensors if torch.is_tensor(x))
        windows = [self.layers[place] for place in self.window_layers]
        packed = sum(x.nbytes for layer in windows for x in layer.tensors().values())
        full = held + sum(layer.full_bytes() for layer in windows)
        own = {"plain_layers": held} | ({"window_layers": packed} if windows else {})
        if self._tiered is None:
            return Memory(kinds=own, tiers={}, page_slack=0, slab_slack=0, full=full)
        memory = self._tiered.memory()
        allowed = None if memory.allowed is None else memory.allowed + held + packed
        return dataclasses.replace(memory, kinds=memory.kinds | own, full=memory.full + full, allowed=allowed)

    def __repr__(self) -> str:
        plain = "".join(f", layer {place} plain: {why}" for place, why in sorted(self.plain_layers.items()))
        limit = "budget_bytes" if "budget_bytes" in self.options else "budget"
        windows = len(self.window_layers)
        of_windows = f" and {windows} of sliding windows" if windows else ""
        compressed = sum(isinstance(layer, StrataLayer) for layer in self.layers)
        return f"StrataCache({compressed} layers{of_windows}, {limit}={self.options[limit]!r}{plain})"

    @property
    def decoding(self) -> str:
        """Mode of decode steps: eager, compiled or captured, and the reason if they are eager."""
        if self.eager_only:
            return f"eager: {self.eager_only}"
        devices = [layer.device for layer in self.layers if layer.is_initialized]
        return self.forward.describe(devices[0] if devices else torch.device("cpu"))

    def reset(self) -> None:
        """Drop all tokens; the next forward may have another batch size."""
        self.window_prompts.drop()
        for layer in self._plain():
            layer.keys = layer.values = None  # transformers 5.17 would zero them and keep their number of rows
            layer.is_initialized = False
        for layer in self.layers:
            layer.reset()
        self.prompts.drop()
        self.interrupted = False
        self._tiered, self._shape, self._real = None, None, np.ones((0, 0), bool)
        self.guard = self.window_guard = self._useful = None
        self.steps.forget()
        self.forward.drop()
