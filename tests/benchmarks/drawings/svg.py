"""Drawings in SVG: shapes, text, and the colours for light and dark mode.

All figures are WIDTH units wide and have no background. A page shows them as images, so the colours
follow the reader's system through a media query in the file. Text stays text, and the same input
gives the same bytes.
"""

import re
from html import escape

WIDTH = 720
LEFT, RIGHT = 20, 700  # drawings stay between these
SMALL, NORMAL, LARGE, HEADING = 16, 18, 20, 23  # font sizes; a phone shows them at half size
# The fills are of Okabe and Ito, https://jfly.uni-koeln.de/color/
STYLE = """<style>text{\
font-family:system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif}
.bold{font-weight:700}
.middle{text-anchor:middle}
.end{text-anchor:end}
.line,.softline{fill:none;stroke-width:2}
.thin{stroke-width:1;stroke-opacity:.5}
.dashed{stroke-dasharray:6 4}
.blue{fill:#0072b2}
.green{fill:#009e73}
.orange{fill:#e69f00}
.red{fill:#d55e00}
text{fill:#1f2328}
.soft{fill:#59636e}
.line{stroke:#1f2328}
.softline{stroke:#8c959f}
.edge{stroke:#1f2328}
@media (prefers-color-scheme:dark){text{fill:#f0f3f6}.soft{fill:#a9b4c0}\
.line{stroke:#f0f3f6}.softline{stroke:#6e7781}.edge{stroke:#f0f3f6}}</style>"""


class Drawing:
    """A figure that grows by one shape or text after the other.

    style: classes of STYLE, for example "green edge" or "soft middle". A text starts at x; in the
    style "middle", its middle is there, and in "end" its end.
    """

    def __init__(self, heading: str = "") -> None:
        self.elements: list[str] = []
        if heading:
            self.text(LEFT, 32, heading, HEADING, "bold")

    def document(self, title: str, height: float) -> str:
        """Return the SVG file; the title is what a screen reader says."""
        open_tag = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{WIDTH}" height="{height:g}" role="img">'
        )
        title = f"<title>{escape(title)}</title>"
        return "\n".join([open_tag, title, STYLE, *self.elements, "</svg>", ""])

    def text(self, x: float, y: float, content: str, size: int = NORMAL, style: str = "") -> None:
        """Add a line of text whose baseline is at y."""
        classes = f' class="{style}"' if style else ""
        content = escape(re.sub(r"(^| )x (?=\d)", "\\1\N{MULTIPLICATION SIGN} ", content))
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}"{classes}>{content}</text>'
        )

    def note(self, y: float, *lines: str) -> None:
        """Add what was measured, in small lines."""
        for number, line in enumerate(lines):
            self.text(LEFT, y + number * (SMALL + 6), line, SMALL, "soft")

    def legend(self, entries: dict[str, str]) -> None:
        """Add squares with labels in a row below the heading; entries: label to fill."""
        x = LEFT
        for label, fill in entries.items():
            self.rect(x, 54, 17, 17, f"{fill} edge")
            self.text(x + 25, 68, label)
            x += 46 + 10.4 * len(label)

    def rect(self, x: float, y: float, width: float, height: float, style: str) -> None:
        size = f'width="{width:.6g}" height="{height:.6g}"'
        self.elements.append(f'<rect x="{x:.6g}" y="{y:.6g}" {size} class="{style}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str = "line") -> None:
        ends = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
        self.elements.append(f'<line {ends} class="{style}"/>')

    def path(self, points: str, style: str) -> None:
        self.elements.append(f'<path d="{points}" class="{style}"/>')

    def area(self, xs: list[float], lower: list[float], upper: list[float], style: str) -> None:
        """Add the area between two curves of steps; xs has the left ends, and the last right."""
        there = [f"H{x:.2f}V{y:.2f}" for x, y in zip(xs[:-1], upper, strict=True)]
        back = [f"V{y:.2f}H{x:.2f}" for x, y in zip(xs[:-1][::-1], lower[::-1], strict=True)]
        points = [f"M{xs[0]:.2f} {lower[0]:.2f}", *there, f"H{xs[-1]:.2f}", *back, "Z"]
        self.path("".join(points), style)
