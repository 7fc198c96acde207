"""Ask the digits model by the Open Inference Protocol, with the scan's bytes as they are.

python examples/digits/infer.py http://127.0.0.1:8080 examples/digits/scans/7.png
"""

import json
import sys
import urllib.request

import numpy as np
from PIL import Image

url, file = sys.argv[1:]
scan = np.asarray(Image.open(file).convert("L"), np.float32)[None, None] / 255
head = json.dumps({
    "inputs": [{
        "name": "image", "datatype": "FP32", "shape": list(scan.shape),
        "parameters": {"binary_data_size": scan.nbytes},
    }],
    "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
}).encode()  # fmt: skip
request = urllib.request.Request(
    f"{url}/v2/models/digits/infer",
    head + scan.tobytes(),
    {"Inference-Header-Content-Length": str(len(head))},
)
with urllib.request.urlopen(request) as answer:
    length = int(answer.headers["Inference-Header-Content-Length"])
    logits = np.frombuffer(answer.read()[length:], np.float32)
print("logits", logits.round(2).tolist())
print("digit", int(logits.argmax()))
