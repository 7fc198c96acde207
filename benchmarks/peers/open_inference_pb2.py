"""The messages of the Open Inference Protocol, of the descriptors that BENCH_MESSAGES names.

The name is the one by which protobuf's own classes are found when they are unpickled.
"""

import os
from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_pool = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(
    Path(os.environ["BENCH_MESSAGES"]).read_bytes()
).file:
    _pool.Add(_file)
ModelInferRequest, ModelInferResponse = (
    message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"inference.ModelInfer{_end}"))
    for _end in ("Request", "Response")
)
