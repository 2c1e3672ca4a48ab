"""Programs for who works on the library: `python -m tools.NAME`, from the root of a checkout.

CONTRIBUTING.md lists them. What they share with the tests is imported from there.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))
