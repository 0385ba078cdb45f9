"""Run by every Python that starts with this folder on PYTHONPATH: moeserve is then that of the checkout before it
there. The finder of an editable install comes before PYTHONPATH, and knows one checkout alone.

TESTS_CHANGE names a module that is imported then, and changes the program."""

import importlib
import os
import sys
from importlib.machinery import PathFinder

CHECKOUT = sys.path[sys.path.index(os.path.dirname(__file__)) - 1] + os.sep


def _finds_another(finder: object) -> bool:
    find = getattr(finder, "find_spec", None)
    if find is None or finder is PathFinder:
        return False
    found = find("moeserve", None)
    return found is not None and not str(found.origin).startswith(CHECKOUT)


sys.meta_path[:] = [finder for finder in sys.meta_path if not _finds_another(finder)]

if "TESTS_CHANGE" in os.environ:
    importlib.import_module(os.environ["TESTS_CHANGE"])
