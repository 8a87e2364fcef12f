"""How tokens move: append to pages, the plan of moves between tiers, and the kernels that carry it out."""
