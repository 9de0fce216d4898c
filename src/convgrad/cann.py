"""`import convgrad.cann`: another name of `convgrad.frontends.cann`, the CANN dialect."""

import sys

from .frontends import cann
from .frontends.cann import *  # noqa: F403

sys.modules[__name__] = cann
