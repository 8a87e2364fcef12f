"""Store the K/V rows of one layer on a side stream while the attention of another runs.

    python examples/overlap_store.py

The two do not depend on each other, so the store can use the memory bandwidth that attention leaves. Measured by
`kvstrata bench store --only 'overlap-*'`.
"""

import torch

import kvstrata

if not torch.cuda.is_available():
    raise SystemExit("this example needs a CUDA device: on a CPU there is nothing to overlap")

device = torch.device("cuda")
q = torch.randn(32, 32, 1, 128, device=device, dtype=torch.float16)
keys, values = torch.randn(2, 32, 8, 4096, 128, device=device, dtype=torch.float16)
k, v = torch.randn(2, 8192, 8, 128, device=device, dtype=torch.float16)
k_cache, v_cache = torch.zeros(2, 1024, 16, 8, 128, device=device, dtype=torch.float16)
slot_mapping = torch.randperm(1024 * 16, device=device)[:8192]

side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())  # k and v are ready
with torch.cuda.stream(side):
    kvstrata.store_kv(k, v, k_cache, v_cache, slot_mapping)
out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
torch.cuda.current_stream().wait_stream(side)  # later readers of the pages see them

assert torch.equal(k_cache.flatten(0, 1)[slot_mapping], k)
print(f"stored {k.shape[0]} tokens in parallel with attention over {tuple(keys.shape)}; output {tuple(out.shape)}")
