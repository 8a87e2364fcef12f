"""The commands and what they share: results.py, render.py, plot.py. Nothing that runs a model imports them.

    profile   case of bench ──launch.py under ncu──▶ ncu.py ──▶ profile.py ──▶ gates, profile_summary.md, JSON
    check     sweeps/ ──▶ check.py, again in children under compute-sanitizer
    report    results/<machine>/*.json and their past in git (history.py) ──▶ report/: one page, HTML or Markdown
    bench --against   two results ──▶ regress.py
    info      info.py

The commands are in tools/cli.py.
"""
