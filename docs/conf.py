"""Configuration of the documentation site: ``make docs``."""

import os
import re
import subprocess
from pathlib import Path

from sphinx.application import Sphinx

import pyg_accel

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "pyg_accel"
author = "pyg_accel contributors"
copyright = author
version = release = pyg_accel.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
# README.md of this folder is the index that is read on GitHub; the site has index.md.
exclude_patterns = ["README.md", "_build"]
nitpicky = False

# The address that this checkout was cloned from, as a browser opens it.
asked = ["git", "-C", str(ROOT), "config", "remote.origin.url"]
cloned = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
repository = re.sub(r"^git@([^:]+):", r"https://\1/", cloned).removesuffix(".git")

myst_enable_extensions = ["colon_fence", "deflist", "substitution"]
myst_substitutions = {
    "repository": f"The code is in its [repository]({repository})."
    if repository.startswith("https://")
    else "The code is in the repository that this site was built from."
}
myst_heading_anchors = 3  # headings can be linked as on GitHub

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_maximum_signature_line_length = 88  # longer signatures: one parameter a line

highlight_language = "text"  # of blocks that name none: what programs print
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = f"pyg_accel {release}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["site.css"]
html_js_files = ["zoom.js"]
html_theme_options = {"navigation_with_keys": True}
if repository.startswith("https://"):
    html_theme_options |= {
        "source_repository": repository,
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_copy_source = False
# What a shell prints before its commands is not copied with them.
copybutton_prompt_text = r">>> |\$ "
copybutton_prompt_is_regexp = True

# Files outside of docs/ that are pages of the site. Other files of the repository that a page links
# to are copied into the site and downloaded.
PAGES = {
    "README.md": "index",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
    "benchmarks/README.md": "benchmarks",
    "examples": "examples",
    "benchmarks/results": "benchmarks",
    "benchmarks/results/cost_measurements": "benchmarks",
}
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")


def links(app: Sphinx, page: str, text: list[str]) -> None:
    """Turn links that work in the repository into links that work on the site."""
    included = {name: path for path, name in PAGES.items() if path.endswith(".md")}
    # A page that only includes a file of the repository has the links of that file.
    here = DOCS / page
    if page in included and page != "index":
        here = ROOT / included[page]
        title = "" if here.read_text().startswith("# ") else text[0].partition("\n")[0] + "\n\n"
        text[0] = title + here.read_text()

    def turned(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(here.parent / match[1]))
        inside = target.is_relative_to(DOCS)
        if inside and target != DOCS / "README.md":
            path = target
        elif str(target.relative_to(ROOT)) in PAGES:
            path = DOCS / f"{PAGES[str(target.relative_to(ROOT))]}.md"
        elif target == DOCS / "README.md":
            path = DOCS / "index.md"
        else:
            path = target
        return os.path.relpath(path, (DOCS / page).parent) + (match[2] or "")

    text[0] = LINK.sub(turned, text[0])


def setup(app: Sphinx) -> None:
    """Register the handler of links."""
    app.connect("source-read", links)
