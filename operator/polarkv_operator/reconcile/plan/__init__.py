"""What is to be done, decided without doing it: facts in, steps out. Nothing here knows a client or a clock."""
