"""The search: what can be set in a kernel, gates that stop a configuration, statistics that decide, tables that last.

space.py     parameters and their values           gates.py    what the compiled kernel needs, before any launch
problems/    a case of an op, ready to be tried    decide.py   faster beyond noise, or not
search.py    a study of trials (Optuna)            storage.py  studies that outlive a kill and are shared
tables.py    winners, as `auto` reads them         warmup.py   compiles them ahead of time
experiment.py  pass rates of the gate itself        results.py, render.py, tools/cli.py
"""
