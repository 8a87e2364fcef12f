"""Calibration of a model's K: balance and centre of every layer, and the layer's sensitivity to rounding.

    K of the model ──/ balance──▶ balanced K ──- centre──▶ ──rotate──▶ codes
    Q of the model ──* balance──▶ ──rotate──▶ scores with codes; + balanced Q · centre, the same for all tokens

A score is a sum of products over channels, so a channel of K may be divided by a number if that of Q is multiplied by
it (`pair_balance`; docs/formats.md has the mathematics). The numbers are powers of two: division and product are then
exact within the range of a floating-point dtype, and rows that are never quantised give bit-identical scores.

A `Calibration` covers all layers and has its own file format; `LayerCalibration` is what the kernels of one layer take.
With a calibration, codes depend only on the rows and their format. Tiers also use the mean query, along which the error
of K has hardly a component (`quant.reference.aim`), and the balance that suits rows that are rounded so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from os import PathLike
from pathlib import Path

import torch

from kvstrata.checks import check_device

KIND = "kvstrata.calibration"
VERSION = 1
KINDS = ("layer", "window", "none")
PARTS = ("balance", "centre", "query", "aimed")  # tensors of a layer, as files name them
MAX_EXPONENT = 8
LARGEST = 2.0**MAX_EXPONENT  # limit of a balance and of its inverse: K and Q of any model stay within the range of fp16
LARGEST_CENTRE = 65504.0
LARGEST_K = 2.0**13  # limit of the root mean square of a channel of K / balance: an eighth of fp16's largest number
LARGEST_SENSITIVITY = 1e30  # sums of K and V stay within float32
TINY = 1e-12  # relative to the largest mean square of a head: lower channels are raised to it


def _check(name: str, x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` contiguous; TypeError or ValueError unless it is float32 ``[kv_heads, head_dim]``."""
    if not isinstance(x, torch.Tensor) or x.dtype != torch.float32:
        raise TypeError(f"{name}: expected a float32 tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() != 2 or not x.numel():
        raise ValueError(f"{name}: expected [kv_heads, head_dim], got shape {tuple(x.shape)}")
    return x.detach().contiguous()


def _path(path: str | PathLike[str]) -> Path:
    """Path of a file; TypeError for anything else."""
    try:
        return Path(path)
    except TypeError:
        raise TypeError(f"path: expected the path of a calibration file, got {type(path).__name__}") from None


def check_balance(name: str, x: torch.Tensor) -> None:
    """Raise ValueError unless every number is a power of two from 1 / 256 to 256."""
    fraction, _ = torch.frexp(x.detach().float())
    within = (x >= 1 / LARGEST) & (x <= LARGEST)
    wrong = x[~(within & (fraction == 0.5))]
    if wrong.numel():
        raise ValueError(f"{name}: expected powers of two from {1 / LARGEST} to {LARGEST:g}, got {wrong[0].item()!r}")


def exponents(balance: torch.Tensor) -> torch.Tensor:
    """A checked balance in the form that kernels read: int8 exponents of two, same shape."""
    return (torch.frexp(balance)[1] - 1).to(torch.int8)


def factors(exponents: torch.Tensor) -> torch.Tensor:
    """The balance, float32, from its int8 exponents of two."""
    return ((exponents.int() + 127) << 23).view(torch.float32)


@dataclass(frozen=True, eq=False)
class LayerCalibration:
    """Balance and centre of K in one layer, and the mean query; None for what is not known.

    Args:
        balance: float32 ``[kv_heads, head_dim]``, powers of two from 1 / 256 to 256. K is divided by it and Q of the
            same KV head multiplied by it, both before the Hadamard rotation.
        centre: float32 ``[kv_heads, head_dim]``, subtracted from balanced K before the rotation. Scores of codes lack
            the product of balanced Q and centre, which is the same for every token.
        query: float32 ``[kv_heads, head_dim]``, mean of the model's Q over tokens, positions ahead and the query heads
            of a KV head. Tiers round K of less than 8 bits so that its error has hardly a component along it.
        aimed: balance that tiers use instead of ``balance``, float32 ``[kv_heads, head_dim]``. The centre is in the
            space of ``balance`` all the same.

    Raises TypeError or ValueError, naming the argument.

    Example:
        >>> layer = LayerCalibration(torch.full((2, 64), 4.0), torch.zeros(2, 64))
        >>> k = torch.randn(10, 2, 64)
        >>> rows = k / layer.balance - layer.centre
    """

    balance: torch.Tensor | None = None
    centre: torch.Tensor | None = None
    query: torch.Tensor | None = None
    aimed: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("balance", "aimed"):
            own = getattr(self, name)
            if own is not None:
                object.__setattr__(self, name, _check(name, own))
                check_balance(name, own)
        if self.query is not None:
            object.__setattr__(self, "query", _check("query", self.query))
            if not bool(self.query.isfinite().all()):
                raise ValueError("query: expected finite numbers, got other values")
        if self.centre is not None:
            object.__setattr__(self, "centre", _check("centre", self.centre))
            if not bool((self.centre.abs() <= LARGEST_CENTRE).all()):
                raise ValueError(f"centre: expected finite numbers up to {LARGEST_CENTRE}, got other values")
        given = [(name, x) for name, x in self.tensors.items() if x is not None]
        for name, x in given[1:]:
            if x.shape != given[0][1].shape:
                raise ValueError(
                    f"{name}: expected shape {tuple(given[0][1].shape)} as {given[0][0]}, got {tuple(x.shape)}"
                )

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Tensors by name, None for what is not known."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def shape(self) -> tuple[int, int] | None:
        """``(kv_heads, head_dim)``, or None if it has no tensors."""
        x = next((x for x in self.tensors.values() if x is not None), None)
        return None if x is None else (x.shape[0], x.shape[1])

    @property
    def packs(self) -> bool:
        """True if it has what packed pages of one format use: a balance or a centre."""
        return self.balance is not None or self.centre is not None

    def to(self, device: torch.device | str) -> LayerCalibration:
        """Return a copy on a device."""
        return LayerCalibration(*(None if x is None else x.to(device) for x in self.tensors.values()))


def _digest(layers: Sequence[LayerCalibration]) -> str:
    digest = hashlib.sha256()
    for layer in layers:
        for x in layer.tensors.values():
            digest.update(b"none" if x is None else str(tuple(x.shape)).encode() + x.cpu().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration of all layers of a model, as `kvstrata calibrate` writes it.

    Args:
        layers: one `LayerCalibration` per layer that a cache compresses, in order; all have the same sizes.
        k_sensitivity, v_sensitivity: KL against 16 bit in nats when K, or V, of one of ``layers`` alone is rounded to
            ``bits``; empty if not measured.
        bits: width of that rounding, 0 if not measured.
        model: name of the model, for error messages and tables.
        windows: one `LayerCalibration` per layer with a sliding window that a `StrataCache` packs, in order; empty if
            not measured.
        kinds: one entry per model layer that says where its part is: ``layer`` (the next of ``layers``), ``window``
            (the next of ``windows``) or ``none``. Empty in older files; then ``layers`` must cover the whole model.

    Raises TypeError or ValueError, naming the argument.

    Example:
        >>> calibration = Calibration([LayerCalibration(torch.ones(2, 64))] * 4)
        >>> len(calibration.layers), calibration.shape
        (4, (2, 64))
    """

    layers: Sequence[LayerCalibration]
    k_sensitivity: Sequence[float] = field(default=())
    v_sensitivity: Sequence[float] = field(default=())
    bits: int = 0
    model: str = ""
    windows: Sequence[LayerCalibration] = field(default=())
    kinds: Sequence[str] = field(default=())

    def __post_init__(self) -> None:
        if not self.layers and not self.windows:
            raise TypeError(f"layers: expected a LayerCalibration for each layer, got {self.layers!r}")
        for name in ("layers", "windows"):
            own = tuple(getattr(self, name))
            object.__setattr__(self, name, own)
            if not all(isinstance(layer, LayerCalibration) for layer in own):
                raise TypeError(f"{name}: expected a LayerCalibration for each layer, got {own!r}")
            shapes = {layer.shape for layer in own} - {None}
            if len(shapes) > 1:
                raise ValueError(
                    f"{name}: expected one (kv_heads, head_dim) in all of them, got {sorted(map(str, shapes))}"
                )
        for name in ("k_sensitivity", "v_sensitivity"):
            values = tuple(float(x) for x in getattr(self, name))
            object.__setattr__(self, name, values)
            if len(values) not in (0, len(self.layers)):
                raise ValueError(f"{name}: expected {len(self.layers)} numbers, one per layer, got {len(values)}")
            if not all(0 <= x <= LARGEST_SENSITIVITY for x in values):
                raise ValueError(f"{name}: expected numbers from 0 to {LARGEST_SENSITIVITY:g}, got {values}")
        object.__setattr__(self, "kinds", tuple(self.kinds))
        if unknown := [kind for kind in self.kinds if kind not in KINDS]:
            raise ValueError(f"kinds: expected {', '.join(map(repr, KINDS))}, got {unknown[0]!r}")
        given, expected = [self.kinds.count(kind) for kind in KINDS[:2]], [len(self.layers), len(self.windows)]
        if self.kinds and given != expected:
            raise ValueError(
                f"kinds: expected {expected[0]} of layers and {expected[1]} of windows, got {given[0]} and {given[1]}"
            )

    @property
    def shape(self) -> tuple[int, int] | None:
        """``(kv_heads, head_dim)`` of ``layers``, or None if none of them has tensors."""
        return next((layer.shape for layer in self.layers if layer.shape is not None), None)

    @property
    def has_rows(self) -> bool:
        """True if it has tensors of a layer, not only sensitivities."""
        return any(layer.shape is not None for layer in (*self.layers, *self.windows))

    def check_rows(self) -> None:
        """Raise ValueError unless some layer has a balance or a centre, which packed pages need."""
        if not any(layer.packs for layer in (*self.layers, *self.windows)):
            raise ValueError("calibration: expected balance or centre of K in some layer, got none")

    def only_sensitivity(self) -> Calibration:
        """Return a copy without tensors; a cache that takes it estimates them from each prompt.

        Raises ValueError without sensitivities.
        """
        if self.sensitivity is None or not self.layers:
            raise ValueError("calibration: expected one with sensitivities of layers, got one without")
        kinds = [kind if kind == "layer" else "none" for kind in self.kinds]
        return replace(self, layers=[LayerCalibration()] * len(self.layers), windows=(), kinds=kinds)

    @property
    def sensitivity(self) -> tuple[float, ...] | None:
        """Cost of rounding K and V of each layer, or None if that was not measured."""
        both = tuple(k + v for k, v in zip(self.k_sensitivity, self.v_sensitivity, strict=False))
        return both if len(both) == len(self.layers) else None

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the tensors of all layers but those of ``windows``; equal for equal numbers."""
        return _digest(self.layers)

    @cached_property
    def window_fingerprint(self) -> str:
        """`fingerprint` of the layers with a sliding window."""
        return _digest(self.windows)

    def check(self, layers: int, kv_heads: int, head_dim: int) -> None:
        """Raise ValueError unless this is a calibration of a model with these sizes."""
        shape = (len(self.layers), *(self.shape or (kv_heads, head_dim)))
        if shape != (layers, kv_heads, head_dim):
            of = f" of {self.model}" if self.model else ""
            raise ValueError(
                f"calibration: expected {layers} layers of {kv_heads} KV heads and head_dim {head_dim}, got one{of}"
                f" with {shape[0]} layers of {shape[1]} and {shape[2]}"
            )

    def check_windows(self, windows: int) -> None:
        """Raise ValueError unless it has no layers with a sliding window, or as many as a model."""
        if len(self.windows) not in (0, windows):
            of = f" of {self.model}" if self.model else ""
            raise ValueError(
                f"calibration: expected {windows} layers with a sliding window, got one{of} with {len(self.windows)}"
            )

    def check_kinds(self, kinds: Sequence[str]) -> None:
        """Raise ValueError unless it is of a model with these layers, as far as it says which layers it has.

        ``kinds``: for each layer of the model "layer" for full attention, "window" for a sliding window, "" for others.
        """
        if not self.kinds:
            return
        of = f" of {self.model}" if self.model else ""
        if len(self.kinds) != len(kinds):
            raise ValueError(
                f"calibration: expected one of a model with {len(kinds)} layers, got one{of} with {len(self.kinds)}"
            )
        for number, (own, kind) in enumerate(zip(self.kinds, kinds, strict=True)):
            if kind and (own == "layer") != (kind == "layer"):
                expected = "full attention" if kind == "layer" else "a sliding window"
                raise ValueError(f"calibration: expected {expected} in layer {number}, got one{of} with {own!r} there")

    @property
    def model_layers(self) -> int:
        """Number of layers of the model, as far as they are known."""
        return len(self.kinds) or len(self.layers) + len(self.windows)

    def of_model(self, layers: int, shape: tuple[int, int] | None = None) -> list[LayerCalibration]:
        """Calibration of each of a model's ``layers``; one that is not in it has neither balance nor centre.

        Raises ValueError unless it is of a model with as many layers, all of ``shape`` (kv_heads, head_dim) if given.
        """
        of, kinds = f" of {self.model}" if self.model else "", self.kinds
        if not kinds and self.windows:
            raise ValueError(
                f"calibration: expected a file that says which layers have a sliding window, got one{of} that does not;"
                " write it again with kvstrata calibrate"
            )
        kinds = kinds or ["layer"] * len(self.layers)
        if len(kinds) != layers:
            raise ValueError(
                f"calibration: expected one of a model with {layers} layers, got one{of} with {len(kinds)}"
            )
        lists = {"layer": iter(self.layers), "window": iter(self.windows), "none": repeat(LayerCalibration())}
        own = [next(lists[kind]) for kind in kinds]
        for number, layer in enumerate(own):
            if shape is not None and layer.shape not in (None, shape):
                raise ValueError(
                    f"calibration: expected {shape[0]} KV heads and head_dim {shape[1]} in layer {number}, got one{of}"
                    " with {} and {}".format(*layer.shape)
                )
        return own

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file; FileNotFoundError for a missing folder, IsADirectoryError if ``path`` is one."""
        from safetensors.torch import save_file

        path = _path(path)
        if path.is_dir():
            raise IsADirectoryError(f"path: expected a file, got the folder {str(path)!r}")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"path: expected a file in a folder that exists, got {str(path)!r}")
        tensors: dict[str, torch.Tensor] = {}
        for prefix, layers in (("", self.layers), ("window.", self.windows)):
            for i, layer in enumerate(layers):
                parts = layer.tensors.items()
                tensors |= {f"{prefix}{name}.{i}": x.cpu().clone() for name, x in parts if x is not None}
        for name, values in (("k", self.k_sensitivity), ("v", self.v_sensitivity)):
            tensors[f"sensitivity.{name}"] = torch.tensor(values, dtype=torch.float64, device="cpu")
        counts = {"layers": len(self.layers), "windows": len(self.windows)}
        numbers = {"version": VERSION, **counts, "bits": self.bits}
        metadata = {"kind": KIND, "model": self.model, **{name: str(n) for name, n in numbers.items()}}
        metadata["kinds"] = " ".join(self.kinds)
        save_file(tensors, path, metadata=metadata)

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str = "cpu") -> Calibration:
        """Read a file that `save` wrote; ValueError for any other, FileNotFoundError if there is none."""
        from safetensors import SafetensorError, safe_open

        path, device = _path(path), check_device(device)
        if not path.is_file():
            raise FileNotFoundError(f"path: expected a calibration file, got {str(path)!r}")
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"path: expected a calibration file, {str(path)!r} is not one: {error}") from error
        if (metadata.get("kind"), metadata.get("version")) != (KIND, str(VERSION)):
            given = f"kind {metadata.get('kind')!r}, version {metadata.get('version')!r}"
            raise ValueError(f"path: expected {KIND!r} of version {VERSION} in {str(path)!r}, got {given}")
        try:
            counts = {"": int(metadata["layers"]), "window.": int(metadata.get("windows", 0))}
            names = [[[f"{x}{part}.{i}" for part in PARTS] for i in range(n)] for x, n in counts.items()]
            known = {name for layers in names for parts in layers for name in parts}
            known |= {"sensitivity.k", "sensitivity.v"}
            if unknown := sorted(set(tensors) - known):
                raise ValueError(f"tensors: expected those of {counts['']} layers, got {unknown[0]!r}")
            layers, windows = (
                [LayerCalibration(*(tensors.get(name) for name in parts)) for parts in layers] for layers in names
            )
            if missing := sorted({"sensitivity.k", "sensitivity.v"} - set(tensors)):
                raise ValueError(f"no tensor {missing[0]}")
            k, v = (tensors[f"sensitivity.{name}"].tolist() for name in "kv")
            kinds = metadata.get("kinds", "").split()
            calibration = cls(layers, k, v, int(metadata["bits"]), metadata.get("model", ""), windows, kinds)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"path: expected a calibration file, {str(path)!r} is damaged: {error}") from error
        return calibration.to(device)

    def to(self, device: torch.device | str) -> Calibration:
        """Return a copy on a device."""
        layers, windows = ([layer.to(device) for layer in own] for own in (self.layers, self.windows))
        return replace(self, layers=layers, windows=windows)


def pair_means(x: torch.Tensor, pairs: int, interleaved: bool) -> torch.Tensor:
    """Replace each pair of channels that RoPE rotates into each other by its mean: ``x [..., D]`` to the same shape.

    ``pairs`` is the number of pairs at the beginning of a row, (i, i + pairs) or, ``interleaved``, (2 i, 2 i + 1);
    channels after them are unpaired.
    """
    if not pairs:
        return x
    rotated, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        mean = rotated.unflatten(-1, (pairs, 2)).mean(-1).repeat_interleave(2, -1)
    else:
        mean = rotated.unflatten(-1, (2, pairs)).mean(-2).repeat(*[1] * (x.dim() - 1), 2)
    return torch.cat([mean, rest], -1)


def pair_balance(
    k_square: torch.Tensor,
    q_square: torch.Tensor,
    pairs: int = 0,
    interleaved: bool = False,
    k_whole: torch.Tensor | None = None,
) -> torch.Tensor:
    """The balance with the least score noise, rounded to powers of two.

    Args:
        k_square: ``[..., kv_heads, head_dim]``, mean squares of K's channels after the centre is subtracted.
        q_square: mean squares of Q's channels, over the query heads of each KV head; same shape.
        pairs, interleaved: channels that RoPE rotates into each other get one number, see `pair_means`.
        k_whole: mean squares of K's channels with the centre, same shape; K divided by the balance then fits fp16.

    Returns float32 ``[..., kv_heads, head_dim]``: (E k² / E q²)^(1/4), divided by its geometric mean over the
    head, since a common factor changes nothing, and rounded. Channels without any K or any Q get the nearest allowed
    value.

    Raises ValueError for shapes that differ.

    Example:
        >>> pair_balance(torch.tensor([[256.0, 1.0]]), torch.ones(1, 2))
        tensor([[2.0000, 0.5000]])
    """
    if k_square.shape != q_square.shape:
        raise ValueError(f"q_square: expected shape {tuple(k_square.shape)} as k_square, got {tuple(q_square.shape)}")
    k, q = (pair_means(x.detach().double(), pairs, interleaved) for x in (k_square, q_square))
    k, q = (torch.maximum(x, TINY * x.amax(-1, keepdim=True).clamp(min=1e-30)) for x in (k, q))
    power = (k / q).log2() / 4
    power = (power - power.mean(-1, keepdim=True)).round()
    if k_whole is not None:
        whole = 2 * pair_means(k_whole.detach().double(), pairs, interleaved)  # of the larger channel of a pair
        power = torch.maximum(power, (whole.clamp(min=1e-30).sqrt() / LARGEST_K).log2().ceil())
    return power.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp2().float()
