"""A link to a file that is no page, such as a launch file, leads to a page that shows the file."""

import html
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.environment.adapters.toctree import TocTree
from sphinx.transforms import SphinxTransform

DOWNLOADED = (".svg", ".png", ".xz")
PLAIN = (".txt", ".json", ".jsonl", ".csv")  # large, and colours would show nothing
LEXERS = {".sbatch": "job.sh"}


@cache  # many pages show the same script
def highlighted(text: str, name: str) -> list[str]:
    """Return the lines of a file as HTML, in the colours of the language that its name tells."""
    try:
        lexer = get_lexer_for_filename(LEXERS.get(Path(name).suffix, name), stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    return highlight(text, lexer, HtmlFormatter(nowrap=True)).splitlines()


class ShowFiles(SphinxTransform):
    """Let links to files lead to the pages that show_files makes."""

    default_priority = 800  # before Sphinx collects what it finds in the page

    def apply(self) -> None:
        linked = self.env.metadata[self.env.docname].setdefault("linked_files", [])
        for link in list(self.document.findall(addnodes.download_reference)):
            self.show(link, self.env.relfn2path(link["reftarget"], self.env.docname)[0], linked)
        for link in list(self.document.findall(addnodes.pending_xref)):
            target = link["reftarget"]
            if link["refdomain"] == "doc" and target not in self.env.found_docs:
                # A file whose suffix could be that of a page, for example a script's.
                names = [f"{target}{suffix}" for suffix in self.config.source_suffix]
                for name in [each for each in names if Path(self.app.srcdir, each).is_file()][:1]:
                    self.show(link, name, linked)

    def show(self, link: nodes.Element, name: str, linked: list[str]) -> None:
        if Path(name).suffix not in DOWNLOADED:
            linked.append(name)
            uri = self.app.builder.get_relative_uri(self.env.docname, name)
            link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))


def sidebars(app) -> Callable[[str], dict]:
    """Return a function from a page's name to the context with its sidebar.

    The sidebar is the same for all pages of a folder that are not in it.
    """
    options = {"collapse": False, "titles_only": True, "maxdepth": -1, "includehidden": True}

    @cache
    def sidebar(folder: Path) -> str:
        tree = TocTree(app.env).get_toctree_for(str(folder / "-"), app.builder, **options)
        return app.builder.render_partial(tree)["fragment"]

    return lambda name: {"toctree": lambda **_: sidebar(Path(name).parent)}


def show_files(app) -> Iterator[tuple[str, dict, str]]:
    """Make a page for each file that a page links to."""
    sidebar = sidebars(app)
    names = (metadata.get("linked_files", []) for metadata in app.env.metadata.values())
    for name in sorted(set().union(*names)):
        text = Path(app.srcdir, name).read_text()
        if Path(name).suffix in PLAIN:
            rows = f'<span class="plain">{html.escape(text)}</span>'
        else:
            rows = "".join(
                f'<span class="row" id="L{number}"><a class="number" href="#L{number}">{number}</a>'
                f"{line}\n</span>"
                for number, line in enumerate(highlighted(text, name), start=1)
            )
        body = f'<h1>{name}</h1><div class="highlight script"><pre>{rows}</pre></div>'
        yield name, {"title": name, "body": body, **sidebar(name)}, "page.html"


def setup(app) -> None:
    app.add_transform(ShowFiles)
    app.connect("html-collect-pages", show_files)
