"""Loads of a model's file: from NFS over TCP or RDMA, from a disk, from memory.

- `spec`: what is loaded, how often and how.
- `loader`: does it, on any machine with Python; its text is sent there.
- `measure`: the command of it, and from what it printed to the parts of a run's record.

The driver `storage` (`kvik_lab.run.drivers.storage`) runs them in a study; `kvik_lab.gates.files` holds each
run to what the study says. The time of a load is measured apart from everything that a model does later.
"""
