"""The budget: how many bytes the pages of a layer may take, and how many are allocated.

Everything is charged: codes, scales, positions, importance, unused slots of a page (whole pages are charged), unused
pages of a slab (one slab per tier is set aside for them), tables, centres.

An absolute budget is split evenly over the layers; in a layer all requests share it. A fraction is granted to every
request and layer separately, so a request does not depend on the others in the batch:

    allowed(n) = max(fraction * 16-bit bytes of n tokens, floor(min(n, floor_tokens)))
    floor(n)   = need(n) + extra * older tokens
    need(n)    = sink and recent tokens and room in whole 16-bit pages, the rest and one page in the lowest tier,
                 tables, slab reserve

The second term is the floor: in short contexts, 16-bit tokens are a large part, and a request may always take what it
needs with everything older in the lowest tier. The room is for the tokens between two settlings, half a page unless
``settle_every`` is less: without it, recent tokens that fill their pages would settle at every step. Tokens are never
promoted, so an older token of a short context also gets the bytes above the lowest tier (``floor_extra``) that the
fraction affords at `early` tokens, unless the widest tier is K8V8 and little is lost anyway. ``floor_tokens`` is where
the fraction overtakes the floor: `early`, or where it overtakes the need without an extra; for a fraction that never
does, it is one page more than sink and recent tokens.

If the widest tier is K8V8, a fraction allows no more than that tier takes, however much it could pay for: old tokens
at 16 bit would double the bytes of a decode step, to avoid an error of a ten-thousandth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from kvstrata.checks import check_int

# Tier lists, lowest tier last: formats close in width around what a budget affords, and 8 bit for the few tokens that
# receive most of the attention. Chosen by KL on packed bytes, docs/quality.md; the first two by bytes, expected error
# and the cost of a decode step, docs/decisions.md.
TIERS: tuple[tuple[str, ...], ...] = (
    ("K8V8",),
    ("K8V8", "K8V4"),
    ("K8V8", "K8V4", "K4V4"),
    ("K8V4", "K4V4", "K4V3"),
    ("K8V4", "K4V4", "K4V3", "K4V2"),
    ("K8V4", "K4V3", "K3V2"),
    ("K8V4", "K4V3", "K3V2", "K2V2"),
)
NO_FRACTION = ("K4V4", "K3V3", "K2V2")


def _lowest(names: tuple[str, ...]) -> float:
    """Bits of codes per value in the lowest tier."""
    return (int(names[-1][1]) + int(names[-1][3])) / 2


def tiers_for(bits: float) -> tuple[str, ...]:
    """Tiers for older tokens with ``bits`` bits of codes per value, averaged over K and V."""
    return next((names for names in TIERS if _lowest(names) <= bits - 0.5), TIERS[-1])


class DefaultFraction(float):
    """A default for ``budget`` that can be distinguished from the same number passed by the caller."""


DEFAULT = DefaultFraction(0.25)


def check_budget(budget: float | None, budget_bytes: int | None) -> int | float | None:
    """Limit that the two arguments specify: bytes (int), a fraction below 1 (float), or None for no limit."""
    if budget_bytes is not None:
        if budget is not None and not isinstance(budget, DefaultFraction):
            raise ValueError(f"budget: expected to be left out, since budget_bytes is given, got {budget!r}")
        if isinstance(budget_bytes, float):
            raise ValueError(f"budget_bytes: expected an int, got {budget_bytes!r}; a fraction of 16 bit is budget")
        return check_int("budget_bytes", budget_bytes, 1)
    if budget is None:
        return None
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget <= 1:
        hint = "; bytes are budget_bytes" if type(budget) is int else ""
        raise ValueError(f"budget: expected a fraction in (0, 1] or None, got {budget!r}{hint}")
    return None if budget == 1 else float(budget)


class BudgetExceeded(RuntimeError):
    """The tokens do not fit the budget even with everything in the lowest tier; the cache is unchanged.

    Attributes are ``needed`` and ``allowed`` bytes.

    Example:
        >>> cache = kvstrata.TieredCache(1, 2, 64, budget=0.05, page_tokens=16)
        >>> try:
        ...     cache.append(0, *torch.randn(2, 3000, 2, 64).bfloat16())
        ... except kvstrata.BudgetExceeded as error:
        ...     error.needed > error.allowed, cache.length(0, 0)
        (True, 0)
    """

    def __init__(self, where: str, needed: int, allowed: int, advice: str = "") -> None:
        super().__init__(f"budget: expected at least {needed} bytes {where}, allowed are {allowed}{advice}")
        self.needed = needed
        self.allowed = allowed


@dataclass(frozen=True)
class Memory:
    """Bytes, each counted once: ``total == sum(kinds.values())``, and ``kinds["slabs"]`` splits further.

    ``tiers``: bytes of pages in use per format. ``page_slack``: bytes of their slots without a token. ``slab_slack``:
    bytes of slabs that no page uses. ``k_bits``, ``v_bits``: bits per value of K and of V in the pages in use, codes or
    rows and scales, whole pages divided by the tokens in them. ``expected_k_bits``, ``expected_v_bits``: mean width of
    the formats, including scales, weighted by the tokens in each. The former are larger by the empty slots of pages,
    and by the padding of codes where a format has any.
    """

    kinds: dict[str, int]
    tiers: dict[str, int]
    page_slack: int
    slab_slack: int
    tokens: dict[str, int] = field(default_factory=dict)  # per tier, over layers and KV heads
    full: int = 0  # all tokens appended, including evicted ones, at the model's precision, without tables
    allowed: int | None = None
    scratch: int = 0  # bytes of live decode plans; neither in ``total`` nor under the budget
    k_bits: float = 0.0
    v_bits: float = 0.0
    expected_k_bits: float = 0.0
    expected_v_bits: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    @property
    def fraction(self) -> float:
        """Bytes in use as a fraction of ``full``."""
        return self.total / self.full if self.full else float("inf")


@dataclass(frozen=True)
class Budget:
    """``amount``: None for no limit, an int in bytes, a float as a fraction."""

    amount: int | float | None
    layers: int
    kv_heads: int
    token_bytes: int  # K and V of one KV head at the model's precision
    kept: int  # sink and recent tokens
    room: int  # plain tokens in addition to ``kept`` that the floor has pages for
    page_tokens: int
    page_price: tuple[int, ...]  # per tier
    fixed: int  # tables, centres
    reserve: int  # bytes set aside for partly filled slabs: one slab per tier
    max_requests: int
    max_tokens: int
    look_ahead: int = 0  # tokens beyond max_tokens that `granted_by_length` covers
    ceiling_room: int | None = None  # plain tokens in addition to ``kept`` under the ceiling of 8 bit; None: no ceiling
    shares: tuple[float, ...] = ()  # share of the bytes above the need by layer, mean 1; empty: all layers alike

    def __post_init__(self) -> None:
        if type(self.amount) is int and self.amount < self.fixed + self.reserve:
            raise ValueError(
                f"budget_bytes: expected at least {self.fixed + self.reserve} for tables and slabs, got {self.amount}"
            )

    @property
    def shared(self) -> bool:
        """True if the requests of a layer share one budget in bytes."""
        return type(self.amount) is int

    @cached_property
    def overhead(self) -> int:
        """Tables and slab reserve as charged to one request and layer."""
        return -(-(self.fixed + self.reserve * self.max_requests) // (self.max_requests * self.layers))

    @cached_property
    def overtakes(self) -> float:
        """Number of tokens from which a fraction exceeds the need; inf for never."""
        low = self.page_price[-1]
        gain = self.kv_heads * (float(self.amount or 0) * self.token_bytes - low / self.page_tokens)
        plain = -(-(self.kept + self.room) // self.page_tokens) * self.page_price[0] + 2 * low
        constant = self.overhead + self.kv_heads * (plain - self.kept * low / self.page_tokens)
        return max(int(constant / gain) + 1, self.kept) if gain > 0 else math.inf

    @property
    def early(self) -> int:
        """Tokens by which a fraction should overtake its floor: 64 times those kept, at least 1,024, at most 2,048."""
        return min(max(64 * self.kept, 1024), 2048, self.max_tokens)

    @cached_property
    def floor_extra(self) -> float:
        """Bytes above the lowest tier that the floor grants an older token of a KV head."""
        if not isinstance(self.amount, float) or self.ceiling_room is not None or self.overtakes >= self.early:
            return 0.0
        slack = self.amount * self.token_bytes * self.early - float(self._need_rising(self.early)) / self.kv_heads
        low, wide = (self.page_price[tier] / self.page_tokens for tier in (-1, 1))
        return min(max(slack / (self.early - self.kept), 0.0), wide - low)

    @cached_property
    def floor_tokens(self) -> int:
        if self.floor_extra:
            return self.early
        tokens = self.overtakes
        return self.kept + self.page_tokens if tokens == math.inf else int(tokens)

    def need(self, tokens: int) -> int:
        """Bytes of one request and layer with everything but sink and recent tokens in the lowest tier."""
        if tokens == 0:
            return self.overhead
        plain = -(-min(tokens, self.kept + self.room) // self.page_tokens)
        lossy = -(-max(tokens - self.kept, 0) // self.page_tokens) + 1
        return self.overhead + self.kv_heads * (plain * self.page_price[0] + lossy * self.page_price[-1])

    def floor(self, tokens: int) -> int:
        """Bytes that one request and layer may take, however small the fraction is."""
        tokens = min(tokens, self.floor_tokens)
        return self.need(tokens) + int(self._extra(tokens))

    def _extra(self, tokens: int | np.ndarray) -> np.ndarray:
        """Bytes of the floor above the need, int64."""
        older = np.maximum(np.minimum(tokens, self.floor_tokens) - self.kept, 0)
        return (self.kv_heads * self.floor_extra * older).astype(np.int64)

    def _need_rising(self, tokens: int | np.ndarray) -> np.ndarray:
        """`need` with fractional pages, so that it grows with every token; never below `need`."""
        plain = -(-(self.kept + self.room) // self.page_tokens) * self.page_price[0]
        old = 2 + np.maximum(tokens - self.kept, 0) / self.page_tokens
        return self.overhead + self.kv_heads * (plain + old * self.page_price[-1])

    def ceiling(self, tokens: int, room: int) -> int:
        """Bytes of one request and layer with old tokens in the widest tier and ``room`` for new ones."""
        plain = -(-min(tokens, self.kept + room) // self.page_tokens)
        lossy = -(-max(tokens - self.kept, 0) // self.page_tokens) + len(self.page_price) - 1  # an open page per tier
        return self.overhead + self.kv_heads * (plain * self.page_price[0] + lossy * self.page_price[1])

    def granted(self, tokens: int) -> int:
        """Bytes that a fraction allows one request in one layer."""
        fraction = int(float(self.amount or 0) * self.kv_heads * self.token_bytes * tokens)
        if self.ceiling_room is not None:
            fraction = min(fraction, self.ceiling(tokens, self.ceiling_room))
        return max(fraction, self.floor(tokens))

    def granted_at(
        self, layers: int | Sequence[int] | np.ndarray, tokens: int | Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Bytes that a fraction allows requests with ``tokens`` tokens in these layers; both are broadcast."""
        granted = self.granted_by_length[tokens]
        if not self.shares:
            return granted
        more = (self._shares[layers] - 1) * self.slack_by_length[tokens]
        return granted + np.floor(more).astype(np.int64)

    def pages(self, tokens: int, layer: int = 0) -> int:
        """Bytes for the pages of one scope: a layer (absolute) or a request's ``tokens`` in a layer (fraction)."""
        return self.pages_at([layer], [tokens])[0]

    def pages_at(self, layers: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """`pages` of several scopes."""
        if type(self.amount) is int:
            return [(self.amount - self.fixed - self.reserve) // self.layers] * len(layers)
        return (self.granted_at(layers, tokens) - self.overhead).tolist()

    @cached_property
    def _shares(self) -> np.ndarray:
        return np.array(self.shares)

    def advice(self, pages: int, tokens: int) -> str:
        """Hint for an error message: a budget under which these bytes of pages would fit."""
        if type(self.amount) is int:
            return f"; budget_bytes={self.layers * pages + self.fixed + self.reserve} has room for them in every layer"
        share = (pages + self.overhead) / (self.kv_heads * self.token_bytes * max(tokens, 1))
        return f"; budget={math.ceil(1000 * share) / 1000} has room for them, or evict=True" if share < 1 else ""

    @cached_property
    def granted_by_length(self) -> np.ndarray:
        """`granted` for 0 .. max_tokens + look_ahead tokens, int64, as a lookup table for steps."""
        heads, price, p = self.kv_heads, self.page_price, self.page_tokens
        tokens = np.arange(self.max_tokens + self.look_ahead + 1)

        def pages(plain: np.ndarray, lossy: np.ndarray, lossy_price: int) -> np.ndarray:
            return self.overhead + heads * (-(-plain // p) * price[0] + lossy * lossy_price)

        old = -(-np.maximum(tokens - self.kept, 0) // p)
        granted = (float(self.amount or 0) * heads * self.token_bytes * tokens).astype(np.int64)
        if self.ceiling_room is not None:
            plain = np.minimum(tokens, self.kept + self.ceiling_room)
            granted = np.minimum(granted, pages(plain, old + len(price) - 1, price[1]))
        need = pages(np.minimum(tokens, self.kept + self.room), old + 1, price[-1])
        need[0] = self.overhead
        return np.maximum(granted, need[np.minimum(tokens, self.floor_tokens)] + self._extra(tokens))

    @cached_property
    def slack_by_length(self) -> np.ndarray:
        """Bytes of `granted` above the need, made non-decreasing in the number of tokens."""
        tokens = np.arange(self.max_tokens + self.look_ahead + 1)
        return np.maximum(self.granted_by_length - self._need_rising(tokens), self._extra(tokens))

    def allowed(self, lengths: np.ndarray, requests: int) -> int | None:
        """Bytes allowed for the whole cache with ``lengths``, int ``[max_requests, layers]``; ``requests`` are in use.

        Lengths of unused requests are 0.
        """
        if self.amount is None:
            return None
        if type(self.amount) is int:
            return self.amount
        unused = self.max_requests - requests
        idle = -(-self.fixed * unused // self.max_requests)
        granted = self.granted_at(np.arange(self.layers), lengths)
        return idle + int(granted.sum()) - unused * self.layers * int(self.granted_by_length[0])


def default_tiers(amount: int | float | None, expected: Callable[[Sequence[str]], Budget]) -> tuple[str, ...]:
    """Default tiers of a cache; ``expected`` returns the budget for a given list of tiers.

    For a fraction, the best list with which it overtakes its need (see above) by `Budget.early` tokens. Tokens are
    never promoted, so bits that a prompt loses at a length where recent tokens take most of the fraction are lost for
    good; the floor of a higher lowest tier preserves them. An absolute budget does not determine the bytes per token,
    so it has one list for all.
    """
    if not isinstance(amount, float):
        return NO_FRACTION
    for names in TIERS:
        budget = expected(names)
        if budget.overtakes <= budget.early:
            return names
    return TIERS[-1]
