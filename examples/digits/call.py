"""Ask the digits model for a prediction, its logits and an explanation, in Python.

python examples/digits/call.py http://127.0.0.1:8080 examples/digits/scans/7.png
"""

import sys
from pathlib import Path

import numpy as np
from modelyard_client import Client
from PIL import Image

url, scan = sys.argv[1], Path(sys.argv[2])
with Client(url) as client:
    print(client.predict("digits", scan))

    image = np.asarray(Image.open(scan).convert("L"), np.float32)[None, None] / 255
    print(client.infer("digits", {"image": image})["logits"].round(2))

    (explanation,) = client.explain("digits", scan, method="occlusion", window=2)
    row, column = np.unravel_index(np.abs(explanation.array[0]).argmax(), (8, 8))
    print(f"{explanation.label}: most by row {row}, column {column}, {explanation.warnings}")
