"""What every request passes, whatever its protocol: queue, batches, workers, the wire, metrics."""
