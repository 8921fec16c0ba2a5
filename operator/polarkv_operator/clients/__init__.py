"""What the operator talks to: the Kubernetes API server, and the managers' admin API. Every call has a time-out."""
