"""`python -m epifuse`."""

from epifuse.cli import main

raise SystemExit(main())
