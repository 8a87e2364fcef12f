"""The two ranks of `test_hf.py::test_two_ranks_generate_what_one_does`: two processes, each writes what it generated.

They are forks of one process, so that torch and transformers are imported once.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from kvstrata.hf import StrataCache


def generate(rank: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=2)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto")).eval()
    ids = torch.load(folder / "ids.pt")
    tokens, kv_heads = [], []
    small = dict(budget=0.5, page_tokens=16, recent_tokens=16, sink_tokens=2, dtype=torch.float32, policy="recency")
    for options in (dict(budget=1.0), small):
        cache = StrataCache(model.config, **options)
        tokens.append(model.generate(ids, past_key_values=cache, max_new_tokens=24, do_sample=False))
        kv_heads.append(cache.tiered.kv_heads)
    packed = StrataCache(model.config, format="K4V4", max_tokens=64)
    model(ids, past_key_values=packed)
    layers = [tuple(layer.calibration) for layer in packed.layers]
    torch.save(dict(tokens=tokens, kv_heads=kv_heads, layers=layers), folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


ranks = {}
for rank in range(2):
    if (process := os.fork()) == 0:
        try:
            generate(rank, Path(sys.argv[1]))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # threads of gloo may still run when the interpreter ends, which aborts now and then
    ranks[process] = rank
while ranks:
    process, status = os.wait()
    rank = ranks.pop(process)
    if status:
        for other in ranks:
            os.kill(other, signal.SIGKILL)  # it would wait for this one
        sys.exit(f"rank {rank}: exit status {status}")
