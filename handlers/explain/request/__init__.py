"""What a request asks for: options, targets and regions of a model version."""
