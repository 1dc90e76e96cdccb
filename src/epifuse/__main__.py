"""`python -m epifuse`."""

from epifuse.tools.cli import main

raise SystemExit(main())
