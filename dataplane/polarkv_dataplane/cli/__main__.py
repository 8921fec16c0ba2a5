"""`python -m polarkv_dataplane.cli COMMAND`: the same as `polarkv COMMAND`, from whatever Python runs it."""

from polarkv_client.cli.main import main

main()
