"""`python -m polarkv_dataplane.cli COMMAND`: the same as `polarkv COMMAND`, from whatever Python runs it."""

from polarkv_dataplane.cli.lifetime import die_with_supervisor

# Before the other imports, which take a while.
die_with_supervisor()

from polarkv_client.cli.main import main  # noqa: E402

main()
