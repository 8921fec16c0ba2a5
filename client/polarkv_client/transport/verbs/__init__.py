"""RDMA verbs behind one small seam, and what is built on it: devices, registered memory, lanes, sessions."""
