"""Quality of a compressed cache: perplexity, KL and needles, by decoding a real model through it.

`measure` runs a model over texts with any transformers cache and compares it with the exact one; `contenders` are the
caches in one table, with their bytes; `quality` runs and saves the table; `advise` searches it.
"""
