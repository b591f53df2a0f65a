"""The soft-RoCE laboratory: what takes an RDMA device runs in a small virtual machine that has two of them in
software.

- `guest`: boots the machine, runs jobs in it, ends it.
- `initramfs`: what the machine boots from; `init.sh`: what happens in it.
- `programs`: what of kvik can be run there: cargo's test programs and Python.
- `pair`: two processes of one job, a server and its client.
- `perftest`: reads what the tools of perftest print.

It shows that something works, and never how fast: the processor is emulated.
"""
