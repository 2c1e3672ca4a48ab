"""The site: it builds without a warning, loads nothing, and names all that is public."""

import importlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
API = sorted((ROOT / "docs" / "api").glob("*.md"))
MODULES = ["lossscale", "lossscale.errors", "lossscale.rules", "lossscale.callbacks"]
MODULES += [f"lossscale.{name}" for name in ("keras", "tf_keras", "torch", "optax", "experimental")]
MODULES += [f"lossscale.{name}" for name in ("diagnosis", "monitoring")]

pytestmark = pytest.mark.skipif(
    os.environ["KERAS_BACKEND"] != "tensorflow", reason="the site is the same on every backend"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # It is strict: a broken link or anchor, a page that no menu has, a name that is not there.
    assert done.returncode == 0, done.stderr
    return folder


def named(path):
    """What a dotted name of a module and something in it stands for."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def entries():
    """What each entry of the reference is made of, and what it is called."""
    entry = re.compile(r"^::: (\S+)\n    options:\n      heading: (\S+)$", re.MULTILINE)
    return [found for page in API for found in entry.findall(page.read_text())]


def test_every_public_name_is_on_a_page():
    for where, heading in entries():
        assert named(where) is named(heading), heading
    shown = {id(named(heading)) for _, heading in entries()}
    for module in MODULES:
        for name in importlib.import_module(module).__all__:
            if name != "__version__":
                assert id(named(f"{module}.{name}")) in shown, f"{module}.{name}"


def test_no_page_loads_anything_from_the_network(site):
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]*src="([^"]*)"|<link[^>]*rel="stylesheet"[^>]*href="([^"]*)"'
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for found in loaded.findall(page.read_text(encoding="utf-8")):
            assert "//" not in "".join(found), page


def test_the_command_line_is_as_on_its_page():
    text = (ROOT / "docs" / "api" / "command_line.md").read_text()
    [expected] = re.findall(r"```text\n(.*?)\n```", text, re.S)
    command = [sys.executable, "-m", "lossscale_migration", "--help"]
    environment = {**os.environ, "COLUMNS": "90"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip() == expected


def test_the_gallery_has_a_line_for_every_example():
    text = (ROOT / "docs" / "examples.md").read_text()
    linked = re.findall(r"^\| \[.*?\]\(\.\./(\S+?)\) \| \S.* \|$", text, re.M)
    programs = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "examples").rglob("*")
        if path.suffix in (".py", ".ipynb")
    }
    assert sorted(linked) == sorted(programs)


def test_signatures_name_nothing_private(site):
    signature = re.compile(r'<div class="[^"]*doc-signature.*?</div>', re.DOTALL)
    found = [
        re.sub(r"<[^>]+>", "", text)
        for page in (site / "api").glob("*.html")
        for text in signature.findall(page.read_text(encoding="utf-8"))
    ]
    assert len(found) > 100
    assert any(text.startswith("scale_loss(loss: Tensor") for text in found)
    assert [text for text in found if re.search(r"\b_\w+", text)] == []
