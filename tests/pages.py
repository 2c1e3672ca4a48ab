"""The programs that a page shows, and what they print and log; those in tabs included."""

import doctest
import functools
import pathlib
import re
import textwrap

DOCS = pathlib.Path(__file__).parents[1] / "docs"
# What TensorFlow says of the machine when it first computes.
OF_THE_MACHINE = re.compile(
    r"WARNING: All log messages before absl::InitializeLog"
    r"|([IWE]\d{4}|\d{4}-\d\d-\d\d) .*(cuda|CUDA|GPU|oneDNN|cpu_feature|xla|XLA|MLIR)"
)


def programs(page):
    """Returns the sources of the Python blocks of a page (a path in docs/), from top to bottom."""
    return [source for source, _ in _blocks(page)]


def outputs(page):
    """Returns (source, output) pairs of the Python blocks that a text block follows."""
    return [(source, output) for source, output in _blocks(page) if output is not None]


def examples_tried(module, names):
    """Checks that the examples of a module print what they show; returns how many there are."""
    find = functools.partial(doctest.DocTestFinder().find, globs=names)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    found = {test.name: test for test in find(module)}
    # A class may name another module than the one that its methods are written in.
    for name, member in vars(module).items():
        if isinstance(member, type) and member.__module__ == module.__name__:
            tests = find(member, f"{module.__name__}.{name}", module=False)
            found |= {test.name: test for test in tests}
    for test in found.values():
        assert runner.run(test).failed == 0
    return runner.summarize().attempted


def _blocks(page):
    # A block in a tab is indented, and ends at the indentation that it starts with.
    found = re.finditer(
        r"^( *)```python\n(.*?)^\1```(?:\n\n\1```text\n(.*?)^\1```)?",
        (DOCS / page).read_text(encoding="utf-8"),
        re.S | re.M,
    )
    return [(textwrap.dedent(block[2]), block[3]) for block in found]
