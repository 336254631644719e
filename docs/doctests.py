"""A Griffe extension: examples in docstrings become blocks of code on the site, without a heading of their own."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(Extension):
    """Put fences around every run of lines that begins with a prompt."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of what was loaded."""
        if not obj.is_alias and obj.docstring and ">>> " in obj.docstring.value:
            text = _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", obj.docstring.value)
            obj.docstring.value = text
