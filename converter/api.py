"""`wisparse.convert`. Imports no torch before the settings and config.json are checked."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack, cast

from wisparse.formats import guard

from .config import require_supported
from .settings import ConvertOptions, ConvertSettings


def convert(
    model: str | os.PathLike[str],
    output_dir: str | os.PathLike[str] | None = None,
    *,
    progress: bool | None = None,
    **settings: Unpack[ConvertOptions],
) -> Path:
    """Convert a Hugging Face causal LM into a sparse bundle.

    Args:
        model: a folder, or a Hub id.
        output_dir: the bundle's folder; by default ``<model-name>-wisparse`` in the current folder.
        progress: draw progress bars; None: bars on a terminal, else a line on stderr every ten seconds.
        settings: the options of ``wisparse convert --help`` with ``_`` in place of ``-``, such as ``sparsity=0.5``
            or ``sparsity=[0.3, 0.5]``; the fields of `ConvertSettings`.

    Returns:
        The bundle's folder.

    Raises:
        WisparseError: its sub-classes say what is wrong; see `wisparse.formats.errors`.
    """
    if progress is not None:
        guard.switch("progress", progress)
    guard.keywords("convert", settings, [field.name for field in fields(ConvertSettings)[2:]])
    validated = ConvertSettings(cast(str, model), cast(Path, output_dir), **cast(dict[str, Any], settings))
    if guard.find_gguf(validated.model, validated.gguf_file) is None:
        require_supported(validated.model)
    from .pipeline import run  # with torch and transformers, which take seconds
    from .processes import Progress

    run(validated, Progress(progress))
    return validated.output_dir
