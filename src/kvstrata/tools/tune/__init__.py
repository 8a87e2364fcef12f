"""The search: tunable parameters of a kernel, gates that reject a configuration, statistics that decide, tables.

space.py     parameters and their values           gates.py    resource usage of the compiled kernel, before any launch
problems/    a case of an op, ready to be tried    decide.py   faster beyond noise, or not
search.py    a study of trials (Optuna)            storage.py  studies that survive a kill and are shared
tables.py    winners, as `auto` reads them         warmup.py   compiles them ahead of time
experiment.py  pass rates of the gate itself        results.py, render.py, tools/cli.py
"""
