"""Changes of buckets: appends, plans of moves between tiers, and the kernels that execute them."""
