"""Where tokens lie: pages, the pool of slabs, page tables and the device tensors that kernels read."""
