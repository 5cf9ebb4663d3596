"""The table as a picture: SVG with horizontal bars, on a panel of its own that follows light and dark."""

from collections.abc import Sequence
from html import escape

from benchmarks.compare.report import Line, Report, format_value

WIDTH = 860
LEFT = 250
BAR_WIDTH = 400
BAR_HEIGHT = 16
PADDING = 20
CAPTION_WRAP = 118
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.title { font-weight: 600 } .small { font-size: 11px; fill: #59636e } .panel { fill: #ffffff; stroke: #d1d9e0 }
.s0 { fill: #b5461b } .s1 { fill: #8c959f } .s2 { fill: #6e9fc9 } .s3 { fill: #a58fc4 } .s4 { fill: #7fae7a }
.floor { stroke: #1f2328; stroke-width: 2; stroke-dasharray: 2 2 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .panel { fill: #151b23; stroke: #3d444d }
.s0 { fill: #f0814f } .s1 { fill: #6e7681 } .s2 { fill: #4f83b0 } .s3 { fill: #84709f } .s4 { fill: #5c8c57 }
.floor { stroke: #e6edf3 }
}
"""


def draw(report: Report) -> str:
    """Return the report as SVG."""
    parts: list[str] = []
    y = PADDING + 12
    x = PADDING
    for index, name in enumerate(report.servers):
        parts.append(f'<rect class="s{index % 5}" x="{x}" y="{y - 11}" width="13" height="13" rx="2"/>')
        parts.append(_text(x + 19, y, name, "title"))
        x += 45 + 8 * len(name)
    if any(line.floor is not None for line in report.lines):
        parts.append(f'<line class="floor" x1="{x + 6}" x2="{x + 6}" y1="{y - 12}" y2="{y + 3}"/>')
        parts.append(_text(x + 15, y, "what reading weights, as stored, and cache takes", "small"))
    y += 16
    for line in report.lines:
        drawn, y = _draw_line(line, report.servers, y)
        parts += drawn
    y += 14
    for sentence in report.caption():
        for piece in _wrap(sentence, CAPTION_WRAP):
            parts.append(_text(PADDING, y, piece, "small"))
            y += 15
    height = y + PADDING - 10
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    )
    panel = f'<rect class="panel" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6"/>'
    title = f"<title>{escape(' beside '.join(report.servers))}</title>"
    return "\n".join([f'{opening} role="img">', title, f"<style>{STYLE}</style>", panel, *parts, "</svg>", ""])


def _draw_line(line: Line, servers: Sequence[str], y: int) -> tuple[list[str], int]:
    """Draw one row, whose longest bar fills the width. Returns its elements, and where the next row begins."""
    shown = [(index, name) for index, name in enumerate(servers) if name in line.medians]
    longest = max([*line.medians.values(), line.floor or 0])
    height = len(shown) * (BAR_HEIGHT + 3)
    better = "more is better" if line.row.is_higher_better else "less is better"
    middle = y + height // 2
    parts = [_text(PADDING, middle - 2, line.row.title, ""), _text(PADDING, middle + 12, better, "small")]
    at = y
    for index, name in shown:
        value, ratio = line.medians[name], line.ratio(name)
        width = max(round(value / longest * BAR_WIDTH), 1)
        label = format_value(value, line.row.unit) + ("" if ratio is None else f"  ({ratio:.2f}x)")
        parts.append(f'<rect class="s{index % 5}" x="{LEFT}" y="{at}" width="{width}" height="{BAR_HEIGHT}" rx="2"/>')
        parts.append(_text(LEFT + width + 7, at + 12, label, ""))
        at += BAR_HEIGHT + 3
    if line.floor is not None:
        x = LEFT + round(line.floor / longest * BAR_WIDTH)
        parts.append(f'<line class="floor" x1="{x}" x2="{x}" y1="{y - 2}" y2="{at - 1}"/>')
    return parts, y + max(height, 30) + 12


def _text(x: int, y: int, text: str, style: str) -> str:
    attribute = f' class="{style}"' if style else ""
    return f'<text x="{x}" y="{y}"{attribute}>{escape(text)}</text>'


def _wrap(text: str, width: int) -> list[str]:
    """Break between words; a longer word stays whole."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return lines
