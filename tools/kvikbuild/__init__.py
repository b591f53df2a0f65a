"""The build: sets up what is needed, builds, checks and tests kvik, and says what it did and how long it
took.

Only the standard library is used here: these modules run before anything is installed. (`kvikhouse`, beside
this package, is not among them.)

- `paths`: where things lie.
- `stage`: a named step with a log file; the runner that times the steps and prints the summary.
- `debian`: packages of the operating system.
- `envs`: Python environments, shared between checkouts and keyed by their lock files.
- `rust`: cargo, and the cache of its output.
- `wheel`: the one wheel, built only when its inputs changed.
- `cluster`: helm and kubectl, for tests.
- `fabric`: a newer libfabric than the system's, for tests.
- `rdma`: what the virtual machine with soft-RoCE devices takes.
- `targets`: which stages make up `demo`, `test`, `wheel`, `lint`.
"""
