"""The caches of one table: ours and its peers, each with the bytes that it actually holds.

Bytes are those of the tensors that a cache keeps after the text. A float32 model is only a way to compute on a CPU,
so for every contender, tensors of rows in its precision count as 16 bit.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, QuantizedCache

from kvstrata.cache import TieredCache
from kvstrata.cache.policy.budget import tiers_for
from kvstrata.hf import StrataCache
from kvstrata.quant.calibration import Calibration

from .bits import BitsCache
from .kivi import KiviCache
from .rounding import RoundedCache
from .sizes import ModelSizes, state_bytes

GROUP_BYTES = 4  # scale and zero of a KIVI group


@dataclass(frozen=True)
class Contender:
    """A cache to measure: ``make(config, rows, tokens)`` creates it, ``size(cache)`` returns its bytes."""

    name: str
    kind: str  # exact, ours, variant, baseline, peer
    make: Callable[[Any, int, int], Any]
    size: Callable[[Any], int]
    budget: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def calibrated(self) -> bool:
        """True if it uses the file of --calibration."""
        return "calibration" in self.options or bool(self.options.get("calibrated"))


def exact() -> Contender:
    return Contender("16 bit", "exact", lambda config, rows, tokens: DynamicCache(config=config), tensor_bytes)


def small_pages(room: int = 1) -> dict[str, Any]:
    """Options of a cache for a few thousand tokens: sink tokens, few recent tokens and ``room`` more fill small pages.

    Texts are decoded in chunks, each of which settles and needs no room; decoding token by token needs some.
    """
    return dict(recent_tokens=16 + -(room + 4) % 16, sink_tokens=4, page_tokens=16, settle_every=room)


def tiers_at(budget: float, sizes: ModelSizes, tokens: int, **options: Any) -> list[str]:
    """The default tiers of `StrataCache` for this fraction of 16 bit."""
    given = {"max_tokens": tokens} | small_pages() | options
    shape = sizes.tiers or (len(sizes.layers), *sizes.layers[0][:2])
    cache = TieredCache(*shape, budget=budget, dtype=torch.float16, **given)
    return [f.name for f in cache.formats[1:]]


def strata(
    budget: float,
    name: str | None = None,
    kind: str = "ours",
    calibration: Calibration | str | None = None,
    **options: Any,
) -> Contender:
    """`StrataCache` at a fraction of 16 bit, with or without a calibration or its file."""
    if isinstance(calibration, str):
        calibration = Calibration.load(calibration)

    def make(config: Any, rows: int, tokens: int) -> Any:
        given = {"max_tokens": tokens} | options
        return StrataCache(config, budget=budget, max_batch=rows, calibration=calibration, **given)

    return Contender(name or "kvstrata", kind, make, reported_bytes, budget, _recorded(options, calibration))


def layer_bytes(cache: Any) -> int:
    """Bytes that the layers of a cache report, and those of layers with other states than K and V."""
    return sum(layer.nbytes if hasattr(layer, "nbytes") else state_bytes(layer) for layer in cache.layers)


def reported_bytes(cache: Any) -> int:
    """Bytes that a `StrataCache` reports; rows in float32 count as 16 bit."""
    return cache.memory().total - sum(_wide_bytes(cache)) // 2


def full_bytes(cache: Any) -> int:
    """Bytes of a `StrataCache`'s tokens at 16 bit, and of layers that it leaves plain."""
    tiers, plain = _wide_bytes(cache)
    wide = cache.tiered.memory().full if tiers else 0
    return cache.memory().full - (wide + plain) // 2


def _wide_bytes(cache: Any) -> tuple[int, int]:
    """Bytes of float32 rows in tiers, where a budget of 1 keeps those of a float32 model, and in plain layers."""
    plain = (getattr(cache.layers[place], name, None) for place in cache.plain_layers for name in ("keys", "values"))
    wide = sum(x.nbytes for x in plain if torch.is_tensor(x) and x.dtype == torch.float32)
    return cache.memory().tiers.get("K32V32", 0), wide


def _recorded(options: dict[str, Any], calibration: Calibration | None) -> dict[str, Any]:
    """Options as saved in results: for a calibration, whether it has sensitivities of layers."""
    if calibration is None:
        return options
    if not calibration.has_rows:
        return options | {"calibration": "sensitivity alone"}
    return options | {"calibration": "sensitivity" if calibration.sensitivity else "balance and centres"}


UNIFORM = ("K4V4", "K4V3", "K4V2", "K3V3", "K3V2", "K2V2")


def bits(
    width: float, name: str, kind: str = "ours", calibration: Calibration | None = None, **options: Any
) -> Contender:
    """`BitsCache`, with older tokens at ``width`` bits of codes."""
    options = {"bits": width, **options}

    def make(config: Any, rows: int, tokens: int) -> Any:
        return BitsCache(config, max_batch=rows, max_tokens=tokens, calibration=calibration, **options)

    return Contender(f"{name}, {width:g} bits", kind, make, reported_bytes, None, _recorded(options, calibration))


def at_bits(width: float, simulated: bool = False, calibration: Calibration | None = None) -> list[Contender]:
    """Older tokens at this mean code width: tiers by importance, also with the calibration if there is one, and every
    single format of that width; with ``simulated`` also as `rounding` does it, without packed bytes."""
    whole_pages = {name: value for name, value in small_pages().items() if name != "settle_every"}
    lists = {"tiers": list(tiers_for(width)), **whole_pages}
    contenders = [] if calibration is None else [bits(width, "tiers, calibrated", "variant", calibration, **lists)]
    contenders.insert(0, bits(width, "tiers", **lists))
    if not 2 <= width <= 4:
        raise ValueError(f"--bits: expected 2 to 4, got {width:g}")
    own = (whole_pages["recent_tokens"], whole_pages["sink_tokens"])
    for name in UNIFORM:
        if _width(name) == width:
            contenders.append(bits(width, f"uniform {name}", "variant", policy="uniform", tiers=[name], **whole_pages))
            if simulated:
                contenders.append(_rounded(width, name, *own))
    ends = width in (2, 4)  # there tiers are one format
    return [one for one in contenders if not (ends and one.name.startswith("tiers"))]


def _width(name: str) -> float:
    return (int(name[1]) + int(name[3])) / 2


def _rounded(bits: float, name: str, recent_tokens: int, sink_tokens: int) -> Contender:
    widths = dict(k_bits=int(name[1]), v_bits=int(name[3]))
    options: dict[str, Any] = dict(**widths, recent_tokens=recent_tokens, sink_tokens=sink_tokens)
    name = f"simulated {name}, {bits:g} bits"
    return Contender(
        name, "peer", lambda config, rows, tokens: RoundedCache(config, **options), layer_bytes, None, options
    )


KIVI = ((8, 8), (8, 4), (4, 4), (4, 3), (4, 2), (3, 3), (3, 2), (2, 2))  # bits of K and V


def kivi(budget: float, sizes: ModelSizes, tokens: int) -> list[Contender]:
    """KIVI-style caches with the most bits that fit the budget at this length, K before V; none if `no_kivi`.

    Groups of 32, and of 64 if these allow wider codes: neither is always better.
    """
    contenders: list[Contender] = []
    widest = 0
    plain = 2 * sum(layer.values for layer in sizes.layers)  # bytes of a token at 16 bit
    for group in (32, 64):
        if no_kivi(sizes, group):
            continue
        old = (tokens - 32) // group * group
        for k_bits, v_bits in KIVI:
            codes = sum(x.kv_heads * (x.k_dim * k_bits + x.v_dim * v_bits) for x in sizes.layers) / 8
            per_token = codes + GROUP_BYTES * plain / 2 / group
            share = (per_token * old + plain * (tokens - old)) / (plain * tokens)
            if share <= budget and k_bits + v_bits > widest:
                contenders.append(_kivi(budget, k_bits, v_bits, group))
                widest = k_bits + v_bits
    return contenders


def no_kivi(sizes: ModelSizes, group: int = 32) -> str | None:
    """Reason why a model has no KIVI-style caches with this group, or None."""
    if sizes.mixed:
        return f"expected layers of attention or of other states, got {sizes.mixed}"
    odd = sorted({layer.v_dim for layer in sizes.layers if layer.v_dim % group})
    return f"expected a head_dim of V that is a multiple of {group}, got {odd[0]}" if odd else None


def _kivi(budget: float, k_bits: int, v_bits: int, group: int) -> Contender:
    options = dict(k_bits=k_bits, v_bits=v_bits, group=group)
    name = f"KIVI-style K{k_bits}V{v_bits} g{group}"
    return Contender(
        name, "baseline", lambda config, rows, tokens: KiviCache(config, **options), layer_bytes, budget, options
    )


def quantized(backend: str, bits: int) -> Contender:
    """transformers' `QuantizedCache` with its defaults, except for a residual as short as our recent tokens."""

    def make(config: Any, rows: int, tokens: int) -> Any:
        axis = dict(axis_key=0, axis_value=0) if backend == "quanto" else dict(axis_key=1, axis_value=1)
        return QuantizedCache(backend, config, nbits=bits, q_group_size=64, residual_length=128, **axis)

    return Contender(f"QuantizedCache {backend} {bits} bit", "peer", make, tensor_bytes)


def absent(sizes: ModelSizes | None = None) -> dict[str, str]:
    """Peers that are not installed or, given the sizes, that a model does not allow, and why."""
    needs = {"quanto": "optimum.quanto", "hqq": "hqq"}
    reason = None if sizes is None else no_kivi(sizes)
    reasons = {} if reason is None else {"KIVI-style": reason}
    for name, module in needs.items():
        try:
            installed = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            installed = False
        if not installed:
            reasons[f"QuantizedCache {name}"] = f"{module} is not installed"
    return reasons


def peers() -> list[Contender]:
    missing = absent()
    return [
        quantized(backend, bits)
        for backend, widths in (("quanto", (4, 2)), ("hqq", (8, 4, 2)))  # hqq 0.2.8 does not return its 3-bit rows
        if f"QuantizedCache {backend}" not in missing
        for bits in widths
    ]


def at_budgets(
    sizes: ModelSizes,
    budgets: Sequence[float],
    policies: Sequence[str],
    tiers: Sequence[list[str]],
    tokens: int,
    with_peers: bool,
    pages: dict[str, Any],
    calibration: Calibration | None = None,
) -> list[Contender]:
    """`StrataCache` at every budget, policy and list of tiers (default: the budget's own); and peers.

    With a calibration, each of them runs without and with it.
    """
    wanted = []
    for budget in budgets:
        wanted += at_budget(budget, policies, tiers, pages, calibration, tiers_at(budget, sizes, tokens, **pages))
        wanted += kivi(budget, sizes, tokens) if with_peers else []
    return wanted + (peers() if with_peers else [])


def at_budget(
    budget: float,
    policies: Sequence[str],
    tiers: Sequence[list[str]],
    pages: dict[str, Any],
    calibration: Calibration | None = None,
    default: list[str] | None = None,
) -> list[Contender]:
    """`StrataCache` at a budget with every policy and list of tiers, without and with a calibration if there is one.

    ``default``: tiers to record where none are given; None leaves the choice to the cache.
    """
    wanted = []
    choices: list[list[str] | None] = [*tiers] or [None]
    for policy in policies:
        for entry in choices:
            chosen = entry or default
            options = pages | ({} if chosen is None else {"tiers": chosen}) | {"policy": policy}
            name = "kvstrata" if policy == "importance" else f"kvstrata {policy}"
            name += "" if entry is None else f" {','.join(entry)}"
            kind = "ours" if name == "kvstrata" else "variant"
            name += f", max_tokens {pages['max_tokens']}" if "max_tokens" in pages else ""
            wanted.append(strata(budget, name, kind, **options))
            if calibration is not None:
                wanted.append(strata(budget, f"{name}, calibrated", "variant", calibration, **options))
    return wanted


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        names = () if type(value) is torch.Tensor else ("_data", "_scale", "_shift")  # of quanto's subclasses
        inner = [getattr(value, name) for name in names if hasattr(value, name)]
        if not inner:
            yield value
        for part in inner:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for part in value:
            yield from _tensors(part)


def tensor_bytes(cache: Any) -> int:
    """Bytes of the tensors of a cache's layers, without duplicates; float32 counts as 16 bit."""
    sizes = {
        id(tensor): tensor.numel() * min(tensor.element_size(), 2 if tensor.dtype == torch.float32 else 8)
        for layer in cache.layers
        for tensor in _tensors(vars(layer))
    }
    return sum(sizes.values())
