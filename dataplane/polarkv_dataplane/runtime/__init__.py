"""What the data plane's processes share: settings, secrets, logging, signals, counters, and the link to the manager."""
