"""`python -m flashsoft`, the same as the command `flashsoft`."""

from .cli import main

raise SystemExit(main())
