"""One compressed layer of a `StrataCache`.

`update` stores nothing: it passes the new rows on to `attend`, which also knows queries and padding. A prompt attends
with the model's own function at the model's precision, with the earlier tokens dequantised one layer at a time, or
packed on a GPU (turns.py), and is stored afterwards; a few new tokens are stored first and read in packed form by
`decode_attention`. One new token in every row is a decode step (steps.py). First prompts on a GPU are stored a little
later (prompts.py).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import add
from typing import Any, Protocol

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

import kvstrata
from kvstrata.cache import TieredCache
from kvstrata.cache.ops.inspect import gather
from kvstrata.cache.policy.balance import put_balance
from kvstrata.quant.calibration import Calibration
from kvstrata.quant.reference import aims

from . import attention, balance, prefill, support, turns
from . import mask as masks
from .forward import Forward
from .guard import Guard
from .logits import Logits
from .mass import MassLedger, prompt_mass
from .owned import Owned
from .prompts import Prompts, PromptSettings
from .rope import applies, interleaved
from .steps import Steps, stored_rows, strata_decode

DECODE_QUERIES = 16  # more new tokens than this are a prompt


class Owner(Protocol):
    """The part of a `StrataCache` that its layers use."""

    options: dict[str, Any]
    calibration: Calibration | None
    importance_queries: int
    guard: Guard | None
    steps: Steps
    forward: Forward
    prompts: Prompts
    shares: bool
    _text: Any

    @property
    def tiered(self) -> TieredCache: ...

    @property
    def unfinished(self) -> TieredCache: ...

    @property
    def _real(self) -> np.ndarray: ...

    @property
    def rows(self) -> int: ...

    @property
    def uses_mass(self) -> bool: ...

    @property
    def balances(self) -> bool: ...

    def _misfit(self, key: torch.Tensor, value: torch.Tensor) -> str | None: ...

    def _keep_plain(self, place: int, reason: str) -> DynamicLayer: ...

    def build(self, key: torch.Tensor) -> None: ...

    def _reserve(self, tokens: int) -> None: ...

    def _tokens_among(
        self, start: int, mask: torch.Tensor | None, positions: torch.Tensor | None, rows: int, queries: int
    ) -> torch.Tensor | None: ...

    def _forget(self, start: int) -> None: ...

    def _useful_tokens(self, value: torch.Tensor, new: np.ndarray) -> np.ndarray: ...

    def _undo_step(self) -> None: ...

    def begin_step(self, layer: int, mask: torch.Tensor | None, positions: torch.Tensor | None, rows: int) -> bool: ...

    def end_step(self) -> None: ...


class StrataLayer(Owned[Owner], CacheLayerMixin):
    """A compressed layer; ``columns`` is its length as transformers counts it, padding included."""

    is_sliding = False
    is_compileable = False
    is_croppable = False  # crop removes tokens but does not undo demotions

    def __init__(self, owner: Owner, place: int, index: int) -> None:
        super().__init__()
        self.owner, self.place, self.index = owner, place, index  # index in the model, index in the TieredCache
        self.columns = 0
        self.ledger: MassLedger | None = None
        self.attend_shared: attention.AttendShared | None = None

    def plain(self) -> DynamicLayer:
        """transformers' own layer, to replace this one."""
        return DynamicLayer()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.owner.build(key_states)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Wrap the new rows for `attend`; a layer whose shape cannot be compressed is replaced by a plain one here."""
        if self.owner.steps.ahead:
            return attention.Ready(self, key_states), attention.Ready(self, value_states)
        return self._update(key_states, value_states, *args, **kwargs)

    @torch.compiler.disable  # graph break: the cache runs eagerly
    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        attention.connect(self.owner)
        if not self.is_initialized:
            reason = self.owner._misfit(key_states, value_states)
            if reason:
                return self.owner._keep_plain(self.place, reason).update(key_states, value_states, *args, **kwargs)
            self.lazy_initialization(key_states, value_states)
            if self.device != self.owner.unfinished.device:
                raise NotImplementedError(
                    "device_map: expected all layers that a StrataCache compresses on one device, got layer"
                    f" {self.place} on {self.device} and others on {self.owner.unfinished.device}"
                )
        else:
            support.check_shape(key_states, self.owner.unfinished.kv_heads, self.owner.unfinished.head_dim)
        return attention.Pending(self, key_states), attention.Pending(self, value_states)

    def step(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        logits: Logits,
    ) -> torch.Tensor:
        """`attend` in a step made of operators only, whose mask hides nothing."""
        return strata_decode(self.owner.steps, self.index, query, key, value, logits)

    def attend(self, call: attention.AttentionCall) -> torch.Tensor:
        """Attention output ``[rows, queries, heads, D]``; stores K and V."""
        query, key, value, mask, positions, _, logits, module = call
        queries = query.shape[2]
        if queries > 1:
            self.owner._undo_step()
        alone = queries == 1 and self.columns > 0 and not self.owner.shares
        if alone and self.owner.begin_step(self.index, mask, positions, len(query)):
            out = self.owner.steps.decode(self.index, query, key, value, logits)
            if self.index == self.owner.tiered.layers - 1:
                self.owner.end_step()
            return out
        tiered = self.owner.unfinished
        few = queries <= min(DECODE_QUERIES, tiered.recent_tokens)
        begins = self.owner._real.shape[1] < self.columns + queries  # the first compressed layer of a forward
        try:
            real = self.owner._tokens_among(self.columns, mask, positions, len(query), queries)
            if self.columns + queries > tiered.max_tokens:
                new = [queries] * len(query) if real is None else real.sum(1).tolist()
                self.owner._reserve(max(map(add, self.lengths(), new)))
            if begins:
                self._begin(module, queries)
            waits = not self.columns and self._may_wait(value)
            if not waits:
                self._balance(query, key, value, module)
            if self.columns and few and real is None:
                out = self._decode(query, key, value, logits)
            else:
                self.owner.forward.drop()
                if waits:
                    out = self._first_prompt(call)
                else:
                    self._estimate(call, real)
                    out = self._prompt(call, real)
        except Exception:
            self.owner._forget(self.columns)
            raise
        self.columns += queries
        return out

    def _begin(self, module: torch.nn.Module, queries: int) -> None:
        """Set, in the first layer of a forward, how RoPE pairs channels and what is checked."""
        owner, tiered = self.owner, self.owner.unfinished
        if not self.columns:
            tiered.set_interleaved(interleaved(module))
        if owner.guard is not None:  # an earlier forward did not end
            self._finish_estimate()
        chosen = owner.options.get("tiers") is not None
        owner.guard = Guard.begin(tiered, module, self._new_columns(queries), chosen, owner.calibration)

    def _may_wait(self, value: torch.Tensor) -> bool:
        """True if the first prompt may be stored later."""
        new = self._new_columns(value.shape[2])
        if self.owner.balances and balance.too_short(self.owner._useful_tokens(value, new)):
            return False
        return self.owner.prompts.supports(self.owner.unfinished, self.index, new)

    def _new_columns(self, queries: int) -> np.ndarray:
        """Token mask of the new columns on the host, bool ``[rows, queries]``."""
        return self.owner._real[:, self.columns : self.columns + queries]

    def _first_prompt(self, call: attention.AttentionCall) -> torch.Tensor:
        """Attend, and leave storing to `Prompts`."""
        query, key, value, mask, _, model_attention, logits, module = call
        tiered, owner, real = self.owner.unfinished, self.owner, self._new_columns(query.shape[2])
        out = self._alone(query, key, value, mask, model_attention)
        if owner.shares:
            self.attend_shared = lambda query, mask, model_attention, logits: self._alone(
                query, key, value, mask, model_attention
            )
        settings = PromptSettings(
            owner.importance_queries if owner.uses_mass else None,
            owner.balances,
            interleaved(module),
            applies(module),
        )
        owner.prompts.add(tiered, self.index, query, key, value, real, logits, settings, owner.guard)
        if self.index == tiered.layers - 1:
            self._finish_estimate()
        return out

    def _balance(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, module: torch.nn.Module) -> None:
        """Fix balance and direction of rows without tokens: at first of all, later of those with new tokens."""
        if not self.owner.balances:
            return
        new = self._new_columns(query.shape[2])
        empty = np.flatnonzero(~self.owner._real[:, : self.columns].any(1) & (new.any(1) | (self.columns == 0)))
        if not len(empty):
            return
        cache, useful = self.owner.tiered, self.owner._useful_tokens(value, new)
        if len(empty) < len(query):
            query, key, new, useful = query[empty], key[empty], new[empty], useful[empty]
        prompt = query, key, new, useful, module, cache.rope
        own = balance.of_first_prompt(*prompt, has_tiers=self.owner.uses_mass, aims=aims(cache.formats))
        put_balance(cache, self.index, own.balance, empty.tolist(), own.query)

    def _estimate(self, call: attention.AttentionCall, real: torch.Tensor | None) -> None:
        """Estimate the error of the budget in this layer; after the last layer, warn if it is large."""
        if self.owner.guard is not None:
            real = self._all(call.query) if real is None else real
            self.owner.guard.add(self.index, call.query, call.key, call.value, real, call.logits)
            if self.index == self.owner.tiered.layers - 1:
                self._finish_estimate()

    @staticmethod
    def _all(query: torch.Tensor) -> torch.Tensor:
        """Mask in which all columns are tokens."""
        return torch.ones(len(query), query.shape[2], dtype=torch.bool, device=query.device)

    def _finish_estimate(self) -> None:
        guard, self.owner.guard = self.owner.guard, None
        if guard is not None:
            guard.finish()

    def _decode(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, logits: Logits) -> torch.Tensor:
        self.owner.tiered.append(self.index, self._rows(key), self._rows(value))
        if self.owner.shares:
            self.attend_shared = lambda query, mask, model_attention, logits: self._read(query, logits)
        return self._read(query, logits)

    def _read(self, query: torch.Tensor, logits: Logits) -> torch.Tensor:
        """Attention of the last tokens, which are stored already."""
        cache, uses_mass = self.owner.tiered, self.owner.uses_mass
        q = query.transpose(1, 2).to(cache.dtype)
        result = kvstrata.decode_attention(
            q, cache, self.index, scale=logits.scale, softcap=logits.softcap, sinks=logits.sinks, return_mass=uses_mass
        )
        if isinstance(result, torch.Tensor):
            return result.to(query.dtype)
        assert result.mass is not None
        if self.ledger is None:
            self.ledger = MassLedger(cache, self.index)
        self.ledger.add(result.mass, query.shape[2])
        return result.out.to(query.dtype)

    def _prompt(self, call: attention.AttentionCall, real: torch.Tensor | None) -> torch.Tensor:
        """Attend to earlier tokens and the new rows, and store the new rows; ``real`` is None without padding."""
        query, key, value, mask, _, model_attention, logits, _ = call
        self.flush()
        lengths, host = np.array(self.lengths())[:, None], self._new_columns(query.shape[2])
        position = lengths + host.cumsum(1) - 1  # padding has the position of the token before it
        if self.columns and not self.owner.shares and turns.supports(query, self.owner.tiered):
            limit = self.owner.importance_queries if self.owner.uses_mass else None
            columns = turns.Columns(host, position)
            rows = turns.Rows(query, key, value)
            out, mass = turns.attend(rows, logits, self.owner.tiered, self.index, columns, limit)
            self._store(key, value, real, mass)
            return out
        upload = self.owner.tiered.pool.to_device
        query_position = upload(position)
        column_position = upload(np.where(host, position, -1)).unsqueeze(1)
        in_order = real is None and bool((lengths == lengths[0]).all()) and not self.owner.tiered.policy.evict
        if not self.columns:
            keys, out = key, self._alone(query, key, value, mask, model_attention)
            if self.owner.shares:
                self.attend_shared = lambda query, mask, model_attention, logits: self._alone(
                    query, key, value, mask, model_attention
                )
        else:
            past_k, past_v, past_position = self._past()
            keys, values = torch.cat([past_k.to(key.dtype), key], 2), torch.cat([past_v.to(value.dtype), value], 2)
            if not self.owner.tiered.policy.evict:
                past_position = past_position[:, :1]  # all heads hold the same positions
            column_position = column_position.expand(-1, past_position.shape[1], -1)
            column_position = torch.cat([past_position, column_position], 2)
            dtype = torch.bool if mask is None else mask.dtype

            def mask_of(new: slice) -> torch.Tensor:
                columns = column_position[..., : past_k.shape[2] + new.stop]
                return masks.of_positions(query_position[:, new], columns, query.shape[1], dtype)

            def later(
                query: torch.Tensor,
                mask: torch.Tensor | None,
                model_attention: attention.ModelAttention,
                logits: Logits,
            ) -> torch.Tensor:
                if in_order and prefill.supports(query):
                    return prefill.attend(query, keys, values, logits)
                return self._in_chunks(query, keys, values, mask_of, model_attention)

            out = later(query, mask, model_attention, logits)
            if self.owner.shares:
                self.attend_shared = later
        mass = None
        if self.owner.uses_mass:
            is_token = self._all(query) if real is None else real
            positions = query_position, column_position, is_token
            mass = self._mass(query, keys, positions, logits, int(position.max()) + 1, in_order)
        self._store(key, value, real, mass)
        return out

    def _alone(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        model_attention: attention.ModelAttention,
    ) -> torch.Tensor:
        """Attention of a first prompt, which has no earlier tokens."""
        if mask is None:
            return model_attention(query, key, value, None)
        return self._in_chunks(query, key, value, lambda new: mask[:, :, new, : new.stop], model_attention)

    def _in_chunks(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask_of: Callable[[slice], torch.Tensor],
        model_attention: attention.ModelAttention,
    ) -> torch.Tensor:
        """The model's own attention, in chunks of queries, over the columns that a chunk's last query may see."""
        queries = query.shape[2]
        before = keys.shape[2] - queries
        parts = []
        for new in masks.chunks(queries):
            end = before + new.stop
            parts.append(model_attention(query[:, :, new], keys[:, :, :end], values[:, :, :end], mask_of(new)))
        return torch.cat(parts, 1)

    def _past(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Stored K and V ``[rows, kv_heads, n, D]`` and positions ``[rows, kv_heads, n]``, -1 for no token."""
        return gather(self.owner.tiered, self.index, range(self.owner.rows))

    def _mass(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        positions: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        logits: Logits,
        longest: int,
        in_order: bool,
    ) -> torch.Tensor:
        """Mass that the prompt's queries gave to each position: ``[rows, kv_heads, length of the longest row]``.

        ``positions``: of queries, of columns, and which queries are tokens; ``in_order`` as in `prompt_mass`.
        """
        by_column = prompt_mass(query, keys, *positions, logits, self.owner.importance_queries, in_order)
        if in_order:
            return by_column
        column_position = positions[1]
        mass = by_column.new_zeros(*by_column.shape[:2], longest + 1)  # the last entry collects columns without a token
        mass.scatter_add_(2, column_position.expand_as(by_column) % (longest + 1), by_column)
        return mass[..., :longest]

    def _store(
        self, key: torch.Tensor, value: torch.Tensor, real: torch.Tensor | None, mass: torch.Tensor | None
    ) -> None:
        """Append the new rows; ``mass`` is the initial importance of their tokens."""
        cache, k, v = self.owner.tiered, self._rows(key), self._rows(value)
        if real is None:
            cache.append(self.index, k, v, mass=mass, queries=None if mass is None else k.shape[1])
            return
        for request, count in enumerate(self._new_columns(key.shape[2]).sum(1).tolist()):
            own = None if mass is None or not count else mass[request : request + 1]
            chosen = real[request]
            cache.append(
                self.index,
                k[request][chosen],
                v[request][chosen],
                requests=[request],
                seq_lens=[count],
                mass=own,
                queries=None if own is None else count,
            )

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return stored_rows(x, self.owner.tiered.dtype)

    def lengths(self) -> list[int]:
        """Number of tokens stored in each row."""
        return [self.owner.tiered.length(request, self.index) for request in range(self.owner.rows)]

    def flush(self) -> None:
        """Pass the mass of the last decode steps to the cache."""
        if self.ledger is not None:
            self.ledger.flush()

    # Interface of transformers' cache layers; the StrataCache handles rows and columns.

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.columns, self.ledger, self.is_initialized = 0, None, False

    def offload(self) -> None:
        raise NotImplementedError("offloading: expected False, got True; a StrataCache stays on its device")
