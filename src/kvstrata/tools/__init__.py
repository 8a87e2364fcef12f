"""The commands and what they share: results.py, render.py, plot.py. Code that runs a model does not import them.

    profile   case of bench ──launch.py under ncu──▶ ncu.py ──▶ profile.py ──▶ gates, profile_summary.md, JSON
    check     sweeps/ ──▶ check.py, and again in child processes under compute-sanitizer
    report    results/<machine>/*.json and their history in git (history.py) ──▶ report/: one page, HTML or Markdown
    bench --against   two results ──▶ regress.py
    info      info.py

The commands are in tools/cli.py.
"""
