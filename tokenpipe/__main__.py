"""`python -m tokenpipe`: the same as the `tokenpipe` command; roles are started this way."""

from __future__ import annotations

import sys

from tokenpipe.cli import main

sys.exit(main())
