"""`python -m raysd`."""

from raysd.cli import main

raise SystemExit(main())
