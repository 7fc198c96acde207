"""TorchServe's import names, for handlers written for it; on the path of workers only.

Written after what TorchServe 0.12 does, not after its code. To run or test a handler without a
server, put the folder above on PYTHONPATH; `ts.model_loader` says how.
"""

from ts.version import __version__ as __version__
