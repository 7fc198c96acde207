"""An old place of `send_intermediate_predict_response`; workers speak another protocol here."""
