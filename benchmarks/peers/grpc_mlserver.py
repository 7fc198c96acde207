"""MLServer by gRPC: `mlserver start FOLDER`, whose settings name this class."""

import os

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class Digits(MLModel):
    """Tensor in, tensor out."""

    async def load(self) -> bool:
        """Load."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(os.environ["BENCH_MODEL"], options)
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer one request."""
        image = NumpyCodec.decode_input(payload.inputs[0])
        (logits,) = self.session.run(None, {"image": image})
        return InferenceResponse(
            model_name=self.name, outputs=[NumpyCodec.encode_output("logits", logits)]
        )
