"""Helpers that write SVG: shapes, text, and the colours for light and dark mode.

All figures are WIDTH units wide and have no background. A page shows them as images, so the colours
follow the reader's system through a media query in the file. Text stays text, and the same input
gives the same bytes.
"""

import re
from collections.abc import Iterable
from html import escape

WIDTH = 720
LEFT, RIGHT = 20, 700  # drawings stay between these
SMALL, NORMAL, LARGE, HEADING = 16, 18, 20, 23  # font sizes; a phone shows them at half size
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"

# Okabe and Ito, https://jfly.uni-koeln.de/color/
FILLS = {
    "blue": "#0072b2",
    "green": "#009e73",
    "orange": "#e69f00",
    "red": "#d55e00",
}
# Class, property: colour in light mode, colour in dark mode.
COLOURS = {
    ("text", "fill"): ("#1f2328", "#f0f3f6"),
    (".soft", "fill"): ("#59636e", "#a9b4c0"),
    (".line", "stroke"): ("#1f2328", "#f0f3f6"),
    (".softline", "stroke"): ("#8c959f", "#6e7781"),
    (".edge", "stroke"): ("#1f2328", "#f0f3f6"),
}


def style() -> str:
    """Return the style sheet of all figures."""
    rules = [
        f"text{{font-family:{FONT}}}",
        ".bold{font-weight:700}",
        ".middle{text-anchor:middle}",
        ".end{text-anchor:end}",
        ".line,.softline{fill:none;stroke-width:2}",
        ".thin{stroke-width:1;stroke-opacity:.5}",
        ".dashed{stroke-dasharray:6 4}",
        *(f".{name}{{fill:{colour}}}" for name, colour in FILLS.items()),
    ]
    light, dark = (
        [f"{name}{{{key}:{pair[mode]}}}" for (name, key), pair in COLOURS.items()]
        for mode in (0, 1)
    )
    media = "@media (prefers-color-scheme:dark){" + "".join(dark) + "}"
    return "<style>" + "\n".join([*rules, *light, media]) + "</style>"


def document(title: str, height: float, elements: Iterable[str]) -> str:
    """Return the SVG file; the title is what a screen reader says."""
    open_tag = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="{WIDTH}" height="{height:g}" role="img">'
    )
    return "\n".join(
        [open_tag, f"<title>{escape(title)}</title>", style(), *elements, "</svg>", ""]
    )


def text(x: float, y: float, content: str, size: int = NORMAL, style: str = "") -> str:
    """Return a line of text whose baseline starts at (x, y).

    style: classes, for example "bold", "soft", "middle" (x is its middle) or "end".
    """
    classes = f' class="{style}"' if style else ""
    content = re.sub(r"(^| )x (?=\d)", "\\1\N{MULTIPLICATION SIGN} ", content)
    content = re.sub(r"(^| )-(?= ?\d)", "\\1\N{MINUS SIGN}", content)
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{classes}>{escape(content)}</text>'


def lines_of_text(
    x: float, y: float, lines: Iterable[str], size: int = NORMAL, style: str = ""
) -> list[str]:
    """Return lines of text below each other."""
    return [
        text(x, y + number * (size + 6), line, size, style) for number, line in enumerate(lines)
    ]


def rect(x: float, y: float, width: float, height: float, style: str) -> str:
    """Return a rectangle; style: classes, for example "blue edge"."""
    size = f'width="{width:.6g}" height="{height:.6g}"'
    return f'<rect x="{x:.6g}" y="{y:.6g}" {size} class="{style}"/>'


def line(x1: float, y1: float, x2: float, y2: float, style: str = "line") -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{style}"/>'


def path(points: str, style: str) -> str:
    return f'<path d="{points}" class="{style}"/>'


def area(xs: list[float], lower: list[float], upper: list[float], style: str) -> str:
    """Return a filled area between two curves of steps; xs has the left ends and the last right."""
    there = [f"H{x:.2f}V{y:.2f}" for x, y in zip(xs[:-1], upper, strict=True)]
    back = [f"V{y:.2f}H{x:.2f}" for x, y in zip(xs[:-1][::-1], lower[::-1], strict=True)]
    points = [f"M{xs[0]:.2f} {lower[0]:.2f}", *there, f"H{xs[-1]:.2f}", *back, "Z"]
    return path("".join(points), style)


def legend(x: float, y: float, entries: dict[str, str]) -> list[str]:
    """Return squares with labels in a row, or in several where a row is full.

    entries: label to fill.
    """
    out, start = [], x
    for label, fill in entries.items():
        width = 46 + 10.4 * len(label)
        if x + width > RIGHT + 20 and x > start:
            x, y = start, y + 28
        out += [rect(x, y - 14, 17, 17, f"{fill} edge"), text(x + 25, y, label)]
        x += width
    return out


def heading(says: str) -> list[str]:
    """Return what the figure says, in bold, at its top."""
    return [text(LEFT, 32, says, HEADING, "bold")]
