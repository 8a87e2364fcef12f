"""One rank of `test_hf.py::test_two_ranks_write_what_one_does`: one of two processes, writes what it generated."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from kvstrata.hf import StrataCache

folder = Path(sys.argv[1])
dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=int(os.environ["RANK"]), world_size=2)
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto")).eval()
ids = torch.load(folder / "ids.pt")
tokens, kv_heads = [], []
small = dict(budget=0.5, page_tokens=16, recent_tokens=16, sink_tokens=2, dtype=torch.float32, policy="recency")
for options in (dict(budget=1.0), small):
    cache = StrataCache(model.config, **options)
    tokens.append(model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False))
    kv_heads.append(cache.tiered.kv_heads)
torch.save(dict(tokens=tokens, kv_heads=kv_heads), folder / f"rank{dist.get_rank()}.pt")
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # threads of gloo may still run when the interpreter ends, which aborts now and then
