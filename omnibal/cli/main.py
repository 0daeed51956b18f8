"""The ``omnibal`` command."""

from typing import Any

import typer
from typer.core import TyperGroup

from omnibal.cli.advise import advise
from omnibal.cli.ask import ask
from omnibal.cli.demo import demo
from omnibal.cli.emulate import emulate
from omnibal.cli.export import export
from omnibal.cli.lengths import lengths
from omnibal.cli.pack import pack
from omnibal.cli.partition import partition
from omnibal.cli.plan import plan
from omnibal.cli.profile import profile
from omnibal.cli.report import report
from omnibal.cli.simulate import simulate
from omnibal.errors import OmnibalError, explain_import, require


class _FriendlyGroup(TyperGroup):
    """Turns omnibal's own errors, and those of files, into one line: they say what to do; a traceback would hide it."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
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


app = typer.Typer(
    cls=_FriendlyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Balanced training of vision-language models on DeepSpeed: data, pipeline and memory.",
)
for command in (advise, demo, lengths, pack, profile, partition, plan, simulate, emulate, report, ask, export):
    app.command()(command)
