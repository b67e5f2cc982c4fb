"""A hook of mkdocs: files beside docs/ that pages link to are copied to `files/` of the site, and the links follow."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File  # pyright: ignore[reportMissingImports]  # of .site-venv alone

_ROOT = Path(__file__).parents[2]
_STYLE = "@media (min-width: 60em) {.md-typeset td:first-child code {white-space: nowrap}} .md-grid {max-width: 76rem}\n"
_CODE = re.compile(r"`[^`\n]+`")
_LINK = re.compile(r"(\[[^]]*\])\(([^)\s]+)\)|(src(?:set)?)=\"([^\"]+)\"")


def on_files(files: Any, *, config: Any) -> None:
    """Adds the files that pages link to, and those that these link to, and room for tables."""
    files.append(File.generated(config, "site.css", content=_STYLE))
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        uri = waiting.pop()
        for target in filter(None, (_target(uri, link) for link in _links(_source(uri).read_text()))):
            if files.get_file_from_path(target) is None and _source(target).is_file():
                files.append(File.generated(config, target, content=_source(target).read_bytes()))
                waiting += [target] if target.endswith(".md") else []


def on_page_markdown(markdown: str, *, page: Any, files: Any, **_: Any) -> str:
    """Points links at the site's own files. Links to folders become text. A bar in the code of a table needs no backslash here."""

    def mended(match: re.Match[str]) -> str:
        text, link, attribute, source = match.groups()
        target = _target(page.file.src_uri, link or source)
        if target is None:
            return match[0]
        if files.get_file_from_path(target) is None:
            return text[1:-1]
        path = os.path.relpath(target, Path(page.file.src_uri).parent) + "".join((link or source).partition("#")[1:])
        return f"{text}({path})" if link else f'{attribute}="{path}"'

    return _CODE.sub(lambda code: code[0].replace("\\|", "|"), _LINK.sub(mended, markdown))


def _links(text: str) -> list[str]:
    return [match[2] or match[4] for match in _LINK.finditer(text)]


def _source(uri: str) -> Path:
    return _ROOT / uri.removeprefix("files/") if uri.startswith("files/") else _ROOT / "docs" / uri


def _target(uri: str, link: str) -> str | None:
    """Path of a link's target in the site; None for addresses and anchors."""
    file = link.partition("#")[0]
    if not file or "://" in file:
        return None
    path = Path(os.path.normpath(_source(uri).parent / file)).relative_to(_ROOT)
    return str(path.relative_to("docs")) if path.parts[0] == "docs" else f"files/{path}"
