"""Functions compiled by numba, and kept on disk for as long as what they were compiled from stays as it is."""

import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba
from numba import njit, types
from numba.core import config, event
from numba.core.caching import NullCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler
from numba.core.dispatcher import Dispatcher

Function = TypeVar("Function", bound=Callable[..., object])
LOG: Final = logging.getLogger(__name__)
# Nothing is compiled that is not needed: checks for divisors of 0, and a second entrance for C. A division by zero does
# not raise: integers give 0, floating-point numbers infinity or nan.
OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}


# `_PartLibrary` overrides what this version does inside; with another one parts take some seconds longer to compile.
KNOWN_NUMBA: Final = "0.68."


class _Compiling(event.Listener):  # type: ignore[misc]
    """Says why a run waits, once: compiling takes some seconds, where code on disk is there at once."""

    said = False
    depth = 0  # functions that are being compiled, each for the one before
    collects = False  # whether garbage was collected before

    def on_start(self, event: Any) -> None:
        # A compilation makes millions of objects that live on: looking for garbage among them took a sixth of the time.
        if not self.depth:
            self.collects = gc.isenabled()
            gc.disable()
        self.depth += 1
        module = event.data["dispatcher"].py_func.__module__
        if not self.said and module.startswith("omnibal."):
            self.said = True
            LOG.warning(
                "compiling omnibal's loops for this machine: once, some seconds"
                if not isinstance(event.data["dispatcher"]._cache, NullCache)
                else f"compiling omnibal's loops, some seconds in every process: {_cache_folder()[1]}; set "
                "NUMBA_CACHE_DIR to a folder that you own and that keeps them"
            )

    def on_end(self, event: Any) -> None:
        self.depth -= 1
        if not self.depth and self.collects:
            gc.enable()


event.register("numba:compile", _Compiling())  # type: ignore[no-untyped-call]


def compiled(function: Function) -> Function:
    """Compile a function of arrays and numbers when it is first called; it may call compiled ones of its folder."""
    # numba's cache looks at the file of the function that Python calls, and goes on with old code after a change in
    # another file that this one calls; `_keep` lets it look at the whole folder.
    dispatcher = _dispatcher(function)
    if isinstance(dispatcher, Dispatcher):
        _keep(dispatcher, function)
    return cast(Function, dispatcher)


def compiled_part(function: Function) -> Function:
    """Compile a function that only compiled ones call, and that makes no array: without an entrance for Python."""
    # Arguments that are many or nested take long to unpack from Python's objects, and to compile the code that does.
    # Nor does it count who refers to its arrays (``_nrt``): its callers hold them, and counters are atomic, which is
    # slow where a call of many arrays does little.
    own = {"pipeline_class": _PartCompiler} if numba.__version__.startswith(KNOWN_NUMBA) else {}
    return cast(Function, _dispatcher(function, no_cpython_wrapper=True, _nrt=False, **own))


class _PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """The code of a part, which is linked into its callers and optimized and translated there.

    numba would do that for the part alone, too: code that stands under four callers, one in another, four times more.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        return 0  # as numba answers for what has no entrance for Python

    @property
    def codegen(self) -> Any:  # numba asks it for `set_env` only
        return self

    def set_env(self, name: str, env: Any) -> None:
        """Objects for exceptions, which parts do not raise; code from the cache has none of its parts, either."""


class _PartCompiler(Compiler):  # type: ignore[misc]
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)  # type: ignore[no-untyped-call]
        self.state.library = _PartLibrary(self.state.targetctx.codegen(), "part")  # type: ignore[no-untyped-call]


def _dispatcher(function: Function, **options: Any) -> Dispatcher | Function:
    """Numba's function; the plain one where NUMBA_DISABLE_JIT is set."""
    dispatcher = njit(**OPTIONS | options)(function)
    if not isinstance(dispatcher, Dispatcher):
        return function
    resolve, plain = dispatcher.get_call_template, cast(Any, types.unliteral)

    # A call with a constant uses the code for any integer: numba would compile the function for each constant.
    def resolve_without_constants(args: Sequence[Any], kws: Any) -> Any:
        return resolve([plain(arg) for arg in args], {name: plain(arg) for name, arg in dict(kws).items()})

    dispatcher.get_call_template = resolve_without_constants  # type: ignore[assignment]
    return dispatcher


def _keep(dispatcher: Dispatcher, function: Callable[..., object]) -> None:
    """Let a function's code be kept on disk, if there is a folder that nobody else can write."""
    folder, _ = _cache_folder()
    if folder is None:
        return
    # numba decides here where this function's code is kept; other packages' functions go where they went.
    settings: Any = config
    others, settings.CACHE_DIR = settings.CACHE_DIR, str(folder)
    try:
        dispatcher.enable_caching()
    except RuntimeError:  # numba cannot write to the folder
        return
    finally:
        settings.CACHE_DIR = others
    file = sys.modules[function.__module__].__file__
    assert file is not None, "a module's functions stand in a file"
    # There is no public way to say what a function depends on. numba reads its version before all else in a file of the
    # cache, and does not unpickle a file of another version, which may name classes that are gone.
    cache_file = dispatcher._cache._cache_file  # type: ignore[attr-defined]
    cache_file._version = f"{cache_file._version} {folder_hash(Path(file).parent)}"


@cache
def _cache_folder() -> tuple[Path | None, str]:
    """A folder of the user's own, into which nobody else can put code that this process would run; or why not."""
    # numba would take the package's folder first, which others may be able to write.
    named = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.path.expanduser(named), "omnibal")  # noqa: PTH111  # leaves "~" where there is no home
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owners, mode = {folder.stat().st_uid, folder.lstat().st_uid}, folder.stat().st_mode & 0o777
    except OSError as error:
        return None, f"no folder can be made for them ({error})"
    if owners != {os.geteuid()}:
        return None, f"{folder} belongs to another user"
    if mode & 0o077:
        return None, f"others can enter {folder} (mode {mode:o}; `chmod 700` makes it yours alone)"
    return folder, ""


@cache
def folder_hash(folder: Path) -> str:
    """The hash of names and contents of the Python files that lie in a folder itself."""
    digest = sha256()
    for file in sorted(folder.glob("*.py")):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
