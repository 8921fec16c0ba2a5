"""Disk server: moves chunks between a cache node's memory and files on the same VM's disks."""
