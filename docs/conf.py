"""How the site is made: `make docs` builds it into target/docs. Warnings are errors there.

The pages are plain Markdown that reads as well in a repository browser. What the site needs beyond that is in
`_ext`, and the reference is made from the installed wheel: what is documented is what runs.
"""

import sys
from pathlib import Path

from sphinx.application import Sphinx

import kvik

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "kvik"
author = "the kvik project"
project_copyright = "Apache-2.0"
version = release = kvik.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "native_reference", "command_reference"]
exclude_patterns = ["_ext", "_static"]
nitpicky = True
# Names of Python's own library and of NumPy in signatures: their documentation is elsewhere.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(typing|os|logging|collections\.abc|numpy|npt|asyncio|types|click)\..*"
        r"|Self|SupportsIndex|Iterable|Sequence|Buffer|Literal|Any|Protocol|TracebackType"
        r"|BaseException|_Tensor|_SupportsArray|_native\.Ids|kvik\._.*|kvik\.shapes\.(model|presets|source)\..*",
    )
]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]

smartquotes = False
autodoc_typehints = "signature"
maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"kvik {release}"
html_static_path = ["_static"]
html_css_files = ["kvik.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False

# Pages that lie elsewhere in the repository, and what stands for them in the site.
ELSEWHERE = {"../README.md": "index.md", "../bench/README.md": "bench.md"}
ELSEWHERE |= {f"../bench/{page}.md": f"bench-{page}.md" for page in ("store", "vllm")}


def redirect(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Let links to files beside `docs` lead to their pages in the site."""
    for there, here in ELSEWHERE.items():
        source[0] = source[0].replace(f"]({there}", f"]({here}")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", redirect)
