"""Puts the page together: everything inline, nothing from the network, and data that cannot become code."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib import resources
from typing import Any

GENERATOR = '<meta name="generator" content="thinwire report">'  # how a page of ours is recognised
SCRIPTS = ("chart.js", "pointer.js", "tables.js", "report.js")  # in the order they are read


def page(data: dict[str, Any], title: str) -> str:
    """The whole HTML file. `data` is what gather() returned, and what the scripts read."""
    files = resources.files("thinwire.lab.report")
    script = "\n" + "\n".join((files / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": html.escape(title),
        "generator": GENERATOR,
        # Only this one script may run, and nothing may be loaded: the page is as offline as it claims to be.
        "policy": f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data: blob:",
        "css": (files / "report.css").read_text(encoding="utf-8"),
        "data": embedded_json({**data, "title": title}),
        "script": script,
    }
    template = (files / "page.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def embedded_json(value: Any) -> str:
    """JSON that stays data inside <script>: no character in it can end the element or start a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
