"""Runs a study: its plan, start by start and run by run, into a journal that a killed controller takes up
again.

- `spec`: the study file's `run`: which programs are started, with which flags, on which nodes, and the
  load.
- `resolve`: the same for one row of the plan, with its levels put in.
- `slots`: the runs of a plan in their order, each with an id that is the same after every interruption.
- `drivers`: what turns a resolved run into roles: the emulator's, vLLM's.
- `nodes`: where roles run: this host, namespaces of it with a shaped link, or other hosts.
- `remote`: what other hosts have in common, whatever carries a command there: `ssh`, `slurm` and `rays` do.
- `journal`: the records of runs, and the starts of servers.
- `control`: does all of it; `progress` says how long it still takes.
"""
