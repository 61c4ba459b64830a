"""The page with the terminal. All that it loads comes from this server: textual-serve's script,
styles and font."""

from __future__ import annotations

from html import escape
from pathlib import Path

import textual_serve

from memtop.supervisor import language
from memtop.supervisor.language import tr

_STATIC = Path(textual_serve.__file__).parent / "static"
FILES = {
    f"/static/{name}": _STATIC / name
    for name in (
        "js/textual.js",
        "css/xterm.css",
        "fonts/RobotoMono-VariableFont_wght.ttf",
        "fonts/RobotoMono-Italic-VariableFont_wght.ttf",
    )
}
"""The files that a browser may load, by their address."""
FOCUS = "/static/js/focus.js"
FOCUS_SCRIPT = """new MutationObserver((changes, observer) => {
  observer.disconnect();
  document.querySelector(".xterm-helper-textarea").focus();
}).observe(document.body, {attributes: true});
"""
"""Keys work at once, not only after a click. textual-serve's script changes the body's class when
its websocket is open, and could not send the focus before."""

_LANGUAGES = {"en": "en", "zh": "zh-CN"}
"""In the page. A browser chooses its fonts by it, and "zh" alone does not say which characters."""

HEADERS = {
    # xterm.js writes its styles into the page, so inline styles are needed. Scripts are not.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; font-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Server": "memtop",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""The headers of every answer."""

_PAGE = """<!DOCTYPE html>
<html lang="{language}">
<head>
<meta charset="utf-8">
<title>memtop</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/static/css/xterm.css">
<script src="/static/js/textual.js"></script>
<style>
@font-face {{ font-family: "Roboto Mono"; font-weight: 100 700; font-style: normal;
  src: url("/static/fonts/RobotoMono-VariableFont_wght.ttf"); }}
@font-face {{ font-family: "Roboto Mono"; font-weight: 100 700; font-style: italic;
  src: url("/static/fonts/RobotoMono-Italic-VariableFont_wght.ttf"); }}
html, body {{ margin: 0; height: 100%; overflow: hidden; background: #12171d; color: #cdd9e5; }}
#terminal {{ height: 100%; }}
#font, #ended {{ font-family: "Roboto Mono", monospace; position: fixed; }}
#font {{ visibility: hidden; }}
#ended {{ display: none; left: 0; right: 0; bottom: 0; z-index: 20; padding: 12px; background: #222a33; }}
#ended a {{ color: #6cb6ff; }}
body.-closed #ended {{ display: block; }}
</style>
</head>
<body>
<p id="font" aria-hidden="true">a<b>b</b></p>
<div id="terminal" class="textual-terminal" data-session-websocket-url="ws://{host}/ws" data-font-size="14"></div>
<div id="ended" role="status">{ended} <a href="/">{again}</a><br>{gone}</div>
<script src="{focus}"></script>
</body>
</html>
"""
# The browser was led here by a link of another program, so it would not send a strict cookie along
# with a redirect. It does if this page leads it on.
_FORWARD = """<!DOCTYPE html>
<html lang="{language}">
<head><meta charset="utf-8"><title>memtop</title><meta http-equiv="refresh" content="0;url=/"></head>
<body><a href="/">memtop</a></body>
</html>
"""


def page(host: str) -> str:
    """The page with the terminal. `host`: the server's name and port in the browser's address."""
    return _PAGE.format(
        language=_LANGUAGES[language.current()],
        host=escape(host),
        focus=FOCUS,
        ended=escape(tr("This dashboard has ended; a run that it showed goes on.")),
        again=escape(tr("Open it again")),
        gone=escape(tr("If that does not work, memtop watch --serve has ended: start it again and use its new link.")),
    )


def forward() -> str:
    """The page that follows a used link: it takes the token out of the browser's address."""
    return _FORWARD.format(language=_LANGUAGES[language.current()])
