"""Imports PyTorch and the recipe in the background, while this peer looks for its run and joins the network."""

from __future__ import annotations

import gc
import importlib
import logging
import threading
from contextlib import suppress

from manyhands.cli.leaving import skip_libraries_at_exit

logger = logging.getLogger(__name__)

TRAINING = "manyhands.recipes.albert.training"
"""The module to import in the background. It imports torch and transformers, which takes seconds."""

_loading: threading.Thread | None = None
_is_over = threading.Event()


def begin_loading() -> None:
    """Begin to import :data:`TRAINING`, once all that can be wrong without a network has been checked."""
    global _loading
    if _loading is None:
        _loading = threading.Thread(target=_load, name="loading PyTorch", daemon=True)
        _loading.start()
        skip_libraries_at_exit(_loading.is_alive)  # they would wait for the import, or abort the process in its midst


def finish_loading() -> None:
    """Wait until :data:`TRAINING` is imported; after that the import is free. A failed import raises here."""
    begin_loading()
    if not _is_over.is_set():
        logger.info("Loading PyTorch and transformers")
        _is_over.wait()
    importlib.import_module(TRAINING)


def _load() -> None:
    collects = gc.isenabled()
    gc.disable()  # in all threads: each collection would visit all that is imported so far, 0.6 of 4.7 s
    try:
        with suppress(Exception):  # it fails once more in the thread that needs it
            importlib.import_module(TRAINING)
    finally:
        if collects:
            gc.enable()
        _is_over.set()
