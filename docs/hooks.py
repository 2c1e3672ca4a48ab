"""Adds files outside docs/ to the site: README, CHANGELOG, CONTRIBUTING, examples, notebooks.

Links to them are rewritten, so that the same text works in a checkout and on the site.
"""

import base64
import json
import pathlib
import posixpath
import re

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).parents[1]
# A file in the repository, and its page on the site.
PAGES = {
    "README.md": "index.md",
    **{
        path.name: f"{path.stem.lower()}.md"
        for path in sorted(ROOT.glob("*.md"))
        if path.name not in ("README.md", "PACKAGE.md")
    },
}
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").rglob("*.ipynb"))
# The weight of a page in the search, by the start of its path; 1 otherwise.
BOOSTS = {
    **dict.fromkeys(("pytorch.md", "keras.md", "jax.md"), 2),
    "api/torch.md": 1.5,
    **dict.fromkeys(
        ("internals/", "examples/", "changelog.md", "contributing.md", "api/glossary.md"), 0.5
    ),
}
# A long name in a sentence, which a narrow screen has to break.
LONG_NAME = re.compile(r"<code>([^<\s]{24,})</code>")
LINK = re.compile(r"\[([^\]\[]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


class ConstructorOfNew(griffe.Extension):
    """Shows `__new__` as the signature of a class without `__init__`."""

    def on_class(self, *, cls, **kwargs):
        new = cls.members.get("__new__")
        if new is not None and "__init__" not in cls.members:
            for function in (new, *(new.overloads or ())):
                # What it returns is not shown.
                function.name = "__init__"
            cls.members["__init__"] = new


def on_files(files, config):
    """Adds the pages that are not in docs/."""
    for name, page in PAGES.items():
        text = rewritten((ROOT / name).read_text(encoding="utf-8"), "")
        files.append(File.generated(config, page, content=text))
    for path in EXAMPLES:
        source = path.read_text(encoding="utf-8")
        where = path.relative_to(ROOT).with_suffix(".md").as_posix()
        text = f"# {path.name}\n\n```python\n{source}```\n"
        files.append(File.generated(config, where, content=text))
    for path in NOTEBOOKS:
        where = path.relative_to(ROOT).with_suffix("")
        text, pictures = notebook_page(json.loads(path.read_text(encoding="utf-8")), where.name)
        files.append(File.generated(config, f"{where.as_posix()}.md", content=text))
        for name, content in pictures.items():
            picture = (where.parent / name).as_posix()
            files.append(File.generated(config, picture, content=content))
    return files


def notebook_page(notebook, name):
    """Returns a notebook as Markdown, and its pictures by their file names.

    Args:
        notebook: The content of the file.
        name: The start of the file names of its pictures.
    """
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}-{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode(data["image/png"])
                parts.append(f"![Output of the cell above]({picture})")
            elif output.get("name") != "stderr":
                printed = "".join(output.get("text", data.get("text/plain", ())))
                parts.append(f"```text\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures


def on_page_markdown(markdown, page, config, files):
    """Rewrites links that leave docs/, and sets the weight of the page in the search."""
    for start, boost in BOOSTS.items():
        if page.file.src_uri.startswith(start):
            page.meta["search"] = {"boost": boost}
    if page.file.generated_by is not None:
        return markdown
    return rewritten(markdown, f"docs/{posixpath.dirname(page.file.src_uri)}")


def on_page_content(html, page, config, files):
    """Lets long names break after a dot, a parenthesis or an equals sign only."""
    return LONG_NAME.sub(lambda found: re.sub(r"([.(=\[])", r"\1<wbr>", found[0]), html)


def rewritten(markdown, folder):
    """Returns a text whose links lead to pages of the site and have the titles of these pages.

    Args:
        markdown: The text.
        folder: The folder of the text in the repository.
    """

    def replaced(found):
        words, link, anchor = found[1], found[2], found[3] or ""
        source = posixpath.normpath(posixpath.join(folder, link))
        if source.startswith("tests/") or source in ("LICENSE", "CITATION.cff", "constraints.txt"):
            return words
        page = page_of(source)
        if page is None:
            return found[0]
        if words.endswith(".md"):
            words = (ROOT / source).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        here = folder.removeprefix("docs").strip("/") or "."
        return f"[{words}]({posixpath.relpath(page, here)}{anchor})"

    return LINK.sub(replaced, markdown)


def page_of(source):
    """Returns the page of the site for a file or a folder of the repository, or None."""
    if source in PAGES:
        return PAGES[source]
    if source.startswith("examples"):
        program = re.fullmatch(r"(.*)\.(py|ipynb)", source)
        return f"{program[1]}.md" if program else "examples.md"
    return source.removeprefix("docs/") if source.startswith("docs/") else None
