#!/bin/sh
# The same checkpoint by Modelyard, in every format and proven: no `torch.jit.script` of one's own.
set -eu
modelyard export checkpoints/best.ckpt --model lightning_net.py:CNNModel --format pt2 --format onnx \
    --format torchscript -o build
