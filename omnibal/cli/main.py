"""The ``omnibal`` command."""

from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.main import get_command

from omnibal.errors import ConfigError, OmnibalError, explain_import, require

# The module of each verb, which is a function there, with underscores for hyphens.
VERBS: Final = {
    "advise": "advise", "lengths": "lengths", "check-packing": "models", "plan": "plan", "ask": "models",
    "export": "models", "report": "plan", "demo": "models", "profile": "models",
}  # fmt: skip
# Verbs of earlier versions, and what to type today.
MOVED: Final = {
    "emulate": "python -m tools.emulator, in omnibal's repository",
    "pack": "omnibal lengths, which takes a ds_config or a folder of lengths, too",
    "partition": "omnibal plan CONFIG --explain",
    "simulate": "omnibal plan CONFIG --explain, or omnibal plan PLAN.json for a plan that is there",
}


class _LazyGroup(TyperGroup):
    """Imports a verb's module when that verb runs: numba and scipy take half a second.

    omnibal's own errors, and those of files, become one line: they say what to do; a traceback would hide it.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys(VERBS)  # type: ignore[assignment]  # suggestions look at the names alone

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in MOVED:
            raise ConfigError(f"{cmd_name} is no command any more; use {MOVED[cmd_name]}")
        if cmd_name not in self.commands:
            return None
        verb = typer.Typer(add_completion=False, rich_markup_mode=self.rich_markup_mode)
        function = getattr(import_module(f"omnibal.cli.{VERBS[cmd_name]}"), cmd_name.replace("-", "_"))
        verb.command(cmd_name)(function)
        return get_command(verb)

    def invoke(self, ctx: Any) -> Any:
        try:
            if any(argument.partition("=")[0] == "--plot" for argument in ctx.args):
                require("matplotlib")  # not after all has been computed
            return super().invoke(ctx)
        except OmnibalError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from None
        except ModuleNotFoundError as error:
            explained = explain_import(error)
            if explained is None:
                raise
            typer.echo(f"error: {explained}", err=True)
            raise typer.Exit(2) from None
        except MemoryError as error:
            typer.echo(f"error: numbers must be such that memory holds what they ask for, got: {error}", err=True)
            raise typer.Exit(2) from None
        except OSError as error:
            if error.filename is None:
                raise
            typer.echo(f"error: {error.filename} must be a path to read or write, got: {error.strerror}", err=True)
            raise typer.Exit(2) from None


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"omnibal {version('omnibal')}")
        raise typer.Exit


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",  # which joins the lines of a paragraph
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def omnibal(
    _version: Annotated[
        bool, typer.Option("--version", help="Say which version is installed.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Balanced training of vision-language models on DeepSpeed: data, pipeline and memory."""
