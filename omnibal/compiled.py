"""Functions compiled by numba, and kept on disk for as long as what they were compiled from stays as it is."""

import logging
import sys
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from numba import njit
from numba.core import event
from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher

Function = TypeVar("Function", bound=Callable[..., object])
LOG: Final = logging.getLogger(__name__)


class _Notice(event.Listener):  # type: ignore[misc]
    """Says why a run waits, once: compiling takes up to a minute, where code on disk is there at once."""

    said = False

    def on_start(self, event: Any) -> None:
        """Say so, if it is one of this package's functions and the first."""
        module = event.data["dispatcher"].py_func.__module__
        if not self.said and module.startswith("omnibal."):
            self.said = True
            LOG.warning(
                "compiling omnibal's loops for this machine: once, up to a minute"
                if not isinstance(event.data["dispatcher"]._cache, NullCache)
                else "compiling omnibal's loops, up to a minute in every process: neither the package's folder nor the "
                "home can be written; set NUMBA_CACHE_DIR to a folder of yours that keeps them"
            )

    def on_end(self, event: Any) -> None:
        """There is nothing to say."""


event.register("numba:compile", _Notice())  # type: ignore[no-untyped-call]


def compiled(function: Function) -> Function:
    """Compile a function when it is first called, without Python's global lock, once where its code can be kept.

    It may call compiled functions of its own folder only. numba's cache looks at the file of the function that Python
    calls, and goes on with old code after a change in another file that this one calls; here it looks at the folder.

    Args:
        function: Of arrays and numbers.
    """
    dispatcher = njit(nogil=True)(function)
    if isinstance(dispatcher, Dispatcher):  # not where NUMBA_DISABLE_JIT is set
        _keep(dispatcher, function)
    return cast(Function, dispatcher)


def _keep(dispatcher: Dispatcher, function: Callable[..., object]) -> None:
    """Let a function's code be kept on disk, if there is a folder that can be written."""
    try:
        dispatcher.enable_caching()
    except RuntimeError:  # numba found no such folder
        return
    file = sys.modules[function.__module__].__file__
    assert file is not None, "a module's functions stand in a file"
    # There is no public way to say what a function depends on.
    dispatcher._cache._cache_file._source_stamp = folder_hash(Path(file).parent)  # type: ignore[attr-defined]


@cache
def folder_hash(folder: Path) -> str:
    """Of the names and contents of a folder's Python files, in hexadecimal digits.

    Args:
        folder: Its subfolders do not count.
    """
    digest = sha256()
    for file in sorted(folder.glob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
