"""The command line: ``anygauge COMMAND``.

Each command is a function of its name that typer turns into options. The list of commands is
static, so that ``anygauge --help`` and a misspelt command need no import but this one.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from anygauge.util.errors import AnygaugeError, UsageError
from anygauge.util.text import did_you_mean, escape, wrap_for_stream

COMMANDS = {
    "train": "Fine-tune a model as described in a run file.",
    "init": "Write a run file that fits a machine, from a few answers.",
    "fields": "Show the fields of a run file: meaning, type and default.",
    "schema": "Write the JSON schema of run files, for editors.",
    "launch": "Start a run on other machines, or write what a launcher would do.",
    "plan": "Show how much memory and time a run needs, without its devices.",
    "job": "Follow, show or end a job on other machines.",
    "import": "Turn another tool's configuration into a run file.",
    "data": "Show what a run trains on: counts, lengths, padding, loss tokens.",
    "report": "Write one page about runs: what ran, losses, speed, memory, time.",
    "generate": "Let a model answer, with or without an adapter.",
    "evaluate": "Show the loss and perplexity of a model on rows.",
    "merge": "Fold an adapter into its base model.",
    "push": "Upload the result of a run to the hub.",
    "env": "Show the environment that a run would get, and why.",
    "doctor": "Check whether a machine is ready for a backend, and what to fix.",
    "image": "Show a backend's container image and how to run it, or run it.",
    "launchers": "List launchers: where each starts ranks, and how it was tested.",
    "backends": "List backends, what each found here, and what auto would choose.",
    "strategies": "List strategies: what each needs, and if a backend can run it.",
    "kernels": "List kernels, which of them a run here would use, and why.",
}
_HOMES = {
    **dict.fromkeys(("launchers", "backends", "strategies", "kernels"), "listings"),
    "generate": "answers",
    "merge": "trained",
    "launch": "train",
    "schema": "fields",
    "job": "job_command",
    "import": "import_command",
}
"""Command -> its file, where that has another name."""
COMPLETION = {
    "--install-completion": "Complete commands, options and fields in this shell.",
    "--show-completion": "Show what that option installs.",
}


def main() -> NoReturn:
    """Entry point: an error meant for the user is one message, without a traceback."""
    streams: Any = sys
    streams.stdout, streams.stderr = EscapedStream(sys.stdout), EscapedStream(sys.stderr)
    message = ""
    try:
        status = run(sys.argv[1:], own_process=True)
        sys.stdout.flush()
    except BrokenPipeError as error:
        # The reader went away (`anygauge backends | head`): nobody reads a message, at exit either.
        if not _stdout_is_unread():
            message = f"error: a helper process ended while anygauge wrote to it ({error})"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except AnygaugeError as error:
        message, status = f"error: {error}", error.exit_status
    except OSError as error:
        check = "Check that the path is right and can be written, and that the disk is not full"
        message, status = f"error: {error}. {check}", 1
    except KeyboardInterrupt:
        message, status = "interrupted", 130
    if message:
        print(wrap_for_stream(message, sys.stderr), file=sys.stderr)
    sys.exit(status)


class EscapedStream:
    """A stream that control characters do not pass, whoever prints: see `escape`.

    rich writes to the stream itself: see `anygauge.util.console`.
    """

    def __init__(self, stream: Any) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        """See `io.TextIOBase.write`."""
        self.rich_proxied_file.write(escape(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def _stdout_is_unread() -> bool:
    """Whether standard output is a pipe that nobody reads any more."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def run(arguments: list[str], *, own_process: bool = False) -> int:
    """Run one command line; returns the exit status.

    Args:
        own_process: nothing follows in this process: a command may put another in its place.

    Raises:
        AnygaugeError: what `main` prints.
    """
    if "_ANYGAUGE_COMPLETE" in os.environ or arguments[:1] in ([name] for name in COMPLETION):
        from anygauge.cli.completion import complete

        complete(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(help_text())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        from importlib.metadata import version

        print(f"anygauge {version('anygauge')}")
        return 0
    if name not in COMMANDS:
        near = did_you_mean(name, COMMANDS, 0.6) or ";"
        raise UsageError(f"there is no command {name!r}{near} commands: {', '.join(COMMANDS)}")
    with interrupts_end_process():
        command = typer_command(name)
    try:
        command.main(args=rest, prog_name=f"anygauge {name}", obj=own_process)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0


def typer_command(name: str) -> Any:
    """A command of this name, as typer has it."""
    import typer
    import typer.main

    from anygauge.cli.shared_options import UsageCommand

    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.command(name, cls=UsageCommand)(command_function(name))
    return typer.main.get_command(app)


def command_function(name: str) -> Callable[..., None]:
    """The function of a command, with its options as parameters."""
    module = importlib.import_module(f"anygauge.cli.{_HOMES.get(name, name)}")
    function: Callable[..., None] = getattr(module, "import_" if name == "import" else name)
    return function


@contextlib.contextmanager
def interrupts_end_process() -> Iterator[None]:
    """Have Ctrl-C end this process at once: it only imports, or computes a plan.

    An interrupt may meet a callback of an import or of torch, where Python prints it and drops it.
    """
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler:
        yield
        return

    def end(*_: object) -> None:
        # On a terminal, what shows progress has hidden the cursor in a line of its own.
        begins = b"\r\x1b[K\x1b[?25h" if os.isatty(2) else b""
        os.write(2, begins + b"interrupted\n")
        os._exit(130)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def help_text() -> str:
    """What ``anygauge --help`` prints."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
    options = "\n".join(f"  {name:<20}  {line}" for name, line in COMPLETION.items())
    return f"""Usage: anygauge COMMAND [OPTIONS]

One LLM fine-tuning loop, any accelerator.

Commands:
{commands}

Options:
  -h, --help            Show this, or of a command: anygauge COMMAND --help
  --version             Show the version.
{options}"""
