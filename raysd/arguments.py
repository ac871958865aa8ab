"""A command line whose wrong usage exits 64, as any wrong configuration does."""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

USAGE_EXIT = 64


def positive(text: str) -> int:
    """A whole number of at least 1, as argparse's `type`."""
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1 and at most nine digits")
    return int(text)


class Parser(argparse.ArgumentParser):
    """argparse's own exits 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE_EXIT, f"error: {message}\n")
