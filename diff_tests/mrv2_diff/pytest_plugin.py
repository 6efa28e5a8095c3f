"""pytest's plugin: with `--mrv2-pair` each case is a test. Without it nothing changes.

It is loaded by every pytest of an environment in which mrv2 is installed, so it imports nothing of
this project before one of its options is given.
"""

from pathlib import Path

import pytest

OPTIONS = ("mrv2_pair", "mrv2_area", "mrv2_case", "mrv2_case_file")
"""One of these is enough for cases to be tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; `pytest --help` shows them with examples."""
    group = parser.getgroup("mrv2", "model runners in lockstep (mrv2-diff)")
    group.addoption("--mrv2-pair", metavar="REF,CAND", help="make each case a test of this pair of "
                    "runners: v1,mrv2 or v1,v1 (default, with another of these options: v1,mrv2). "
                    "Files and folders that are named are collected too, no others")  # fmt: skip
    group.addoption("--mrv2-area", action="append", default=[], metavar="A",
                    help="every case of an area; may be given again")  # fmt: skip
    group.addoption("--mrv2-case", action="append", default=[], metavar="ID",
                    help="one case; may be given again")  # fmt: skip
    group.addoption("--mrv2-case-file", action="append", default=[], type=Path, metavar="FILE",
                    help="a case that mrv2-diff shrink or run wrote; may be given "
                    "again. For example: pytest --mrv2-pair v1,mrv2 --mrv2-area sampling -k top_k; "
                    "with pytest-xdist: -n 2 --dist loadgroup")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Take part where an option of ours is given."""
    if any(config.getoption(name) for name in OPTIONS):
        from mrv2_diff.pytest_cases import Cases

        config.pluginmanager.register(Cases(config), "mrv2-cases")
