"""`import convgrad.ascendc`: another name of `convgrad.frontends.ascendc`, the Ascend C dialect."""

import sys

from .frontends.ascendc import *  # noqa: F403

sys.modules[__name__] = sys.modules["convgrad.frontends.ascendc"]
