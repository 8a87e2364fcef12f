"""What a cache decides: importance, budget, the tier of every token, centres."""
