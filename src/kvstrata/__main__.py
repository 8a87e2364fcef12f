"""`python -m kvstrata`: the command line without an installed script, for example on a GPU host with PYTHONPATH=src."""

from kvstrata.tools.cli import app

if __name__ == "__main__":
    app(prog_name="kvstrata")
