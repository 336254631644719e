"""A Griffe extension: examples in docstrings become blocks of code on the site."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_EXAMPLE = re.compile(r"^>>> .*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^(?:Parameters|Returns|Yields|Raises|Attributes)\n-+$", re.MULTILINE)


class Doctests(Extension):
    """Put fences around every run of lines that begins with a prompt; after sections, a heading above them."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Change the docstring of what was loaded."""
        if not obj.is_alias and obj.docstring and ">>> " in obj.docstring.value:
            text = obj.docstring.value
            section = _SECTION.search(text)
            if section is not None and section.start() < text.index(">>> "):
                # What follows a section would be read as a part of it, so examples there are a section too.
                text = text.replace(">>> ", "Examples\n--------\n>>> ", 1)
            else:
                text = _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", text)
            obj.docstring.value = text
