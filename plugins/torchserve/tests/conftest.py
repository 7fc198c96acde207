"""Puts TorchServe's import names on the path, as workers have them."""

import sys

from modelyard.plugins.torchserve.seam import SHIM

sys.path.insert(0, str(SHIM))
