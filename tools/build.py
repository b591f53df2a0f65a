"""Entry of the build tools: `python3 tools/build.py TARGET [STAGE...]`, normally called by make."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - the one module that an older Python may meet
    sys.exit("kvik needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11 ...")

from kvikbuild.targets import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
