#!/bin/sh
# A tour of PyTorch, as the document writes it: train, archive, serve, ask, stop. Runs in a folder
# with net.py, train.py, scans and handler.py; the tests give the server other ports by TS_CONFIG_FILE, and
# at night train with Lightning, by train_lightning.py.
set -eu

python train.py

mkdir -p model_store
torch-model-archiver --model-name machin-lern --version 1.0 --serialized-file checkpoints/jit_model.pt \
    --export-path model_store --handler handler
torchserve --start --ncs --model-store model_store --models machin-lern
trap 'torchserve --stop' EXIT
curl http://localhost:8080/predictions/machin-lern -T images/0.png >prediction.json
curl http://localhost:8080/explanations/machin-lern -T images/0.png >explanation.json
trap - EXIT
torchserve --stop
