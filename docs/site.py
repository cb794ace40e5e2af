"""What mkdocs needs to know of this project: pages that live elsewhere, links out of docs/."""

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\(([^()\s#:]+)(#[^()\s]*)?\)")
FIELD = re.compile(r"^([a-z][\w, ]*): ", re.M)


def _elsewhere() -> dict[Path, str]:
    """Files outside docs/ that the site shows, and their places in it."""
    found = {ROOT / "CONTRIBUTING.md": "adding-a-method.md", ROOT / "CHANGELOG.md": "changelog.md"}
    for path in sorted((ROOT / "benchmarks" / "results").iterdir()):
        found[path] = f"results/{path.name}"
    for path in sorted((ROOT / "examples").glob("*.py")):
        found[path] = f"examples/{path.stem}.md"
    return found


def on_config(config: Any) -> Any:
    """Folders in the navigation, "results/" and "examples/", stand for the pages in them."""
    pages: dict[str, list[Any]] = {"results/": [], "examples/": []}
    for path, place in _elsewhere().items():
        folder = place[: place.find("/") + 1]
        if folder and place.endswith(".md"):
            pages[folder].append({_title(path): place})
    for section in config.nav:
        for entries in section.values():
            for entry in entries if isinstance(entries, list) else []:
                entry.update({name: pages[v] for name, v in entry.items() if v in pages})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that live outside docs/; an example becomes a page of its code."""
    for path, place in _elsewhere().items():
        if path.suffix == ".py":
            content = f"# {path.name}\n\n```python\n{path.read_text()}```\n"
            files.append(File.generated(config, place, content=content))
        else:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to what the site shows become links in it; other files of the project, their names."""
    place = page.file.src_uri
    sources = {uri: path for path, uri in _elsewhere().items()}
    source = sources.get(place, ROOT / "docs" / place)

    def link(match: re.Match[str]) -> str:
        path = (source.parent / match[3]).resolve()
        target = _elsewhere().get(path)
        if target is None and path.is_relative_to(ROOT / "docs"):
            target = path.relative_to(ROOT / "docs").as_posix()
        if target is not None:
            target = posixpath.relpath(target, posixpath.dirname(place) or ".")
            return f"{match[1]}[{match[2]}]({target}{match[4] or ''})"
        return match[2] if path.exists() and path.is_relative_to(ROOT) else match[0]

    return re.sub(LINK, link, markdown)


def _title(page: Path) -> str:
    if page.suffix == ".py":
        return page.name
    return page.read_text().partition("\n")[0].removeprefix("# ").partition(",")[0]


class Fields(griffe.Extension):
    """Docstrings that name one field a line become lists."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for every object that is read."""
        if obj.docstring is None or len(FIELD.findall(obj.docstring.value)) < 5:
            return
        lines = obj.docstring.value.splitlines()
        first = next(i for i, line in enumerate(lines) if FIELD.match(line))
        # Stars in a docstring are patterns of names.
        plain = [line.replace("*", r"\*") for line in lines[first:]]
        body = [re.sub(FIELD, r"- **\1**: ", line) for line in plain]
        obj.docstring.value = "\n".join([*lines[:first], *body])
