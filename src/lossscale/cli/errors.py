"""What ends a command with one line and an exit status."""


class CommandError(Exception):
    """The command cannot go on. Its text is shown after the name of the program."""

    exit_status = 1


class UsageError(CommandError):
    """An argument cannot be used."""

    exit_status = 2
