"""The lab: profiles that explain, checks that decide, one page that shows. Nothing of the library imports it.

    profile   case of bench ──launch.py under ncu──▶ ncu.py ──▶ profile.py ──▶ gates, profile_summary.md, JSON
    check     sweeps.py ──▶ check.py, again in children under compute-sanitizer
    report    results/<machine>/*.json and their past in git (history.py) ──▶ report/: one page, HTML or Markdown
    bench --against   two results ──▶ regress.py
    info      info.py

The commands are in tools/cli.py.
"""
