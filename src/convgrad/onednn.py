"""`import convgrad.onednn`: another name of `convgrad.frontends.onednn`, the oneDNN Graph dialect."""

import sys

from .frontends.onednn import *  # noqa: F403

sys.modules[__name__] = sys.modules["convgrad.frontends.onednn"]
