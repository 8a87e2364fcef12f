"""A layer with full attention and linear attention or convolutions: K and V are packed, other states are kept.

The two parts share an index in the cache and nothing else; `StrataCache` moves the rows of both.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from .layer import Owner, StrataLayer

STATES = ("conv_states", "recurrent_states")


class HybridLayer(LinearAttentionLayer, StrataLayer):
    """`StrataLayer` whose model also keeps ``conv_states`` and ``recurrent_states`` in it."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, owner: Owner, place: int, index: int, number_of_states: int) -> None:
        StrataLayer.__init__(self, owner, place, index)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Initialise K and V, given by position, or states, given by name, as transformers' own layer does."""
        (StrataLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def plain(self) -> LinearAttentionAndFullAttentionLayer:
        """transformers' own layer with the states of this one."""
        layer = LinearAttentionAndFullAttentionLayer(self.number_of_states)
        own = vars(self)
        vars(layer).update({name: own[name] for name in vars(LinearAttentionLayer(self.number_of_states))})
        return layer

    def states(self) -> list[torch.Tensor]:
        """All states, for `StrataCache.memory`."""
        return [x for name in STATES for x in getattr(self, name).values() if x is not None]

    def _pick_states(self, rows: torch.Tensor) -> None:
        for name in STATES:
            states = getattr(self, name)
            for number, x in states.items():
                if x is not None:
                    states[number] = x[rows.to(x.device)]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._pick_states(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for state in self.states()[:1]:
            self._pick_states(torch.arange(len(state)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._pick_states(indices)

    def reset(self) -> None:
        """Drop K, V and states; the next forward may have another batch size."""
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        StrataLayer.reset(self)

    def get_max_length(self) -> int:
        return StrataLayer.get_max_length(self)

    def offload(self) -> None:
        StrataLayer.offload(self)
