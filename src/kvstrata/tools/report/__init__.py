"""One page from results/: page.py collects and writes it, figures.py draws, history.py asks git for the past."""
