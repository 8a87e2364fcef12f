"""Nsight Compute as a function: the command, an explanation of its failures, and its CSV as numbers.

``ncu --csv --page raw`` prints one wide table: names of metrics, their units, then one line per launch. It is asked for
sections, whose metrics ncu itself chooses by GPU, and a few metrics that no section has on every GPU.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstrata.tools import child

PACKAGE = Path(__file__).resolve().parents[2]
SECTIONS = (
    "SpeedOfLight",
    "MemoryWorkloadAnalysis",
    "ComputeWorkloadAnalysis",
    "Occupancy",
    "LaunchStats",
    "SchedulerStats",
    "WarpStateStats",
)


@dataclass(frozen=True)
class Quantity:
    """One quantity of a profile: its title and unit, and the metrics it is read from; the first one present is used."""

    title: str
    unit: str  # "%": of a peak or of all; changes are in percentage points
    metrics: tuple[str, ...]
    digits: int = 1


ACTIVE, ELAPSED = (f".avg.pct_of_peak_sustained_{when}" for when in ("active", "elapsed"))  # metrics in percent
QUANTITIES = {
    "us": Quantity("time", "us", ("gpu__time_duration.sum", "gpu__time_duration.avg"), 2),
    "l2_hit": Quantity("L2 hits", "%", ("lts__t_sector_hit_rate.pct",)),
    "l1_hit": Quantity("L1 hits", "%", ("l1tex__t_sector_hit_rate.pct",)),
    "dram": Quantity("DRAM", "%", (f"gpu__dram_throughput{ELAPSED}", f"dram__throughput{ELAPSED}")),
    "dram_read": Quantity("DRAM read", "MB", ("dram__bytes_read.sum",)),
    "dram_write": Quantity("DRAM written", "MB", ("dram__bytes_write.sum",)),
    "tensor": Quantity(
        "tensor cores", "%", (f"sm__pipe_tensor_cycles_active{ACTIVE}", f"sm__inst_executed_pipe_tensor{ACTIVE}")
    ),
    "issue": Quantity("issue slots", "%", (f"smsp__issue_active{ACTIVE}", f"sm__inst_issued{ACTIVE}")),
    "occupancy": Quantity("occupancy", "%", (f"sm__warps_active{ACTIVE}",)),
    "registers": Quantity("registers", "", ("launch__registers_per_thread",), 0),
    "shared": Quantity("shared", "KB", ("launch__shared_mem_per_block",)),
    "conflicts": Quantity("bank conflicts", "", ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",), 0),
}
# Requested by name; the others are in every GPU's sections.
ASKED = tuple(q.metrics[0] for name, q in QUANTITIES.items() if name not in ("l1_hit", "registers", "shared"))
STALL = re.compile(r"issue_stalled_(\w+?)_per_(?:issue_active\.ratio|warp_active\.pct)$")
# Factors from ncu's units to the base unit: us, bytes, or the number itself.
SCALES = {
    "ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6,
    "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12,
    "byte/block": 1.0, "kbyte/block": 1e3, "mbyte/block": 1e6,
}  # fmt: skip
UNITS = {"MB": 1e-6, "KB": 1e-3}  # from bytes to our units


class NcuError(RuntimeError):
    """Nsight Compute could not profile; the message says why and what to do."""


@dataclass(frozen=True)
class Kernel:
    """One launch: `values` by the names of QUANTITIES (those that ncu returned), `stalls` in percent, most first."""

    name: str
    grid: str
    block: str
    values: dict[str, float]
    stalls: dict[str, float] = field(default_factory=dict)


def find() -> str:
    """Path of ncu; NcuError says how to install it."""
    if path := child.find_tool("ncu"):
        return path
    raise NcuError(
        "ncu is not on the PATH: Nsight Compute comes with the CUDA toolkit (or as nsight-compute from NVIDIA); "
        "put its folder on the PATH. Saved profiles can be compared without it: --compare OLD.json NEW.json"
    )


def own_kernels() -> list[str]:
    """Names of the package's kernels, in CUDA C++ and in Triton."""
    cuda = (
        re.findall(r"__global__.*?(\w+)\s*\(\s*const __grid_constant__", path.read_text(encoding="utf-8"), re.DOTALL)
        for path in PACKAGE.rglob("*.cu")
        if path.parent.name != "baselines"
    )
    python = (path for name in ("triton", "gluon") for path in PACKAGE.rglob(f"*{name}.py"))
    triton = (re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE) for path in python)
    return sorted({name for names in (*cuda, *triton) for name in names})


def command(
    ncu: str,
    watched: Sequence[str],
    log: Path,
    kernels: Iterable[str],
    launches: int,
    without: Iterable[str] = (),
    sections: Sequence[str] = SECTIONS,
) -> list[str]:
    """Profile what `watched` launches between cudaProfilerStart and Stop; `without` are metrics that this GPU lacks.

    Caches are flushed before every pass, as before every sample of bench; clocks are not locked.
    """
    metrics = [metric for metric in ASKED if metric not in set(without)]
    names = [*kernels]
    chosen = ["--kernel-name", f"regex:^({'|'.join(names)})$"] if names else []
    return [
        ncu, "--csv", "--page", "raw", "--print-units", "base", "--print-kernel-base", "function",
        "--log-file", str(log), "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "all",
        "--launch-count", str(launches), *chosen,
        *(part for section in sections for part in ("--section", section)),
        *(["--metrics", ",".join(metrics)] if metrics else []), *watched,
    ]  # fmt: skip


def unknown_metrics(text: str) -> list[str]:
    """Metrics that ncu reports as unknown, in a text without a table: this GPU lacks them."""
    return [name.rstrip(".") for name in re.findall(r"\b[a-z0-9]+__[\w.]+", text)]


def explain(text: str) -> str:
    """One-sentence explanation of a failure of ncu; its last lines for an unknown one."""
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "this user may not read the performance counters (ERR_NVGPUCTRPERM): run as root, or allow it for "
            "everybody by loading the nvidia module with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "LibraryNotLoaded" in text or "Failed to initialize the profiler" in text:
        return "ncu cannot start its profiler here: this virtual machine or container does not expose the counters"
    if "ERR_NVCMPGPU" in text or "Device not supported" in text:
        return "this ncu does not support the GPU or its driver: use the ncu of the installed CUDA toolkit"
    if raised := re.findall(r"^(?:\w+\.)*\w+(?:Error|Exception|Interrupt)\b.*", text, re.MULTILINE):
        return f"the profiled process failed: {raised[-1]}"
    if "No kernels were profiled" in text:
        return "none of our kernels was launched: this case takes another path on this machine"
    if "InterprocessLockFailed" in text:
        return "ncu cannot take its lock, which another user holds: set TMPDIR to a folder of your own"
    lines = [line for line in text.splitlines() if line.strip() and "==PROF==" not in line]
    return "ncu failed: " + " / ".join(lines[-6:]) if lines else "ncu failed without a message"


def parse(text: str) -> list[Kernel]:
    """The launches in order; NcuError if the text has no table."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID",')), None)
    if start is None:
        raise NcuError(explain(text))
    table = csv.reader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"'))))
    header = next(table)
    units = next(table, [])
    if "Metric Name" in header:
        raise NcuError("expected the raw page of ncu (--page raw), got its details page")
    return [_kernel(header, units, row) for row in table if len(row) == len(header)]


def _kernel(header: list[str], units: list[str], row: list[str]) -> Kernel:
    cells = {name: _value(cell, unit) for name, unit, cell in zip(header, units, row, strict=True)}
    text = dict(zip(header, row, strict=True))
    values: dict[str, float] = {}
    for key, quantity in QUANTITIES.items():
        value = next((cells[metric] for metric in quantity.metrics if cells.get(metric) is not None), None)
        if value is not None:
            values[key] = value * UNITS.get(quantity.unit, 1.0)
    if "shared" not in values:  # older ncu only reports its parts
        parts = [cells.get(f"launch__shared_mem_per_block_{kind}") for kind in ("static", "dynamic")]
        if all(part is not None for part in parts):
            values["shared"] = sum(part for part in parts if part is not None) * UNITS["KB"]
    return Kernel(text["Kernel Name"], text["Grid Size"], text["Block Size"], values, _stalls(cells))


def _stalls(cells: dict[str, float | None]) -> dict[str, float]:
    """Percent of the time that warps wait between two issues, by reason; being issued is not a reason."""
    shares = {m.group(1): cell for name, cell in cells.items() if (m := STALL.search(name)) and cell is not None}
    shares.pop("selected", None)
    total = sum(shares.values())
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return {reason: 100 * value / total for reason, value in ranked if value > 0} if total else {}


def _value(cell: str, unit: str) -> float | None:
    try:
        number = float(cell.replace(",", "")) * SCALES.get(unit.lower(), 1.0)
    except ValueError:  # "n/a", "(256, 1, 1)", a name
        return None
    return number if math.isfinite(number) else None
