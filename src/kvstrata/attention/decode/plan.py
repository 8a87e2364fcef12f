"""``DecodePlan``: work lists of a decode step, built once before its layers read the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstrata.cache.storage.scratch import register
from kvstrata.cache.tiered_cache import TieredCache
from kvstrata.checks import whole_numbers

from .job import Job
from .observe import check_live, observation_of
from .stages import NAMES

if TYPE_CHECKING:
    import torch

    from . import cuda as decode_cuda


class DecodePlan:
    """Work lists of a decode step: the pages that each warp reads, for every layer; built on the device, without syncs.

    Create one plan per shape of call, `update` it after the step's tokens were appended, and pass it to the calls of
    all layers. Calls without a plan build their own, layer by layer. Backends other than ``cuda`` ignore it.

    Args:
        cache: `TieredCache` that the step reads.
        heads: query heads of a layer.
        q_len: queries of a request.
        requests: rows of q, as in `decode_attention`; None is all in use now, ascending.
        fixed_split: tokens of a KV head per partial (4-bit tokens; others in proportion to their cost), independent of
            the rest of the batch. The output of a request is then batch-invariant, bit for bit. Slower.
        observe: layers per step, in rotation, whose attention mass the calls add to the importance of their tokens
            (docs/cache.md); 0 for none. Has no effect on a cache whose policy does not use importance.

    `update` writes to the plan's scratch memory. The cache is not modified, except with ``observe``: `update` then
    counts the queries of the layers that it selects, and the calls of these layers add to importance. `update` and the
    calls can
    be captured in a CUDA graph: lengths, counts, pages and the selected layers are read at replay. Keep the plan alive
    as long as the graph.

    The scratch memory (`nbytes`) covers every page that the cache's tables can list. If the lists of all layers take at
    most 32 MB, `update` builds them all. Otherwise it builds those of the first layers, and calls build the lists of a
    few more layers at a time; calls in layer order build each list once.

    Raises ValueError or TypeError, naming the argument.

    Example:
        >>> cache = kvstrata.TieredCache(2, 2, 64, budget=0.25, recent_tokens=32, page_tokens=16, dtype=torch.float32)
        >>> plan = kvstrata.DecodePlan(cache, heads=8, requests=[0])
        >>> for layer in range(2):
        ...     cache.append(layer, *torch.randn(2, 1000, 2, 64))
        >>> plan.update()
        >>> kvstrata.decode_attention(torch.randn(1, 1, 8, 64), cache, layer=1, plan=plan).shape
        torch.Size([1, 1, 8, 64])
    """

    def __init__(
        self,
        cache: TieredCache,
        heads: int,
        *,
        q_len: int = 1,
        requests: Sequence[int] | None = None,
        fixed_split: int | None = None,
        observe: int = 0,
    ) -> None:
        if not isinstance(cache, TieredCache):
            raise TypeError(f"cache: expected a TieredCache, got {type(cache).__name__}")
        if type(heads) is not int or heads < 1 or heads % cache.kv_heads:
            raise ValueError(f"heads: expected a multiple of {cache.kv_heads}, got {heads!r}")
        if type(q_len) is not int or q_len < 1:
            raise ValueError(f"q_len: expected an int of at least 1, got {q_len!r}")
        if fixed_split is not None and (type(fixed_split) is not int or fixed_split < 1):
            raise ValueError(f"fixed_split: expected an int of at least 1, got {fixed_split!r}")
        rows = cache.requests if requests is None else tuple(whole_numbers("requests", requests))
        for request in rows:
            if not 0 <= request < cache.max_requests:
                raise ValueError(f"requests: expected rows from 0 to {cache.max_requests - 1}, got {request}")
        self.cache, self.heads, self.q_len, self.requests, self.fixed_split = cache, heads, q_len, rows, fixed_split
        self.observation = observation_of(cache, rows, heads, q_len, observe)
        if self.observation is not None:
            register(cache, self.observation)
        self._cuda: decode_cuda.WorkPlan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of scratch memory; work lists exist on a GPU only, and are allocated at the first `update`."""
        lists = 0 if self._cuda is None else self._cuda.nbytes
        return lists + (0 if self.observation is None else self.observation.nbytes)

    def update(self, requests: torch.Tensor | None = None) -> None:
        """Build the work lists from the current contents of the cache; safe under CUDA-graph capture.

        With ``observe``, also select the next layers. ``requests``: int32 ``[rows]`` on the device, as in
        `TieredCache.write`, read when the kernels run; a row that does not name its own request is padding and gives no
        mass. None: no row is padding. Raises ValueError or TypeError for another shape, dtype or device.
        """
        check_live(requests, len(self.requests), self.cache.device)
        if self.observation is not None:
            self.observation.set_live(requests)
        if self._has_kernels() and self.cache.dtype in NAMES:
            self.cuda().update()
        elif self.observation is not None:
            self.observation.begin()

    def _has_kernels(self) -> bool:
        return self.cache.device.type == "cuda"

    def cuda(self) -> decode_cuda.WorkPlan:
        """Work lists and scratch memory of the CUDA kernels, created at first use."""
        if self._cuda is None:
            from . import cuda as decode_cuda
            from .source import Source

            table, count = self.cache.buckets.page_table, self.cache.buckets.count
            self._cuda = decode_cuda.WorkPlan(
                Source.of_buckets(self.cache.bucket_views(0)),
                self.requests,
                self.cache.kv_heads,
                self.heads,
                self.q_len,
                layers=self.cache.layers,
                layer_strides=(table.stride(1), count.stride(1)),
                fixed_split=self.fixed_split,
                observation=self.observation,
            )
            register(self.cache, self._cuda)
        return self._cuda

    def check(self, job: Job, cache: object) -> None:
        """Raise ValueError unless the plan is for this cache and the shape of this call."""
        if cache is not self.cache:
            raise ValueError("plan: expected a plan for the given cache, got one for another cache")
        call = (job.q.shape[2], job.q.shape[1], tuple(job.requests))
        planned = (self.heads, self.q_len, self.requests)
        if call != planned:
            raise ValueError(
                f"plan: expected one for (heads, q_len, requests) {call}, got one for {planned};"
                " without requests=, a plan is for the requests in use when it was created"
            )
