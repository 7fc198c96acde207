"""Ray Serve by gRPC: `python grpc_ray.py`. Open Inference Protocol, raw tensors."""

import os

import grpc
import numpy as np
import onnxruntime
from open_inference_pb2 import ModelInferRequest, ModelInferResponse
from ray import serve
from ray.serve.config import gRPCOptions


def add_service(servicer, server) -> None:
    """Add the one method, as a generated module does."""
    handler = grpc.unary_unary_rpc_method_handler(
        servicer.ModelInfer,
        request_deserializer=ModelInferRequest.FromString,
        response_serializer=ModelInferResponse.SerializeToString,
    )
    service = "inference.GRPCInferenceService"
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"ModelInfer": handler}),)
    )


@serve.deployment(num_replicas=1, max_ongoing_requests=128)
class Digits:
    """Raw tensor in, raw tensor out."""

    def __init__(self) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(os.environ["BENCH_MODEL"], options)

    async def ModelInfer(self, request):  # noqa: N802 - the protocol's
        """Answer one request."""
        shape = list(request.inputs[0].shape)
        image = np.frombuffer(request.raw_input_contents[0], np.float32).reshape(shape)
        (logits,) = self.session.run(None, {"image": image})
        answer = ModelInferResponse(model_name="digits", id=request.id)
        answer.outputs.add(name="logits", datatype="FP32", shape=logits.shape)
        answer.raw_output_contents.append(logits.tobytes())
        return answer


if __name__ == "__main__":
    port = int(os.environ["BENCH_PORT"])
    serve.start(
        http_options={"host": "127.0.0.1", "port": port + 1},
        grpc_options=gRPCOptions(port=port, grpc_servicer_functions=["grpc_ray.add_service"]),
    )
    serve.run(Digits.bind(), blocking=True)
