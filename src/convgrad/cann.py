"""`import convgrad.cann`: another name of `convgrad.frontends.cann`, the CANN dialect."""

import sys

from .frontends.cann import *  # noqa: F403

sys.modules[__name__] = sys.modules["convgrad.frontends.cann"]
