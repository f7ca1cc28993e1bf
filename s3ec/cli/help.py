# SPDX-License-Identifier: Apache-2.0
"""What every ``--help`` ends with: examples, and the exit codes."""

from __future__ import annotations

from rich.markup import escape

EXIT_OK = 0
EXIT_WRONG = 1
EXIT_USAGE = 2

EXIT_CODES = (
    "Exit status: [bold]0[/bold] all is well, [bold]1[/bold] something is wrong (not found, "
    "unreachable, corrupt, a failed check), [bold]2[/bold] bad usage or bad settings."
)


def epilog(*examples: tuple[str, str]) -> str:
    """Examples and exit codes in the markup that typer prints below the options.

    Args:
        examples: Pairs of a command line and what it is for.
    """
    paragraphs = ["[bold]Examples[/bold]"]
    for command, purpose in examples:
        # One paragraph each: older typers join the lines inside a paragraph.
        paragraphs.append(f"[dim]# {escape(purpose)}[/dim]\n[cyan]{escape(command)}[/cyan]")
    return "\n\n".join([*paragraphs, f"[dim]{EXIT_CODES}[/dim]"])
