"""The page of an approval link: what is asked, as the workflow has said it, and a form. It needs no script."""

from __future__ import annotations

import unicodedata
from html import escape

from starlette.responses import Response

from tidegate.model.approval import MAX_COMMENT, Approval

# The console's, but for the form, which is sent to the page's own address.
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'",
    "referrer-policy": "no-referrer",
    "x-robots-tag": "noindex, nofollow",
}
# A browser drops the line break after <textarea>.
_FORM = f"""<form method="post">
  <label>Comment (optional) <textarea name="comment" rows="3" maxlength="{MAX_COMMENT}">
{{comment}}</textarea></label>
  <p><button name="decision" value="approve">Approve</button> <button name="decision" value="reject">Reject</button></p>
</form>"""
# Control and format characters, line and paragraph separators, surrogates.
_UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Cs")
_PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>{title}</title>
  <link rel="stylesheet" href="../static/style.css">
</head>
<body>
  <main class="question"><section>
  <h1>{title}</h1>
  {content}
  </section></main>
</body>
</html>
"""


def page(
    approval: Approval, status: int = 200, *, said: str | None = None, comment: str = "", wrong: str = ""
) -> Response:
    """The page of an approval: with the form while it is open, else with what became of it, or `said`. `wrong`: why the
    comment that was sent was refused; the form has it again."""
    parts = [f"<p>{line}</p>" for line in escape(_visible(approval.note or "")).splitlines() if line.strip()]
    parts.append(f"<p>{escape(said or told(approval))}</p>")
    if approval.state == "open":
        parts += [f'<p role="alert">{escape(wrong)}</p>'] if wrong else []
        parts.append(_FORM.format(comment=escape(comment)))
    return _rendered(f"Approval: {_visible(approval.name)}", "\n  ".join(parts), status)


def error_page(text: str, status: int) -> Response:
    """A page that says why there is nothing to decide."""
    return _rendered("Approval", f"<p>{escape(text)}</p>", status)


def thanks(approval: Approval) -> str:
    """What whoever has decided is told."""
    assert approval.decision is not None, "it has been decided"
    word = "approved" if approval.decision.approved else "rejected"
    return f"Thank you. You {word} it at {approval.decision.at:%Y-%m-%d %H:%M} UTC."


def not_counted(approval: Approval) -> str:
    """What is told to whoever wanted to decide an approval that is not open."""
    said = told(approval)
    if approval.decision is None:
        return f"Your decision was not counted. {said}"
    return f"Your decision was not counted: {said.replace('It was', 'it was already', 1)}"


def told(approval: Approval) -> str:
    """The state of an approval, as whoever has the link may know it."""
    if approval.state == "open":
        return f"You can decide until {approval.until:%Y-%m-%d %H:%M} UTC, once."
    if approval.decision is not None:
        word = "approved" if approval.decision.approved else "rejected"
        return f"It was {word} at {approval.decision.at:%Y-%m-%d %H:%M} UTC."
    if approval.state == "expired":
        return "The time for this decision is over."
    return "This decision is no longer needed: what asked for it has ended."


def _visible(text: str) -> str:
    """Text in which characters that nobody sees are written as escapes: those that change the direction of text could
    show another amount than is meant. Line breaks and tabs stay."""
    return "".join(f"\\u{ord(c):04x}" if unicodedata.category(c) in _UNSEEN and c not in "\n\r\t" else c for c in text)


def _rendered(title: str, content: str, status: int) -> Response:
    text = _PAGE.format(title=escape(title), content=content)
    return Response(text.encode(), status, _HEADERS, media_type="text/html")
