"""A command line whose wrong usage exits 64, as any wrong configuration does."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

USAGE_EXIT = 64


class Parser(argparse.ArgumentParser):
    """argparse's own exits 2."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE_EXIT, f"error: {message}\n")
