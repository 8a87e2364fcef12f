"""One page from results/: page.py collects and writes it, figures.py draws, history.py reads the past from git."""
