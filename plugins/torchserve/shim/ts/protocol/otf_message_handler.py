"""`from ts.protocol.otf_message_handler import send_intermediate_predict_response`."""

from ts.handler_utils.utils import send_intermediate_predict_response as _send
from ts.utils.util import deprecated

send_intermediate_predict_response = deprecated(
    "a later version", "ts.handler_utils.utils.send_intermediate_predict_response"
)(_send)
