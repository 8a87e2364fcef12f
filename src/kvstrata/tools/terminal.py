"""Shared parts of the commands: common options, choice of device, consoles, and one-line usage errors."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console
    from rich.progress import Progress


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


ResultsOption = Annotated[Path, typer.Option("--results", help="Folder of results, one subfolder per machine.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DeviceOption = Annotated[Device, typer.Option(help="Where to run; auto uses a GPU if there is one.")]
RevisionOption = Annotated[str | None, typer.Option(help="Revision to record outside a git checkout.")]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help="Dtype of the model: float32, float16 or bfloat16; default float32 on a CPU, bfloat16 on a GPU.",
    ),
]
DTYPES = ("float32", "float16", "bfloat16")


def device_of(wanted: Device) -> torch.device:
    """Device that a command runs on; ValueError if the requested one is not available."""
    import torch

    if wanted is Device.cuda and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no CUDA device")
    gpu = torch.cuda.is_available() and wanted is not Device.cpu
    return torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")


def dtype_of(name: str | None) -> torch.dtype | None:
    """Torch dtype of a ``--dtype``; ValueError for an unknown name."""
    import torch

    if name is not None and name not in DTYPES:
        raise ValueError(f"--dtype: expected float32, float16 or bfloat16, got {name!r}")
    return None if name is None else getattr(torch, name)


def check_out(path: Path) -> None:
    """ValueError unless ``--out`` can be a file, to be raised before the work for it begins."""
    if path.is_dir():
        raise ValueError(f"--out: expected a file, got the folder {str(path)!r}")
    if not path.parent.is_dir():
        raise ValueError(f"--out: expected a file in a folder that exists, got {str(path)!r}")


def numba_hint(device: torch.device) -> str | None:
    """Advice to install numba on a CPU without it, None elsewhere."""
    if device.type != "cpu" or importlib.util.find_spec("numba") is not None:
        return None
    return "Without numba the cache runs in plain torch here, several times slower: pip install 'kvstrata[cpu]'"


def console(stderr: bool) -> Console:
    """Console as wide as the terminal, or 240 columns if the output is not a terminal."""
    from rich.console import Console

    result = Console(stderr=stderr, highlight=False)
    return result if result.is_terminal else Console(stderr=stderr, highlight=False, width=240)


def progress_bars(console: Console, *extra_columns: str, transient: bool = False) -> Progress:
    """Progress bars, disabled when ``console`` is not a terminal; ``extra_columns`` are formats of further columns."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    extra = (TextColumn(text) for text in extra_columns)
    return Progress(*columns, *extra, console=console, transient=transient, disable=not console.is_terminal)


@contextmanager
def spinner(title: str) -> Iterator[Callable[[str], None]]:
    """Status line on stderr; disabled when stderr is not a terminal."""
    from rich.console import Console

    if not sys.stderr.isatty():
        yield lambda step: None
        return
    with Console(stderr=True).status(title) as status:
        yield lambda step: status.update(f"{title}: {step}")


def text_of(error: Exception) -> str:
    """Message of an error, without the quotes of a KeyError."""
    return str(error.args[0]) if isinstance(error, LookupError) and error.args else str(error)


def usage_error(message: str) -> NoReturn:
    """Print in one line what is wrong with the request, however many lines the message has; exit code 2."""
    typer.echo(f"kvstrata: {' '.join(filter(None, map(str.strip, message.splitlines())))}", err=True)
    raise typer.Exit(2)


@contextmanager
def usage_errors(also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn errors of arguments and files, and ``also`` further exceptions, into one line and exit code 2."""
    kinds: tuple[type[Exception], ...] = (LookupError, ValueError, OSError, *also)
    try:
        yield
    except kinds as error:
        usage_error(text_of(error))


def require(packages: Iterable[str], extra: str, what: str) -> None:
    """Refuse if a package is not installed, and name the extra that installs it."""
    for name in packages:
        if importlib.util.find_spec(name) is None:
            usage_error(f"{what} needs {name}: pip install 'kvstrata[{extra}]'")
