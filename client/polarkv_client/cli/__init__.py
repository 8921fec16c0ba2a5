"""The `polarkv` command.

A package adds a subcommand with a line in the entry-point group ``polarkv.commands``: the line's name is the
subcommand's, its value ``module:attribute`` leads to a ``click.Command``. The module is imported when the subcommand
(or ``--help``) is asked for; when an import in it fails because an extra is not installed, the subcommand says what to
install.

Exit codes: 0 done; 1 it failed, or what was looked at is not well; 2 wrong usage or configuration; 3 the cache cannot
be reached; 130 interrupted.
"""
