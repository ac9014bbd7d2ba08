"""Tables of the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", numeric: Iterable[int] = ()) -> str:
    """Cells are HTML already; the first of each row names it."""
    numeric = set(numeric)

    def css(i: int) -> str:
        return ' class="n"' if i in numeric else ""

    heads = "".join(f'<th scope="col"{css(i)}>{escape(name)}</th>' for i, name in enumerate(head))
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row"{css(i)}>{cell}</th>' if i == 0 else f"<td{css(i)}>{cell}</td>"
            for i, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    inner = f"{title}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide" tabindex="0"><table>{inner}</table></div>'
