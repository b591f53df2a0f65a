"""The documentation as a site in `target/docs`: pages, Python reference, Rust reference."""

import shutil
from pathlib import Path

from kvikbuild.envs import locked, overlay_env
from kvikbuild.paths import ROOT, TARGET, cache_dir
from kvikbuild.rust import cargo_env, hold_cache, target_dir
from kvikbuild.stage import Context

SITE = TARGET / "docs"
# The crates that others build on; what the rest of them say is for readers of the code.
CRATES = ("kvik-core", "kvik-engine", "kvik-observe", "kvik-proto", "kvik-store")


def build_site(context: Context) -> Path:
    """Build everything; any warning is an error. Returns the folder with `index.html`."""
    python = overlay_env(context, "dev")
    # From nothing, which takes seconds: a page depends on others that it links to, and on the wheel.
    shutil.rmtree(SITE, ignore_errors=True)
    argv = [python, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-E", "-b", "html"]
    context.run([*argv, "-d", TARGET / "docs-cache", ROOT / "docs", SITE])
    _rust_reference(context, SITE / "rust")
    return SITE


def _rust_reference(context: Context, where: Path) -> None:
    hold_cache(context)
    made = target_dir(context) / "doc"
    packages = [word for crate in CRATES for word in ("-p", crate)]
    with locked(cache_dir() / "doc.lock"):
        # Cargo takes output for fresh that another checkout has written over; without any it writes its own.
        shutil.rmtree(made, ignore_errors=True)
        env = {**cargo_env(context), "RUSTDOCFLAGS": "-D warnings"}
        context.run(["cargo", "doc", "--locked", "--no-deps", *packages], env)
        shutil.rmtree(where, ignore_errors=True)
        shutil.copytree(made, where)
