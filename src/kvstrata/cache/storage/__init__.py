"""Storage of tokens: pages, the pool of slabs, page tables and the device tensors that kernels read."""
