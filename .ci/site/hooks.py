"""What mkdocs lacks for a repository: pages from outside docs/, links between all of them, all public names."""

from __future__ import annotations

import inspect
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

from amp_engine import amp

ROOT = Path(__file__).parents[2]
PAGES = Path(__file__).parent / "pages"
TOP = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE")
SHARED = ("Measured", "When not to use it")  # sections of README.md that the front page has, too
LINK = re.compile(r"\[([^]]*)\]\((?!https?:|#)([^)#\s]+)")
log = logging.getLogger("mkdocs.hooks.amp_engine")


def on_files(files: Files, config: Any) -> None:
    """Add the pages of .ci/site/pages and of the repository's top, and the examples."""
    pages = {path.relative_to(PAGES).as_posix(): path.read_text() for path in sorted(PAGES.rglob("*.md"))}
    pages["index.md"] += "".join(_section_of_readme(heading) for heading in SHARED)
    signatures = "".join(pages.values())
    for name in sorted(amp.__all__):
        if f"::: amp.{name}\n" not in signatures:
            log.warning("amp.%s is public, and on no page of .ci/site/pages/api", name)
    names = (f"[`{name}`][{_origin(name)}]" for name in sorted(amp.__all__, key=str.lower))
    pages["api/index.md"] += f"\n## All names of amp\n\n{' · '.join(names)}\n"
    of_amp = re.compile(r"^::: amp\.(\w+)$", re.MULTILINE)
    pages = {place: of_amp.sub(lambda match: f"::: {_origin(match[1])}", text) for place, text in pages.items()}
    pages.update({_place(name): (ROOT / name).read_text() for name in TOP})
    files.append(File.generated(config, "site.css", content=(Path(__file__).parent / "site.css").read_text()))
    for path in sorted((ROOT / "examples").glob("*.py")):
        name = f"examples/{path.name}"
        pages[_place(name)] = f"# {name}\n\n```python\n{path.read_text()}```\n"
    for place, text in pages.items():
        linked = place.startswith("examples/") or place == "LICENSE.md"  # by other pages, and in no menu
        inclusion = InclusionLevel.NOT_IN_NAV if linked else InclusionLevel.INCLUDED
        files.append(File.generated(config, place, content=text, inclusion=inclusion))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links that hold in the repository hold on the site; where one shows a file's name, show its heading."""
    here = page.file.src_uri
    folder = posixpath.dirname(_source(here))

    def follow(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        text = _title(target) if target.endswith(match[1]) and target.endswith(".md") else match[1]
        return f"[{text}]({posixpath.relpath(_place(target), posixpath.dirname(here) or '.')}"

    _refuse_lists_without_a_blank_line(markdown, here)
    return LINK.sub(follow, markdown)


def _origin(name: str) -> str:
    """Where the function or class `amp.name` is written, which has its signature with all types."""
    written = inspect.unwrap(getattr(amp, name))
    return f"{written.__module__}.{written.__qualname__}"


def _section_of_readme(heading: str) -> str:
    """A section of README.md, with the links that it needs on the front page."""
    section = re.search(rf"^## {heading}\n.*?(?=^## |\Z)", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    if section is None:
        log.warning("README.md has no section %r, which the front page shows, too", heading)
        return ""
    return "\n" + LINK.sub(r"[\1](../../../\2", section[0])


def _title(source: str) -> str:
    """The heading of a document."""
    return (ROOT / source).read_text().partition("\n")[0].removeprefix("# ")


def _place(source: str) -> str:
    """Of a file of the repository, its place on the site."""
    if source.startswith(".ci/site/pages/"):
        return source.removeprefix(".ci/site/pages/")
    if source == "LICENSE" or source.startswith("examples/"):
        return source.removesuffix(".py") + ".md"
    return source.removeprefix("docs/")


def _source(place: str) -> str:
    """Of a page on the site, its file in the repository."""
    if (PAGES / place).exists():
        return f".ci/site/pages/{place}"
    return place if place in TOP or place.startswith("examples/") else f"docs/{place}"


def _refuse_lists_without_a_blank_line(markdown: str, here: str) -> None:
    """GitHub takes such a list for one, Python-Markdown for more of the paragraph."""
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    item = re.compile(r"[-*] |\d+\. |\|")
    for paragraph in re.split(r"\n\s*\n", prose):
        first, *others = paragraph.strip("\n").split("\n")
        if not first.startswith("#") and not item.match(first.lstrip()) and any(map(item.match, others)):
            log.warning("%s: a list or table needs a blank line above it: %s", here, first)
