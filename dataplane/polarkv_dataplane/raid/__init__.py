"""A cache node's volumes as one striped file system: assembled, verified, mounted, and taken apart on the way out."""
