"""MLServer: `mlserver start FOLDER`, whose settings name this class. Open Inference Protocol."""

import base64

from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput
from work import Work


class Tiny(MLModel):
    """One input of base64 texts in, one output of probabilities out."""

    async def load(self) -> bool:
        """Load."""
        self.work = Work()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Answer a batch, which MLServer has gathered along the first dimension."""
        texts = payload.inputs[0].data
        answers = self.work([base64.b64decode(text) for text in texts])
        flat = [value for answer in answers for value in answer]
        output = ResponseOutput(
            name="probabilities", shape=[len(answers), len(answers[0])], datatype="FP32", data=flat
        )
        return InferenceResponse(model_name=self.name, outputs=[output])
