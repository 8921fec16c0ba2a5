"""What the data plane adds to `polarkv`: up, down, and the servers that pods run."""
