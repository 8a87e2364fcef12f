"""Profiles and comparisons as tables, and the summary written with them."""

from __future__ import annotations

from collections.abc import Sequence

from kvstrata.tools.render import Grid
from kvstrata.tools.results import provenance

from .ncu import QUANTITIES, Kernel
from .profile import Change, Profile

STALLS = 3  # maximum number of stall reasons shown
BUSY = 60.0  # percent of a peak from which a unit is considered the bottleneck


def caption(profile: Profile) -> str:
    machine = profile.machine
    return f"{profile.op} on {machine['name']}, {profile.tool}, {provenance(machine)}"


def bound(kernel: Kernel) -> str:
    """Bottleneck of a kernel: the busiest unit, or else the most frequent stall reason."""
    busy = {key: kernel.values[key] for key in ("dram", "tensor", "issue") if key in kernel.values}
    if busy and max(busy.values()) >= BUSY:
        key = max(busy, key=lambda name: busy[name])
        return QUANTITIES[key].title
    if kernel.stalls:
        return f"waiting: {next(iter(kernel.stalls))}"
    return "waiting" if busy else ""


def stalls(kernel: Kernel) -> str:
    return ", ".join(f"{reason} {share:.0f} %" for reason, share in list(kernel.stalls.items())[:STALLS])


def show(value: float | None, key: str) -> str:
    return "" if value is None else f"{value:,.{QUANTITIES[key].digits}f}"


def kernels(profile: Profile) -> Grid:
    """One line per kernel; quantities that no kernel has are left out."""
    every = [(case, kernel) for case in profile.cases for kernel in case.kernels]
    keys = [key for key in QUANTITIES if any(key in kernel.values for _, kernel in every)]
    titles = [QUANTITIES[key].title + (f", {unit}" if (unit := QUANTITIES[key].unit) else "") for key in keys]
    rows = [
        [
            case.case,
            kernel.name,
            *(show(kernel.values.get(key), key) for key in keys),
            f"{1e-6 * case.bytes / kernel.values['us']:.2f}" if kernel is case.main and kernel.values.get("us") else "",
            bound(kernel),
            stalls(kernel),
        ]
        for case, kernel in every
    ]
    header = ["case", "kernel", *titles, "TB/s of the case", "bound by", "warps wait for"]
    notes = [f"{name} was not profiled: {why}" for name, why in profile.failed.items()]
    return Grid(caption(profile), header, rows, notes, labels=2)


def comparison(changes: Sequence[Change], title: str) -> Grid:
    """One line per quantity of the longest kernel that changed."""
    rows = [
        [c.case, QUANTITIES[c.key].title, show(c.before, c.key), show(c.after, c.key), c.shown]
        for c in changes
        if show(c.before, c.key) != show(c.after, c.key)
    ]
    cases = {c.case for c in changes}
    same = sorted(cases - {row[0] for row in rows})
    notes = [f"{name}: nothing changed" for name in same]
    return Grid(title, ["case", "", "before", "after", "change"], rows, notes, labels=2)


def summary(profile: Profile, compared: Grid | None = None, missed: Sequence[str] = ()) -> str:
    """Markdown summary: environment, kernels, comparison and missed gates."""
    parts = [
        f"# Profile of {profile.op}",
        f"{caption(profile)}. One launch of each kernel, caches flushed, clocks not locked; written by "
        f"`kvstrata profile {profile.op}`. Times under a profiler are not benchmarks; TB/s are the bytes of the case "
        "over the time of its longest kernel.",
        kernels(profile).markdown(),
    ]
    if compared is not None:
        parts += [f"## {compared.title}", compared.markdown()]
    if missed:
        parts += ["## Gates that were missed", "\n".join(f"- {line}" for line in missed)]
    return "\n\n".join(parts) + "\n"
