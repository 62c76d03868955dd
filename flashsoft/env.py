"""The only reader of `os.environ`, and the package's logger.

Variables are read once, at import:

- `FLASHSOFT_BACKEND`: name of the backend every call runs on (`hopper`, `triton`, `reference`); unset = chosen per
  call. `triton` keeps attention on the portable kernels.
- `FLASHSOFT_CHECK`: `1` also checks the contents of tensors (temperatures, top-k counts, labels); each check waits
  for the device.
- `FLASHSOFT_TUNING`: the folder of the tables that `flashsoft tune` writes, by default flashsoft/tuning in the
  user's folder for caches.
- `FLASHSOFT_LOG`: a level of `logging`, anything else is INFO (which tells the backend chosen, once a kind of problem).
"""

import logging
import os
from pathlib import Path

BACKEND: str | None = os.environ.get("FLASHSOFT_BACKEND") or None
CHECK: bool = os.environ.get("FLASHSOFT_CHECK", "0") not in ("", "0")
TUNING = Path(
    os.environ.get("FLASHSOFT_TUNING")
    or Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "flashsoft", "tuning")  # noqa: PTH111 (never raises)
)

logger = logging.getLogger("flashsoft")
logger.addHandler(logging.NullHandler())
if os.environ.get("FLASHSOFT_LOG"):
    _level = logging.getLevelName(os.environ["FLASHSOFT_LOG"].upper())
    logger.addHandler(logging.StreamHandler())
    logger.setLevel(_level if isinstance(_level, int) else logging.INFO)
