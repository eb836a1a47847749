"""The guide as a website: `make site` builds it with Sphinx.

Its pages are the repository's own: Markdown, notebooks, scripts and diffs. Nothing lists them, so a
new page needs no line here. A page that no rule below puts into the table of contents, and a link
without a target, are warnings, which `make site` treats as errors.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for common
sys.path.insert(0, str(Path(__file__).parent))
import files
import scripts

project = "Distributed LLM training, one diff at a time"
html_title = "One diff at a time"
root_doc = "README"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "common/README.md",
    "tests/README.md",
    "[0-9][0-9]-*/**.md",
    "[0-9][0-9]-*/lab.ipynb",
    *scripts.PATTERNS,
]
exclude_patterns = [".*", "build", "outputs", "variants", "wandb", *scripts.EXCLUDED]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".py": "script", ".diff": "script"}
extensions = ["myst_nb", "sphinx_copybutton"]
nb_execution_mode = "off"
# Labs ask for a prediction first, so what their cells print and draw is folded.
nb_code_prompt_show = "Predict first, then show the result"
nb_code_prompt_hide = "Hide the result"
myst_heading_anchors = 6  # the names that GitHub gives to headings
copybutton_selector = "div.highlight > pre"  # not each line of scripts side by side
copybutton_exclude = ".number, .old, .explained"
html_theme = "furo"
html_static_path = ["static"]
html_extra_path = ["root"]  # index.html, for GitHub Pages
html_css_files, html_js_files = ["style.css"], ["search.js"]
html_favicon = "static/icon.svg"
html_show_copyright = html_show_sphinx = html_copy_source = html_use_index = False
# Readable on the colours of new and removed lines, too.
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "github-dark"


def short_title(page: Path) -> str:
    """Return what the sidebar calls a page: its heading, up to a colon if it is long."""
    if page.suffix == ".diff":
        return f"{'Variant' if scripts.variant_of(page) else 'Diff'}: {page.stem}"
    heading = re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)[1]
    if chapter := re.match(r"Chapter (\d+): ([^,]+)", heading):
        return " ".join(chapter.groups())
    return heading if len(heading) <= 30 else heading.split(":")[0]


def add_toctree(app, docname: str, source: list[str]) -> None:
    """The front page has the chapters below it, and a lesson has the chapter's other pages."""

    def entries(pattern: str) -> list[str]:
        names = [name for name in sorted(app.env.found_docs) if re.fullmatch(pattern, name)]
        return [f"{short_title(Path(app.env.doc2path(name)))} </{name}>" for name in names]

    if docname == root_doc:
        below = entries(r"\d\d-[^/]+/README")
        below += ["The module common </common/README>", "Contributing </CONTRIBUTING>"]
        below += ["Tests </tests/README>", "Changes </CHANGELOG>"]
    elif lesson := re.fullmatch(r"(\d\d-[^/]+)/README", docname):
        chapter = lesson[1]
        below = [f"Script </{chapter}/train_llm>", f"Lab </{chapter}/lab>"]
        below += [f"Reference </{chapter}/reference>", f"Measurements </{chapter}/measurements>"]
        below += entries(f"{chapter}/topics/.+")
        below += entries(f"{chapter}/(diffs|faults)/.+")
        below += [f"Solutions </{chapter}/solutions/README>"]
    else:
        return
    source[0] += "\n".join(["", "", "```{toctree}", ":hidden:", *below, "```", ""])


def setup(app) -> None:
    app.connect("source-read", add_toctree)
    files.setup(app)
    scripts.setup(app)
